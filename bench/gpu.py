"""What an accelerator shows: `python bench/gpu.py`, one GPU, under ten minutes, torch and this repository.

Parts: (a) one rank, a Llama of 1 B in bf16, beside no sharding and FSDP2; (b) one of 8 to 64 simulated ranks, memory and
time of 8 B and 70 B; (c) stream safety; (d) gathers and exchanges beside flat ones with copies; (e) compiled blocks; (f) what
`accordion plan` says of three sizes beside what is measured, with and without one measured step given; (g) only where asked
for (`--parts g`, 128 GiB of host memory): offload of 6.7 B beside FSDP2's, and 13 B. Writes
`bench/results/<gpu>-<date>.json` after each part, and prints its tables. A part that fails, runs out of memory or does not
answer is told of, and the others still run; a smaller GPU gets a smaller model in (a) and (e).
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
from gpu_offload import PEER, STEPPED_HERE, STEPPED_ON_HOST, OffloadCase, offloaded  # noqa: E402
from gpu_planned import planned  # noqa: E402
from gpu_programs import Case, SafeRuns, Wires, shape_trainer  # noqa: E402

from accordion.bench.contenders import OURS  # noqa: E402
from accordion.bench.machine import describe, known_peak_flops  # noqa: E402
from accordion.bench.page import Table, as_text, plain_data, spread  # noqa: E402
from accordion.bench.ranks import BenchError, Team, World, interleaved  # noqa: E402
from accordion.bench.stats import compare_losses, extremes, flat, quartiles, ratio  # noqa: E402
from accordion.config import STRATEGIES  # noqa: E402
from accordion.train.config import PRESETS, Preset  # noqa: E402

LLAMA_70B = Preset(vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672)
LLAMA_7B = Preset(vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11008)
LLAMA_13B = Preset(vocab=32000, hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824)
SMALL = Preset(vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, mlp=768)
ENOUGH_S = 480  # no part begins after so long, and (b) begins nothing after three quarters of it
PATIENCE_S = 110  # for one answer of a rank
ROOM_GIB = 70  # what (a) takes: three contenders between steps, and the peak of one
STATE_BYTES = 12  # a parameter: 2 of itself, 2 of its gradient, 8 of the optimizer
BF16_TOLERANCE = 2e-2  # of losses, relative
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
    until: float = math.inf  # of time.monotonic(): after it (b) begins nothing


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


def params_of(p: Preset) -> int:
    """Parameters of a Llama of that shape."""
    head = p.hidden // p.heads
    attention = 2 * p.hidden**2 + 2 * p.hidden * p.kv_heads * head
    return p.layers * (attention + 3 * p.hidden * p.mlp + 2 * p.hidden) + 2 * p.vocab * p.hidden + p.hidden


def step_flops(case: Case) -> float:
    """Of one step of one rank, as MFU counts: 6 a parameter and token (head included, embedding not), causal attention halved."""
    p, tokens = case.preset, case.batch * case.seq
    return 6 * tokens * (params_of(p) - p.vocab * p.hidden) + 6 * p.layers * tokens * case.seq * p.hidden


def world_of(device: str, num_ranks: int = 1, threads: int = 8, **more: Any) -> World:
    """Ranks that share the device; on a CPU each takes one thread."""
    threads = 1 if device == "cpu" else threads
    return World(num_ranks=num_ranks, device_type=device, threads=threads, patience_s=PATIENCE_S, **more)


# -- the parts: each returns its numbers and its tables


def one_rank(sizes: Sizes, device: str) -> tuple[Any, list[Table]]:
    """(a) Step time, MFU and memory of one rank."""
    found, tables = {}, []
    # Masters take twice the memory, and three contenders are alive at once: half the layers.
    halved = replace(sizes.one_rank.preset, layers=max(1, sizes.one_rank.preset.layers // 2))
    cases = {"bf16": sizes.one_rank, "fp32 masters": replace(sizes.one_rank, preset=halved, masters=True)}
    for name, case in cases.items():
        found[name] = turns_of(dict.fromkeys(("plain", OURS, "fsdp2"), case), device, sizes)
        peak = known_peak_flops(describe(device)["device"], bf16=True)
        rows = []
        wrong = compare_losses({contender: f["losses"] for contender, f in found[name].items()}, BF16_TOLERANCE).wrong
        for contender, f in found[name].items():
            step = quartiles(flat(f["steps"]))
            mfu = f"{100 * step_flops(case) / step.median / peak:.1f}" if peak else "peak unknown"
            over = spread(ratio(f["steps"], found[name]["plain"]["steps"]), 1, 4)
            memory = f"{f['memory']['allocated'] / GIB:.2f}"
            share = spread(extremes(added(found[name])), 1, 3) if contender == OURS else ""
            loss = f"{f['losses'][-1]:.4f}{' WRONG' if contender in wrong else ''}"
            rows.append([contender, spread(step, 1e3, 2), mfu, over, share, f"{f['host_ms']:.2f}", memory, loss])
        columns = ["", "step ms", "MFU %", "over plain", "of what FSDP2 adds", "host ms", "peak GiB", "third loss"]
        title = f"(a) one rank, {name}, {params_of(case.preset) / 1e9:.2f} B, batch {case.batch} x {case.seq}"
        tables.append(Table(title=title, columns=columns, rows=rows))
    return found, tables


def added(found: dict[str, Any]) -> list[float]:
    """What ours adds to plain over what FSDP2 adds, by round."""
    by_round = {n: [quartiles(turn).median for turn in f["steps"]] for n, f in found.items()}
    plain, ours, theirs = by_round["plain"], by_round[OURS], by_round["fsdp2"]
    return [(a - p) / (b - p) if b != p else 0.0 for p, a, b in zip(plain, ours, theirs, strict=True)]


def turns_of(cases: dict[str, Case], device: str, sizes: Sizes) -> dict[str, Any]:
    """Interleaved turns; a key is a contender, or a contender, a blank and what is particular."""
    found: dict[str, Any] = {}
    world = world_of(device)
    with ExitStack() as stack:
        teams = []
        for name, case in cases.items():
            start = time.perf_counter()
            teams.append(stack.enter_context(Team(name, world, shape_trainer, (name.split()[0], case))))
            losses = teams[-1].ask("losses", 3)[0]
            found[name] = {"losses": losses, "started_s": time.perf_counter() - start}
        for team in teams:
            found[team.name]["memory"] = team.ask("memory")[0]
        asked = interleaved(teams, sizes.rounds, "turn", 2, sizes.steps)
    for name, rounds in asked.items():
        found[name]["steps"] = [[t["step"] for t in answers[0]] for answers in rounds]
        found[name]["host_ms"] = 1e3 * quartiles([t["host"] for answers in rounds for t in answers[0]]).median
    return found


def simulated(sizes: Sizes, device: str) -> tuple[Any, list[Table]]:
    """(b) Peak memory and compute-side time as one of many ranks, one contender at a time on the device."""
    found: dict[str, Any] = {}
    rows = []
    for shape, (case, counts) in sizes.simulated.items():
        for num_ranks in counts:
            if time.monotonic() > sizes.until:
                rows.append([shape, str(num_ranks), "left out: no time", "", "", "", "", "", ""])
                continue
            here = {name: alone(name, case, num_ranks, device) for name in (OURS, "fsdp2")}
            found[f"{shape} at {num_ranks}"] = here
            state = STATE_BYTES * params_of(case.preset) / num_ranks / GIB
            peaks = {name: f["memory"]["allocated"] for name, f in here.items() if "memory" in f}
            over = f"{peaks[OURS] / peaks['fsdp2']:.3f}" if len(peaks) == 2 else ""
            for name, f in here.items():
                if "failed" in f:
                    cells = ["does not run: " + f["failed"], "", "", ""]
                else:
                    sizes_gib = [f"{f['memory'][key] / GIB:.2f}" for key in ("rest", "allocated", "reserved")]
                    cells = [*sizes_gib, spread(quartiles(f["steps"]), 1e3, 1)]
                rows.append([shape, str(num_ranks), name, f"{state:.2f}", *cells, over if name == OURS else ""])
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
    return found, [Table(title=title, columns=columns, rows=rows)]


def alone(name: str, case: Case, num_ranks: int, device: str) -> dict[str, Any]:
    world = world_of(device, num_ranks, group="fake")
    try:
        with Team(name, world, shape_trainer, (name, case)) as team:
            team.ask("losses", 2)
            memory, times = team.ask("memory")[0], team.ask("turn", 0, 3)[0]
    except BenchError as error:  # out of memory is a result
        return {"failed": str(error)[:200]}
    return {"memory": memory, "steps": [t["step"] for t in times]}


def safety(sizes: Sizes, device: str) -> tuple[Any, list[Table]]:
    """(c) Losses under the debug mode beside DistributedDataParallel's, and the stream of each collective."""
    found: dict[str, Any] = {}
    rows = []
    for num_ranks in (2, 4):
        names = [n for n, s in STRATEGIES.items() if not s.hybrid or num_ranks == 4]
        world = world_of(device, num_ranks, threads=1, backend="gloo")
        with Team(f"{num_ranks} ranks", world, SafeRuns, (sizes.safe,)) as team:
            losses = {n: [mean(s) for s in zip(*team.ask("losses", n, 4), strict=True)] for n in ("ddp", *names)}
        verdict = compare_losses(losses, 1e-3)
        found[f"{num_ranks} ranks"] = verdict
        rows += [[n, str(num_ranks), f"{v[-1]:.5f}", "NO" if n in verdict.wrong else "yes"] for n, v in losses.items()]
    tables = [
        Table(
            title='(c) debug="streams", ranks sharing the device',
            columns=["", "ranks", "last loss", "agrees"],
            rows=rows,
        )
    ]
    with Team("wires", world_of(device, threads=1), Wires) as team:
        found["streams"] = team.ask("streams")[0]
    rows = [[n, ", ".join(f["work"])[:90] or "none", str(f["on_lane"])] for n, f in found["streams"].items()]
    tables.append(
        Table(title="(c) work of each collective, world size 1", columns=["", "work", "on our stream"], rows=rows)
    )
    return found, tables


