"""`accordion bench gpu`: one accelerator, ten minutes, one file. It needs torch, numpy and safetensors, and no other package.

Parts, in the order in which one run takes them: (c) stream safety; (d) gathers and exchanges beside flat ones with copies, on one
rank; (a) one rank, a Llama of 1 B in bf16, beside no sharding and FSDP2; (f) what `accordion plan` says of three sizes beside
what is measured, with and without one measured step given; (e) compiled blocks; (b) one of 8 to 64 simulated ranks, memory and
time of 8 B and 70 B; and only where asked for (`--parts g`, 128 GiB of host memory): (g) offload of 6.7 B and 13 B.

Figures are written as they come, and tables printed. What fails, runs out of memory or does not answer is told of, and the others
still run. A part, and a row of (b), begins if the time that is left is what it is thought to take; one that is left out says so.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accordion.bench.gpu.compiled import compiled
from accordion.bench.gpu.findings import Findings
from accordion.bench.gpu.offload import offloaded
from accordion.bench.gpu.one_rank import one_rank
from accordion.bench.gpu.planned import planned
from accordion.bench.gpu.simulated import simulated
from accordion.bench.gpu.sizes import GIB, ROOM_GIB, PartSizes, full_sizes, tiny_sizes
from accordion.bench.gpu.streams import safety
from accordion.bench.gpu.wires import wires
from accordion.devices import devices_here, devices_named
from accordion.errors import UsageError
from accordion.options import read
from accordion.pages.machine import describe
from accordion.pages.page import as_text
from accordion.workers.ranks import BenchError

LAST_S = 570  # of a run: no answer is waited for longer
PATIENCE_S = 110  # for one answer of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPart:
    """`seconds`: thought to be enough on an H100, and for (b) enough for its first row; no part has run on one yet."""

    run: Callable[[PartSizes, str, Findings], None]
    seconds: float
    patience_s: float = PATIENCE_S


PARTS: dict[str, BenchPart] = {
    "a": BenchPart(
        run=lambda sizes, device, out: one_rank(sizes.one_rank, device, sizes.rounds, sizes.steps, out), seconds=110
    ),
    "b": BenchPart(run=lambda sizes, device, out: simulated(sizes.simulated, device, out), seconds=40),
    "c": BenchPart(run=lambda sizes, device, out: safety(sizes.safe, device, out), seconds=70),
    "d": BenchPart(run=lambda sizes, device, out: wires(sizes.unit_bytes, 5 * sizes.steps, device, out), seconds=15),
    "e": BenchPart(
        run=lambda sizes, device, out: compiled(sizes.one_rank, sizes.compiler, device, sizes.rounds, sizes.steps, out),
        seconds=100,
    ),
    "f": BenchPart(
        run=lambda sizes, device, out: planned(sizes.planned, sizes.card, device, sizes.steps, out), seconds=75
    ),
    "g": BenchPart(  # pins most of the host's memory first
        run=lambda sizes, device, out: offloaded(sizes.offload, sizes.link_bytes, sizes.steps, device, out),
        seconds=400,
        patience_s=400,
    ),
}
IN_ORDER = "cdafeb"  # what tells soonest first, and last (b), which takes as many rows as there is time for


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Measure one accelerator.

    Args:
        parts: letters, in the order in which they run
        device: auto, cpu, or the type of device of this machine
        tiny: small shapes, which check the benchmark and measure nothing
        dir: folder; a file of today's is added to
    """

    parts: str = IN_ORDER
    device: str = "auto"
    tiny: bool = False
    dir: str = "runs/bench"


def run(words: Sequence[str]) -> int:
    """What `words` ask for. Returns the exit code, 1 if a part failed. Raises `UsageError` before anything is measured."""
    options = read(GpuOptions, words, "accordion bench gpu", __doc__ or "")
    if options is None:
        return 0
    if unknown := set(options.parts) - set(PARTS):
        raise UsageError(f"parts {''.join(sorted(unknown))!r} do not exist; take letters of {''.join(PARTS)!r}.")
    devices = devices_named(options.device, "--device", devices_here())
    if devices.is_cpu and not options.tiny:
        raise UsageError("no accelerator is found; check the driver, or check the benchmark with --tiny --device cpu.")
    memory_gib = ROOM_GIB if devices.is_cpu else torch.accelerator.get_memory_info()[1] / GIB
    head = {"machine": describe(devices.type), "date": datetime.date.today().isoformat(), "tiny": options.tiny}
    path = file_of(options.dir, head)
    before = earlier(path, head)

    def write(results: dict[str, Any]) -> None:
        new = {letter: part for letter, part in results.items() if "skipped" not in part or letter not in before}
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps({**head, "parts": {**before, **new}}, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)  # whatever ends the run, the file is whole

    start, sizes = time.monotonic(), tiny_sizes() if options.tiny else full_sizes(memory_gib)
    failed = run_parts(options.parts, sizes, devices.type, write, limited=not options.tiny)
    print(f"{time.monotonic() - start:.0f} s; written: {path}")
    return 1 if failed else 0


def file_of(folder: str, head: dict[str, Any]) -> Path:
    """The day's file of this device, in `folder`, which is made. Raises `UsageError` where nothing can be written."""
    name = re.sub(r"[^a-z0-9]+", "-", head["machine"]["device"].lower()).strip("-")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--dir is {folder!r}, where nothing can be written: {error.strerror}; take another folder."
        ) from None
    return Path(folder, f"gpu-{name}-{head['date']}{'-tiny' if head['tiny'] else ''}.json")


def earlier(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The parts that a run of the same day on the same machine has left in the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["parts"]) if all(found[key] == value for key, value in head.items()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def run_parts(
    letters: str, sizes: PartSizes, device: str, write: Callable[[dict[str, Any]], None], *, limited: bool
) -> list[str]:
    """One part after the other; `write` gets all results as they come. Returns the letters of those that failed.

    `limited`: within `LAST_S`; a part that needs more than is left is passed over, and those after it that fit still run.
    """
    results, failed = dict[str, Any](), []
    end = time.monotonic() + (LAST_S if limited else math.inf)
    for letter in dict.fromkeys(letters):
        left_s = end - time.monotonic()
        if PARTS[letter].seconds > left_s:
            results[letter] = {"skipped": f"{left_s:.0f} s were left of {LAST_S}"}
            print(f"({letter}) left out: it takes {PARTS[letter].seconds:g} s and {left_s:.0f} are left;", end=" ")
            print(f"--parts {letter} adds it to the file", flush=True)
            write(results)
        elif not one_part(letter, sizes, device, results, write, end if limited else math.inf):
            failed.append(letter)
    return failed


def one_part(
    letter: str,
    sizes: PartSizes,
    device: str,
    results: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
    end: float,
) -> bool:
    """Run and print one part, `results` of which are written as they come. Whether all of it ran."""
    began, part = time.monotonic(), PARTS[letter]

    def keep() -> None:
        results[letter] = out.plain(seconds=time.monotonic() - began)
        write(results)

    out = Findings(keep) if end == math.inf else Findings(keep, end=end, patience_s=part.patience_s)
    try:
        part.run(sizes, device, out)
    except Exception as error:  # whatever it is, the other parts' figures are worth having
        if not isinstance(error, BenchError):
            traceback.print_exc()
        out.fail("the part", error)
    keep()
    print("\n\n".join(map(as_text, out.tables)), end="\n\n", flush=True)
    if out.untold:
        print(f"({letter}) not told here: {'; '.join(out.untold)}", flush=True)
    if out.failures:
        print(f"({letter}) failed: {'; '.join(out.failures)}", flush=True)
    return not out.failures
