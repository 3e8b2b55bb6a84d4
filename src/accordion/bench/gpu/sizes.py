"""What each part takes, on an accelerator or with small shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from accordion.bench.gpu.cases import Case
from accordion.bench.gpu.measure import MeasureSizes
from accordion.bench.gpu.offload import PEER, STEPPED_HERE, STEPPED_ON_HOST, OffloadCase
from accordion.bench.gpu.simulated import Row
from accordion.models.llama import PUBLISHED, TRAINED, LlamaShape

GIB = 2**30
ROOM_GIB = 70  # what (a) takes: three contenders between steps, and the peak of one


SMALL = LlamaShape(vocab=512, hidden=256, layers=4, heads=4, kv_heads=2, mlp=768)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """What the parts take, on an accelerator, or to check the benchmark."""

    one_rank: Case
    rounds: int
    steps: int
    simulated: tuple[Row, ...]
    safe: LlamaShape
    unit_bytes: tuple[int, ...]
    compiler: str
    planned: tuple[Case, ...]
    card: MeasureSizes | None  # of what is measured of a card that the planner does not know; None for the usual
    offload: dict[str, tuple[OffloadCase, tuple[str, ...]]]
    link_bytes: int


def full_sizes(memory_gib: float = ROOM_GIB) -> PartSizes:
    """For a device with so much memory: half of `ROOM_GIB` halves the layers and the batch of (a) and (e), and so on."""
    halvings = max(0, math.ceil(math.log2(ROOM_GIB / memory_gib)))
    llama = TRAINED["llama-1b"]
    big = partial(Case, recompute=True, wide=True, meta=True)
    of_8b, of_70b = (
        big(preset=PUBLISHED["llama3-8b"], batch=1, seq=2048),
        big(preset=PUBLISHED["llama3-70b"], batch=1, seq=1024),
    )
    return PartSizes(
        one_rank=Case(
            preset=replace(llama, layers=max(2, llama.layers >> halvings)), batch=max(1, 4 >> halvings), seq=2048
        ),
        rounds=5,
        steps=5,
        simulated=(
            Row(shape="8B", case=of_8b, num_ranks=8, seconds=40),
            Row(shape="70B", case=of_70b, num_ranks=64, seconds=60),
            Row(shape="8B", case=of_8b, num_ranks=64, seconds=40),
            Row(shape="70B", case=of_70b, num_ranks=16, seconds=60),
            Row(shape="8B", case=of_8b, num_ranks=16, seconds=40),
        ),
        safe=SMALL,
        unit_bytes=tuple(mb * 10**6 for mb in (25, 50, 100, 225, 450, 900)),
        compiler="inductor",
        planned=tuple(
            Case(preset=replace(llama, layers=layers), batch=batch, seq=2048, masters=True)
            for layers, batch in ((4, 4), (8, 4), (16, 2))
        ),
        card=None,
        offload={
            "6.7B": (
                OffloadCase(preset=PUBLISHED["llama2-7b"], batch=4, seq=2048),
                (STEPPED_ON_HOST, STEPPED_HERE, PEER),
            ),
            "13B": (
                OffloadCase(preset=PUBLISHED["llama2-13b"], batch=1, seq=1024, host_bytes=90 * GIB),
                (STEPPED_HERE,),
            ),
        },
        link_bytes=GIB,
    )


def tiny_sizes() -> PartSizes:
    preset = LlamaShape(vocab=64, hidden=32, layers=2, heads=2, kv_heads=2, mlp=64)
    return PartSizes(
        one_rank=Case(preset=preset, batch=1, seq=16),
        rounds=1,
        steps=1,
        simulated=tuple(
            Row(
                shape="tiny",
                case=Case(preset=preset, batch=1, seq=16, recompute=True, wide=True, meta=True),
                num_ranks=num,
            )
            for num in (8, 16)
        ),
        safe=preset,
        unit_bytes=(10**5,),
        compiler="aot_eager",
        planned=tuple(Case(preset=replace(preset, layers=n), batch=1, seq=16, masters=True) for n in (1, 2, 3)),
        card=MeasureSizes(products=(64, 128), seq=64, copy_bytes=1 << 22, message_bytes=1 << 16, seconds=0.02),
        offload={
            "tiny": (OffloadCase(preset=preset, batch=1, seq=16), (STEPPED_ON_HOST, PEER)),
            "tiny, less host": (OffloadCase(preset=preset, batch=1, seq=16, host_bytes=300_000), (STEPPED_HERE,)),
        },
        link_bytes=2**20,
    )
