"""Test and time an all-gather and an all-to-all: the check that each rank runs, and the findings from all ranks' results."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.doctor.findings import Finding
from accordion.engine.communicator import Communicator
from accordion.engine.gloo import GlooCommunicator
from accordion.sequence.exchange import exchange
from accordion.shard.topology import communicator_over
from accordion.workers.ranks import RankSetup

REPEATS, WARMUPS = 5, 2
MESSAGE_BYTES = 2**26  # size of the gathered tensor, and of what a rank sends in an all-to-all
GB = 10**9
# By type of device: a slower rate in GB/s is a warning; and the usual rates.
SLOW = {"cpu": 0.05, "device": 1.0}
USUAL = {
    "cpu": "0.2 and more on one machine, 0.1 over a network of one gigabit",
    "device": "100 and more over NVLink, 10 and more over PCIe 4 or InfiniBand",
}
MORE_OUTPUT = "TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO print more."
REMEDIES = {  # for a slow link
    "network": "check that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the fast interface and that NCCL finds InfiniBand "
    "(NCCL_DEBUG=INFO); shard within machines (hybrid_shard) if the network stays slow.",
    "cpu": "check which processes use these cores and this memory (top); start at most as many ranks as there are cores.",
    "device": "check how the devices are linked (nvidia-smi topo -m), that PCIe access control (ACS) is off, and links are up.",
}
Answer = Mapping[str, Any]
"""The result of `RankExam.gathers` on one rank, as JSON data."""


def start(setup: RankSetup) -> RankExam:
    """Return the `RankExam` of this rank, for a job on one machine: the argument `make` of a `WorkerTeam`."""
    return RankExam(setup.rank, setup.num_ranks, setup.device, setup.num_ranks)


class RankExam:
    """Test of the messages between ranks, as one rank runs it: all ranks of the default process group call `gathers` together.
    `num_local`: number of ranks on this machine. If that is above 1 and equal on all machines, `gathers` also times an
    all-to-all between the ranks of each machine."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device, num_local: int) -> None:
        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        self._num_local = num_local

    def gathers(self) -> Answer:
        """Run an all-gather several times, test its values and time it. Collective. Returns a dict: "host": name of this
        machine, "torch": version of torch, "right": True if the first and last values of all shards are right, "gather_bytes":
        bytes that this rank receives, "gather_s": seconds of the fastest run. If an all-to-all is timed (see the class),
        also "num_near": number of its ranks, "exchange_bytes", "exchange_s". After an exception only "error": its text."""
        try:
            link = communicator_over(dist.group.WORLD, self._device)
            numel = MESSAGE_BYTES // 4 // self._num_ranks
            shard = torch.full((numel,), float(self._rank), dtype=torch.float32, device=self._device)
            full = torch.full((self._num_ranks, numel), -1.0, dtype=torch.float32, device=self._device)
            gather_s = self._seconds(lambda: _gather(link, full.view(-1), shard))
            firsts_and_lasts = full[:, [0, -1]].mean(1).tolist()
            return {
                "host": socket.gethostname(),
                "torch": torch.__version__,
                "right": firsts_and_lasts == [float(rank) for rank in range(self._num_ranks)],
                "gather_bytes": shard.nbytes * (self._num_ranks - 1),
                "gather_s": gather_s,
                **self._exchanges(),
            }
        except Exception as error:
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}

    def _exchanges(self) -> dict[str, Any]:
        near = self._num_local
        most_and_least = torch.tensor([near, -near], device=self._device)
        dist.all_reduce(most_and_least, op=dist.ReduceOp.MAX)  # machines may have different numbers of ranks
        if near == 1 or most_and_least.tolist() != [near, -near] or self._num_ranks % near:
            return {}
        group, _ = dist.new_subgroups(near)
        # As sequence parallelism sends it: (batch, heads, tokens, head dim) -> all tokens of some of the heads.
        heads = torch.zeros(1, near, MESSAGE_BYTES // 4 // near // 128, 128, device=self._device)
        seconds = self._seconds(lambda: exchange(heads, group, split=1, join=2))
        return {"num_near": near, "exchange_bytes": heads.nbytes // near * (near - 1), "exchange_s": seconds}

    def _seconds(self, work: Callable[[], object]) -> float:
        """Run `work` `WARMUPS` + `REPEATS` times, each time after a barrier. Return this rank's seconds for the fastest run
        after the warmups. Collective."""
        times_s = []
        for _ in range(WARMUPS + REPEATS):
            self._synchronize()
            dist.barrier()
            self._synchronize()
            began = time.perf_counter()
            work()
            self._synchronize()
            times_s.append(time.perf_counter() - began)
        return min(times_s[WARMUPS:])

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def _gather(link: Communicator, full: Tensor, shard: Tensor) -> None:
    """Gather the `shard` of every rank into `full`, in the way in which the engine gathers large shards, and wait for it."""
    if not (isinstance(link, GlooCommunicator) and link.sends):
        works = link.gather([full], [shard]).works
    else:
        rows = full.view(link.num_ranks, -1).unbind()
        works = link.send_each([(rows, [shard] * link.num_ranks)])
        rows[link.rank].copy_(shard)
    for work in works:
        work.wait()


def no_group(error: str) -> Finding:
    """Return the problem to report if ranks form no process group, or one of them fails. `error`: the text of that failure."""
    return Finding(
        check="ranks.group",
        severity="problem",
        found=f"ranks stopped: {error.rstrip('.')}",
        means="a training on these ranks would end or hang at the same place",
        do="usually the cause is the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), a name in /etc/hosts, or the "
        f"limit of open files (ulimit -n) or of shared memory (docker run --shm-size=8g); {MORE_OUTPUT}",
    )


def judged(answers: Sequence[Answer], device_type: str) -> list[Finding]:
    """Return the findings on the process group, on the values of the all-gather, and with several ranks on the rates of the
    all-gather and, if it was timed, the all-to-all. `answers`: results of `RankExam.gathers`, in rank order. If ranks failed,
    return only the finding of `no_group`, with the error of the first of them."""
    errors = [rank for rank, answer in enumerate(answers) if "error" in answer]
    if errors:
        return [no_group(f"{_ranks(errors)} failed: {answers[errors[0]]['error']}")]
    hosts, versions = ({answer[key] for answer in answers} for key in ("host", "torch"))
    wrong = [rank for rank, answer in enumerate(answers) if not answer["right"]]
    differ = len(versions) > 1
    group = Finding(
        check="ranks.group",
        severity="problem" if differ else "ok",
        found=f"ranks: {len(answers)}, machines: {len(hosts)}, torch: {' and '.join(sorted(versions))}",
        means="versions differ in what they send and how they round: ranks hang or diverge"
        if differ
        else "ranks can form a process group",
        do="install the same version of torch everywhere.",
        data={"hosts": sorted(hosts)},
    )
    messages = Finding(
        check="ranks.messages",
        severity="problem" if wrong else "ok",
        found=f"an all-gather gives wrong numbers to {_ranks(wrong)}"
        if wrong
        else "an all-gather gives the right numbers",
        means="training computes with wrong weights, without an error" if wrong else "ranks can exchange tensors",
        do="run it with NCCL_P2P_DISABLE=1, then with NCCL_IB_DISABLE=1, to find the faulty link; update the driver; PCIe "
        "access control (ACS) in the machine's setup breaks links between devices.",
    )
    return [group, messages, *(_rates(answers, device_type, len(hosts)) if len(answers) > 1 else ())]


def _rates(answers: Sequence[Answer], device_type: str, num_hosts: int) -> Iterator[Finding]:
    """Yield a finding on the rate of the all-gather, and one on the all-to-all if it was timed. Each has the rate of the slowest
    rank, and is a warning if that is below `SLOW`. If `num_hosts` is above 1, the all-gather's remedy is about the network."""
    kind = "cpu" if device_type == "cpu" else "device"
    near = f"all-to-all over {answers[0].get('num_near')} ranks of a machine"
    usual = f"; usual: {USUAL[kind]}"
    attention = "with sequence parallelism, each layer's attention waits for it, before and after"
    for check, name, place, means in (
        ("gather", "all-gather", "network" if num_hosts > 1 else kind, "it carries the parameters, twice a step"),
        ("exchange", near, kind, attention),
    ):
        if f"{check}_s" not in answers[0]:
            continue
        rate = min(answer[f"{check}_bytes"] / answer[f"{check}_s"] for answer in answers)
        slow = rate < SLOW[kind] * GB
        yield Finding(
            check=f"ranks.{check}",
            severity="warning" if slow else "ok",
            found=f"{name}: {rate / GB:.2f} GB/s received by each rank{usual if check == 'gather' else ''}",
            means=means + (": steps wait for it" if slow else ""),
            do=REMEDIES[place],
            data={"bytes_per_s": rate},
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