def wires(sizes: Sizes, device: str) -> tuple[Any, list[Table]]:
    """(d) Device time of a unit's gather and reduce."""
    found = {}
    rows = []
    with Team("wires", world_of(device, threads=1), Wires) as team:
        for num_bytes in sizes.unit_bytes:
            times = found[str(num_bytes)] = team.ask("unit", num_bytes, 5 * sizes.steps)[0]
            ms = {name: spread(quartiles(values), 1e3, 3) for name, values in times.items()}
            ratios = [ratio([times[n]], [times[f"flat {n}"]]).median for n in ("gather", "reduce")]
            cells = [
                ms["gather"],
                ms["flat gather"],
                f"{ratios[0]:.3f}",
                ms["reduce"],
                ms["flat reduce"],
                f"{ratios[1]:.3f}",
            ]
            rows.append([f"{num_bytes / 1e6:g} MB", *cells])
    columns = ["unit", "gather ms", "flat ms", "ratio", "exchange ms", "flat ms", "ratio"]
    return found, [Table(title="(d) a unit in bf16 on one rank, device time", columns=columns, rows=rows)]


def compiled(sizes: Sizes, device: str) -> tuple[Any, list[Table]]:
    """(e) Blocks compiled and not."""
    preset = replace(sizes.one_rank.preset, layers=max(1, sizes.one_rank.preset.layers // 4))
    case = replace(sizes.one_rank, preset=preset)
    names = ("plain", OURS, "fsdp2")
    cases = dict.fromkeys(names, case) | {f"{n} compiled": replace(case, compiled=sizes.compiler) for n in names}
    found = turns_of(cases, device, sizes)
    rows = []
    for name, f in found.items():
        base = "plain" + name.removeprefix(name.split()[0])
        step, over = quartiles(flat(f["steps"])), ratio(f["steps"], found[base]["steps"])
        rows.append([name, spread(step, 1e3, 2), spread(over, 1, 4), f"{f['started_s']:.1f}", f"{f['losses'][-1]:.4f}"])
    columns = ["", "step ms", "over plain", "start and 3 steps, s", "third loss"]
    title = f"(e) blocks compiled ({sizes.compiler}) and not, {params_of(preset) / 1e9:.2f} B"
    return found, [Table(title=title, columns=columns, rows=rows)]


PARTS: dict[str, Callable[[Sizes, str], tuple[Any, list[Table]]]] = {
    "a": one_rank,
    "b": simulated,
    "c": safety,
    "d": wires,
    "e": compiled,
    "f": lambda sizes, device: planned(sizes.planned, device, sizes.steps),
    "g": lambda sizes, device: offloaded(sizes.offload, sizes.link_bytes, sizes.steps, world_of(device, threads=16)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, which check this script")
    parser.add_argument(
        "--parts", default="acdebf", help="letters of the parts to run; g asks for much memory of the host"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"parts {''.join(sorted(unknown))!r} do not exist; take letters of {''.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is found; check `nvidia-smi`, or check this script with --tiny --device cpu")
    memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB if options.device == "cuda" else ROOM_GIB
    machine, today = describe(options.device), datetime.date.today().isoformat()
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name}-{today}{'-tiny' if options.tiny else ''}.json"

    def write(results: dict[str, Any]) -> None:
        head = {"machine": machine, "date": today, "tiny": options.tiny}
        path.write_text(json.dumps({**head, "parts": results}, indent=1) + "\n")

    start = time.monotonic()
    failed = run(options.parts, tiny_sizes() if options.tiny else full_sizes(memory_gib), options.device, write)
    print(f"{time.monotonic() - start:.0f} s; written: {path}")
    return 1 if failed else 0


def run(letters: str, sizes: Sizes, device: str, write: Callable[[dict[str, Any]], None]) -> list[str]:
    """One part after the other; `write` gets all results after each. Returns the letters of those that failed."""
    start, results, failed = time.monotonic(), dict[str, Any](), []
    sizes = replace(sizes, until=start + 0.75 * ENOUGH_S)
    for letter in letters:
        began = time.monotonic()
        if began - start > ENOUGH_S:
            results[letter] = {"skipped": f"{ENOUGH_S} s had passed"}
            print(f"({letter}) left out: {ENOUGH_S} s have passed")
            continue
        try:
            data, tables = PARTS[letter](sizes, device)
        except Exception as error:  # whatever it is, the other parts' figures are worth having
            if not isinstance(error, BenchError):
                traceback.print_exc()
            failed.append(letter)
            results[letter] = {"failed": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
            print(f"({letter}) failed: {error}", flush=True)
        else:
            seconds = time.monotonic() - began
            results[letter] = {"seconds": seconds, "data": plain_data(data), "tables": plain_data(tables)}
            print("\n\n".join(map(as_text, tables)), end="\n\n", flush=True)
        write(results)
    write(results)
    return failed


if __name__ == "__main__":  # rank processes import this module again under another name
    sys.exit(main())
