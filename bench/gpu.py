"""What an accelerator shows: `python bench/gpu.py`, one GPU, under ten minutes, torch and this repository.

Parts: (a) one rank, a Llama of 1 B in bf16, beside no sharding and FSDP2; (b) one of 8 to 64 simulated ranks, memory and
time of 8 B and 70 B; (c) stream safety; (d) gathers and exchanges beside flat ones with copies; (e) compiled blocks; (f) what
`accordion plan` says of three sizes beside what is measured, with and without one measured step given; (g) only where asked
for (`--parts g`, 128 GiB of host memory): offload of 6.7 B beside FSDP2's, and 13 B. Writes
`bench/results/<gpu>-<date>.json` as figures come, adding to one of the same day, and prints tables. What fails, runs out of
memory or does not answer is told of, and the others still run; a smaller GPU gets a smaller model in (a) and (e).
`--tiny --device cpu` runs every part with small shapes: it checks this script and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402
from gpu_found import Findings  # noqa: E402
from gpu_offload import PEER, STEPPED_HERE, STEPPED_ON_HOST, OffloadCase, offloaded  # noqa: E402
from gpu_planned import planned  # noqa: E402
from gpu_programs import Case, SafeRuns, Wires, shape_trainer  # noqa: E402
from gpu_turns import compiled, one_rank, params_of  # noqa: E402

from accordion.bench.contenders import OURS  # noqa: E402
from accordion.bench.machine import describe  # noqa: E402
from accordion.bench.page import Table, as_text, spread  # noqa: E402
from accordion.bench.ranks import BenchError, Team  # noqa: E402
from accordion.bench.stats import compare_losses, quartiles, ratio  # noqa: E402
from accordion.config import STRATEGIES  # noqa: E402
from accordion.train.config import PRESETS, Preset  # noqa: E402

LLAMA_70B = Preset(vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672)
LLAMA_7B = Preset(vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11008)
LLAMA_13B = Preset(vocab=32000, hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824)
SMALL = Preset(vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, mlp=768)
ENOUGH_S = 480  # on a GPU no part begins after so long, and (b) begins nothing after three quarters of it
LAST_S = 570  # nor is an answer waited for
PATIENCE_S = {"": 110, "g": 400}  # for one answer of a rank, by part; (g) pins most of the host's memory first
ROOM_GIB = 70  # what (a) takes: three contenders between steps, and the peak of one
STATE_BYTES = 12  # a parameter: 2 of itself, 2 of its gradient, 8 of the optimizer
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the parts take, for a GPU or for a check of this script."""

    one_rank: Case
    rounds: int
    steps: int
    simulated: dict[str, tuple[Case, tuple[int, ...]]]
    safe: Preset
    unit_bytes: tuple[int, ...]
    compiler: str
    planned: tuple[Case, ...]
    offload: dict[str, tuple[OffloadCase, tuple[str, ...]]]
    link_bytes: int


def full_sizes(memory_gib: float = ROOM_GIB) -> Sizes:
    """For a GPU with so much memory: half of `ROOM_GIB` halves the layers and the batch of (a) and (e), and so on."""
    halvings = max(0, math.ceil(math.log2(ROOM_GIB / memory_gib)))
    llama = PRESETS["llama-1b"]
    big = partial(Case, recompute=True, wide=True, meta=True)
    return Sizes(
        one_rank=Case(
            preset=replace(llama, layers=max(2, llama.layers >> halvings)), batch=max(1, 4 >> halvings), seq=2048
        ),
        rounds=5,
        steps=5,
        simulated={
            "8B": (big(preset=PRESETS["llama-8b"], batch=1, seq=2048), (8, 16, 64)),
            "70B": (big(preset=LLAMA_70B, batch=1, seq=1024), (16, 64)),
        },
        safe=SMALL,
        unit_bytes=tuple(mb * 10**6 for mb in (25, 50, 100, 225, 450, 900)),
        compiler="inductor",
        planned=tuple(
            Case(preset=replace(llama, layers=layers), batch=batch, seq=2048, masters=True)
            for layers, batch in ((4, 4), (8, 4), (16, 2))
        ),
        offload={
            "6.7B": (OffloadCase(preset=LLAMA_7B, batch=4, seq=2048), (STEPPED_ON_HOST, STEPPED_HERE, PEER)),
            "13B": (OffloadCase(preset=LLAMA_13B, batch=1, seq=1024, host_bytes=90 * GIB), (STEPPED_HERE,)),
        },
        link_bytes=GIB,
    )


def tiny_sizes() -> Sizes:
    preset = Preset(vocab=64, hidden=32, layers=2, heads=2, kv_heads=2, mlp=64)
    return Sizes(
        one_rank=Case(preset=preset, batch=1, seq=16),
        rounds=1,
        steps=1,
        simulated={"tiny": (Case(preset=preset, batch=1, seq=16, recompute=True, wide=True, meta=True), (8,))},
        safe=preset,
        unit_bytes=(10**5,),
        compiler="aot_eager",
        planned=tuple(Case(preset=replace(preset, layers=n), batch=1, seq=16, masters=True) for n in (1, 2, 3)),
        offload={
            "tiny": (OffloadCase(preset=preset, batch=1, seq=16), (STEPPED_ON_HOST, PEER)),
            "tiny, less host": (OffloadCase(preset=preset, batch=1, seq=16, host_bytes=300_000), (STEPPED_HERE,)),
        },
        link_bytes=2**20,
    )


