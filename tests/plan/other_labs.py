"""Steps that other labs published, and what a trace says of each. No rate was fitted to them; only the range counts them.

    python -m tests.plan.other_labs     # trace all rows anew (minutes), and write the data file

torchtitan's are FSDP2, eager: benchmarks/llama3_h100_202412_torchtitan.md, and docs/performance.md of mid-2024 on 64 A100.
fms-fsdp's are FSDP1 on 128 A100, without torch.compile: its README of mid-2024. Neither says how fast the network of its A100 is;
25 GB/s a card is assumed. The planned step is this engine's, of transformers' Llama: its norms and rotary positions are by hand,
and not always the lab's. "selective layer" is `every:2`, "selective op" `selective`.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accordion.config import Precision
from accordion.models.llama import PUBLISHED, LlamaShape, llama_config
from accordion.plan.events import Log
from accordion.plan.hardware import GIB, GPUS, Cluster, Gpu
from accordion.plan.replay.predict import log_of, memory_of, step_of
from accordion.plan.replay.timeline import Step
from accordion.plan.trained_models import Kernels, language_subject
from tests.plan import builders

ROWS = Path(__file__).with_suffix(".csv")
SHAPES = {
    **PUBLISHED,
    "llama2-34b": LlamaShape(vocab=32000, hidden=8192, layers=48, heads=64, kv_heads=8, mlp=22016),
    "llama2-70b": LlamaShape(vocab=32000, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """A published step, and what a plan says of it: GiB needed of the card, and seconds as in `published_steps`."""

    lab: str
    model: str
    gpu: str
    gpus: int
    network_gbps: float
    seq: int
    micro_batch: int
    strategy: str
    checkpoint_activations: str
    loss: str
    reduce: str
    published_tokens_per_s_per_gpu: float
    needed_gib: float = 0.0
    products_peak_s: float = 0.0
    attention_peak_s: float = 0.0
    elementwise_peak_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def ratio(self) -> float:
        """By how much the published step is faster than planned at the frozen constants."""
        gpu = GPUS[self.gpu]
        peaks = (self.products_peak_s, self.attention_peak_s, self.elementwise_peak_s)
        shares = (gpu.products, gpu.attention, gpu.elementwise)
        planned_s = sum(s / share for s, share in zip(peaks, shares, strict=True)) + self.exposed_s
        return planned_s / (self.micro_batch * self.seq / self.published_tokens_per_s_per_gpu)


def read(path: Path, kind: Any) -> list[Any]:
    """Return the lines of a table as values of the dataclass `kind`."""
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    with path.open(newline="") as file:
        return [
            kind(**{f.name: kinds[str(f.type)](told[f.name]) for f in fields(kind) if told.get(f.name)})
            for told in csv.DictReader(file)
        ]


def write(path: Path, rows: Sequence[Any]) -> None:
    names = [f.name for f in fields(rows[0])]
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(names)
        for row in rows:
            values = [getattr(row, name) for name in names]
            table.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def planned(row: Any, log: Log, step: Step, gpu: Gpu) -> Any:
    """Return `row` with what a plan says of it: GiB needed of the card, and seconds at its peaks."""
    return replace(
        row,
        needed_gib=memory_of(log).needed_bytes / GIB,
        products_peak_s=step.by_kind["products"] * gpu.products,
        attention_peak_s=step.by_kind["attention"] * gpu.attention,
        elementwise_peak_s=(step.by_kind["element-wise"] + step.by_kind["optimizer"]) * gpu.elementwise,
        exposed_s=step.exposed_s,
    )


def rows() -> list[LabRow]:
    return read(ROWS, LabRow)


def ratios(kind: str) -> dict[str, np.ndarray]:
    """By lab, of its rows on that kind of card."""
    mine = [r for r in rows() if GPUS[r.gpu].kind == kind]
    return {lab: np.array([r.ratio for r in mine if r.lab == lab]) for lab in dict.fromkeys(r.lab for r in mine)}


def traced(row: LabRow) -> LabRow:
    """`row` with what a plan says of it."""
    torch.set_num_threads(1)
    gpu = GPUS[row.gpu]
    cluster = Cluster(gpu=gpu, network_gbps=row.network_gbps)
    reduce = torch.bfloat16 if row.reduce == "bf16" else torch.float32
    run = builders.choice(
        strategy=row.strategy, checkpoint_activations=row.checkpoint_activations, micro_batch=row.micro_batch,
        gpus=row.gpus, replicas=row.gpus // cluster.node if row.strategy == "hybrid_shard" else 1,
        precision=Precision(params=torch.bfloat16, reduce=reduce),
    ).setup()  # fmt: skip
    config = llama_config(SHAPES[row.model], row.seq)
    log, _ = log_of(language_subject(config, row.model, row.micro_batch, row.seq, kernels=Kernels(loss=row.loss)), run)
    print(row.lab, row.model, row.checkpoint_activations, file=sys.stderr)
    return planned(row, log, step_of(log, run, cluster), gpu)


def report(found: list[LabRow], inside: list[bool]) -> str:
    """`inside`: of each row, whether a range that was made without its lab holds it."""
    lines = [
        f"{r.lab:10} {r.model:10} {r.gpu:8} {r.gpus:4} GPUs, micro-batch {r.micro_batch}, {r.checkpoint_activations:9} "
        f"published {r.published_tokens_per_s_per_gpu:6,.0f}, planned {1 / r.ratio - 1:+6.1%}, "
        f"{'in' if held else 'outside of'} the range, needs {r.needed_gib:.1f} GiB"
        for r, held in zip(found, inside, strict=True)
    ]
    off = np.array([1 / r.ratio - 1 for r in found])
    lines.append(
        f"mean absolute error {np.abs(off).mean():.1%}, bias {off.mean():+.1%}, {sum(inside)} of {len(found)} in the range"
    )
    return "\n".join(lines)


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        write(ROWS, list(pool.map(traced, rows())))


if __name__ == "__main__":
    main()