# -- the parts: each keeps its numbers and tables as they come


def simulated(sizes: Sizes, device: str, out: Findings) -> None:
    """(b) Peak memory and compute-side time as one of many ranks, one contender at a time on the device."""
    columns = [
        "shape",
        "ranks",
        "",
        "12 B a parameter, GiB",
        "held GiB",
        "peak GiB",
        "reserved GiB",
        "step ms",
        "peak ratio",
    ]
    title = "(b) one of many simulated ranks, bf16, optimizer of 8 bytes a parameter, activations recomputed"
    rows: list[list[str]] = []
    for shape, (case, counts) in sizes.simulated.items():
        for num_ranks in counts:
            if out.is_late:
                rows.append([shape, str(num_ranks), "left out: no time", *[""] * 6])
                continue
            here = {name: alone(name, case, num_ranks, device, out) for name in (OURS, "fsdp2")}
            out.data[f"{shape} at {num_ranks}"] = here
            state = STATE_BYTES * params_of(case.preset) / num_ranks / GIB
            peaks = {name: f["memory"]["allocated"] for name, f in here.items() if "memory" in f}
            over = f"{peaks[OURS] / peaks['fsdp2']:.3f}" if len(peaks) == 2 and peaks["fsdp2"] else ""
            for name, f in here.items():
                if "failed" in f:
                    cells = ["does not run: " + f["failed"][:90], "", "", ""]
                else:
                    sizes_gib = [f"{f['memory'][key] / GIB:.2f}" for key in ("rest", "allocated", "reserved")]
                    cells = [*sizes_gib, spread(quartiles(f["steps"]), 1e3, 1)]
                rows.append([shape, str(num_ranks), name, f"{state:.2f}", *cells, over if name == OURS else ""])
            out.keep(Table(title=title, columns=columns, rows=list(rows)))
    out.keep(Table(title=title, columns=columns, rows=rows))


def alone(name: str, case: Case, num_ranks: int, device: str, out: Findings) -> dict[str, Any]:
    try:
        with Team(name, out.world(device, num_ranks, group="fake"), shape_trainer, (name, case)) as team:
            team.ask("losses", 2)
            memory, times = team.ask("memory")[0], team.ask("turn", 0, 3)[0]
    except BenchError as error:
        if "OutOfMemoryError" in str(error):  # a result
            return {"failed": str(error)[:300]}
        return out.fail(f"{name} at {num_ranks}", error)
    return {"memory": memory, "steps": [t["step"] for t in times]}


def safety(sizes: Sizes, device: str, out: Findings) -> None:
    """(c) Losses under the debug mode beside DistributedDataParallel's, and the stream of each collective."""
    columns = ["", "ranks", "last loss", "agrees"]
    rows: list[list[str]] = []
    for num_ranks in (2, 4):
        losses, failed = safe_losses(sizes.safe, num_ranks, device, out)
        wrong = compare_losses(losses, 1e-3).wrong if losses else []
        out.failures += [f"{n}, {num_ranks} ranks: losses are not those of the others" for n in wrong]
        out.data[f"{num_ranks} ranks"] = {"losses": losses, "wrong": wrong, "failed": failed}
        rows += [[n, str(num_ranks), f"{v[-1]:.5f}", "NO" if n in wrong else "yes"] for n, v in losses.items()]
        rows += [[n, str(num_ranks), f"does not run: {f['failed']}"[:90], "NO"] for n, f in failed.items()]
        out.keep(Table(title='(c) debug="streams", ranks sharing the device', columns=columns, rows=list(rows)))
    with Team("wires", out.world(device, threads=1), Wires) as team:
        out.data["streams"] = found = team.ask("streams")[0]
    rows = [[n, ", ".join(f["work"])[:90] or "none", str(f["on_lane"])] for n, f in found.items()]
    columns = ["", "work", "on our stream"]
    out.keep(Table(title="(c) work of each collective, world size 1", columns=columns, rows=rows))


def safe_losses(
    preset: Preset, num_ranks: int, device: str, out: Findings
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The losses under each strategy, the mean over ranks, and what each one that failed said; ranks begin anew after it."""
    losses, failed = dict[str, list[float]](), dict[str, Any]()
    with ExitStack() as stack:
        team = None
        for name in ("ddp", *(n for n, s in STRATEGIES.items() if not s.hybrid or num_ranks == 4)):
            try:
                if team is None:
                    world = out.world(device, num_ranks, threads=1, backend="gloo")
                    team = stack.enter_context(Team(f"{num_ranks} ranks", world, SafeRuns, (preset,)))
                losses[name] = [mean(step) for step in zip(*team.ask("losses", name, 4), strict=True)]
            except BenchError as error:
                team, failed[name] = None, out.fail(f"{name}, {num_ranks} ranks", error)
    return losses, failed


def wires(sizes: Sizes, device: str, out: Findings) -> None:
    """(d) Device time of a unit's gather and reduce."""
    columns = ["unit", "gather ms", "flat ms", "ratio", "exchange ms", "flat ms", "ratio"]
    rows: list[list[str]] = []
    with Team("wires", out.world(device, threads=1), Wires) as team:
        for num_bytes in sizes.unit_bytes:
            times = out.data[str(num_bytes)] = team.ask("unit", num_bytes, 5 * sizes.steps)[0]
            row = [f"{num_bytes / 1e6:g} MB"]
            for name in ("gather", "reduce"):
                mine, flat = times[name], times[f"flat {name}"]
                row += [spread(quartiles(one), 1e3, 3) for one in (mine, flat)]
                row.append(f"{ratio([mine], [flat]).median:.3f}")
            rows.append(row)
            out.keep(Table(title="(d) a unit in bf16 on one rank, device time", columns=columns, rows=list(rows)))


PARTS: dict[str, Callable[[Sizes, str, Findings], None]] = {
    "a": lambda sizes, device, out: one_rank(sizes.one_rank, device, sizes.rounds, sizes.steps, out),
    "b": simulated,
    "c": safety,
    "d": wires,
    "e": lambda sizes, device, out: compiled(sizes.one_rank, sizes.compiler, device, sizes.rounds, sizes.steps, out),
    "f": lambda sizes, device, out: planned(sizes.planned, device, sizes.steps, out),
    "g": lambda sizes, device, out: offloaded(sizes.offload, sizes.link_bytes, sizes.steps, device, out),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, which check this script")
    parser.add_argument(
        "--parts", default="abdcef", help="letters of the parts to run; g asks for much memory of the host"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder; a file of today's is added to")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"parts {''.join(sorted(unknown))!r} do not exist; take letters of {''.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is found; check `nvidia-smi`, or check this script with --tiny --device cpu")
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB if options.device == "cuda" else ROOM_GIB
    machine, today = describe(options.device), datetime.date.today().isoformat()
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out is {str(options.out)!r}, where nothing can be written: {error.strerror}")
    path = options.out / f"{name}-{today}{'-tiny' if options.tiny else ''}.json"
    head = {"machine": machine, "date": today, "tiny": options.tiny}
    before = earlier(path, head)

    def write(results: dict[str, Any]) -> None:
        new = {letter: part for letter, part in results.items() if "skipped" not in part or letter not in before}
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps({**head, "parts": {**before, **new}}, indent=1) + "\n")
        beside.replace(path)  # whatever ends the run, the file is whole

    start = time.monotonic()
    failed = run(options.parts, tiny_sizes() if options.tiny else full_sizes(memory_gib), options.device, write)
    print(f"{time.monotonic() - start:.0f} s; written: {path}")
    return 1 if failed else 0


def earlier(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The parts that a run of the same day on the same machine has left in the file."""
    try:
        found = json.loads(path.read_text())
        return dict(found["parts"]) if all(found[key] == value for key, value in head.items()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def run(letters: str, sizes: Sizes, device: str, write: Callable[[dict[str, Any]], None]) -> list[str]:
    """One part after the other; `write` gets all results as they come. Returns the letters of those that failed."""
    start, results, failed = time.monotonic(), dict[str, Any](), []
    limited = device != "cpu"  # there nothing is measured
    for letter in dict.fromkeys(letters):
        if limited and time.monotonic() - start > ENOUGH_S:
            results[letter] = {"skipped": f"{ENOUGH_S} s had passed"}
            print(f"({letter}) left out: {ENOUGH_S} s have passed; take --parts {letter}, which adds to the file")
            write(results)
            continue
        patience_s = PATIENCE_S.get(letter, PATIENCE_S[""])
        limits = {"until": start + 0.75 * ENOUGH_S, "end": start + LAST_S, "patience_s": patience_s}
        if not one_part(letter, sizes, device, results, write, limits if limited else {}):
            failed.append(letter)
    return failed


def one_part(
    letter: str,
    sizes: Sizes,
    device: str,
    results: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
    limits: dict[str, float],
) -> bool:
    """Run and print one part, `results` of which are written as they come. Whether all of it ran."""
    began = time.monotonic()

    def keep() -> None:
        results[letter] = out.plain(seconds=time.monotonic() - began)
        write(results)

    out = Findings(keep, **limits)
    try:
        PARTS[letter](sizes, device, out)
    except Exception as error:  # whatever it is, the other parts' figures are worth having
        if not isinstance(error, BenchError):
            traceback.print_exc()
        out.fail("the part", error)
    keep()
    print("\n\n".join(map(as_text, out.tables)), end="\n\n", flush=True)
    if out.failures:
        print(f"({letter}) failed: {'; '.join(out.failures)}", flush=True)
    return not out.failures


if __name__ == "__main__":  # rank processes import this module again under another name
    sys.exit(main())
