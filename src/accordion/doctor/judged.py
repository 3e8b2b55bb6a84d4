"""From what ranks measured to findings: beside what is usual, with what it means and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from accordion.doctor.findings import Finding
from accordion.doctor.ranks import PINNED_BYTES, Answer
from accordion.doctor.steps import ROUNDING, STEPS
from accordion.plan.hardware import GB, GPUS, NETWORK_GBPS, PCIE_4, REACHED

LOW = REACHED["low"]
BELOW = 0.5  # of the lower end of what is usual: slower is a warning
# Of a copy in memory at the same time on the same rank: two and three ranks of gloo on one machine of 2 cores, which others used
# too, reached 0.09 to 0.16 of it (`accordion doctor --device cpu`).
OF_A_COPY = 0.08
SLOW_SMALL_S = {"node": 5e-3, "network": 20e-3}  # of a small gather: hundred times what is usual
SKEW_S = 1.0
SLOW_PIN = 0.5e9  # bytes a second


def group(error: str) -> Finding:
    """Ranks did not form a group, or one of them ended."""
    return Finding(
        check="ranks.group",
        severity="problem",
        found=f"ranks stopped: {error.rstrip('.')}",
        means="a training on these ranks would end or hang at the same place",
        do="see the other findings first: interfaces, open files, shared memory and devices are what it mostly is; "
        "TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO say more.",
    )


def about(answers: Sequence[Answer]) -> list[Finding]:
    """Who the ranks are."""
    errors = _errors("ranks.group", answers, "this rank cannot take its device")
    if errors:
        return errors
    hosts = list(dict.fromkeys(answer["host"] for answer in answers))
    versions = sorted({answer["torch"] for answer in answers})
    same = len(versions) == 1
    found = [
        Finding(
            check="ranks.group",
            severity="ok" if same else "problem",
            found=f"{_count(len(answers), 'rank')} on {_count(len(hosts), 'machine')} formed a group"
            + ("" if same else f", with torch {' and '.join(versions)}"),
            means="ranks can meet"
            if same
            else "versions of torch differ in what they send and how they round: ranks hang or drift apart",
            do="" if same else "install the same version everywhere.",
            data={"hosts": hosts, "open_files": max(answer["open_files"] for answer in answers)},
        )
    ]
    pins = [PINNED_BYTES / answer["pin_s"] for answer in answers if "pin_s" in answer]
    if pins:
        slow = min(pins) < SLOW_PIN
        found.append(
            Finding(
                check="ranks.pinned-memory",
                severity="warning" if slow else "ok",
                found=f"pinned host memory: {min(pins) / GB:.2f} GB/s on the slowest rank; usual is {SLOW_PIN / GB:g} and more",
                means="loaders and offload begin slowly, and take long where the system is short of memory"
                if slow
                else "as usual",
                do="free host memory, and raise the limit of locked memory (ulimit -l)." if slow else "",
                data={"bytes_per_s": min(pins)},
            )
        )
    return found


def messages(answers: Sequence[Answer], *, device_type: str, device_name: str, num_hosts: int) -> list[Finding]:
    """Rates of the slowest rank."""
    errors = _errors("ranks.messages", answers, "ranks cannot send each other what training sends")
    if errors:
        return errors
    wrong = [rank for rank, answer in enumerate(answers) if not answer["right"]]
    if wrong:
        return [
            Finding(
                check="ranks.messages",
                severity="problem",
                found=f"a gather brought wrong numbers to {_ranks(wrong)}",
                means="training computes with wrong weights, in silence",
                do="run it with NCCL_P2P_DISABLE=1, then with NCCL_IB_DISABLE=1, to see which link it is; update the driver; "
                "PCIe access control (ACS) in the machine's setup breaks links between devices.",
                where=_ranks(wrong),
            )
        ]
    sent = answers[0]["bytes"]
    slowest = {name: max(answer["seconds"][name] for answer in answers) for name in answers[0]["seconds"]}
    copied = (
        answers[0]["bytes"] * len(answers) / max(1, len(answers) - 1) / slowest["copy"]
    )  # bytes of the full message
    usual, why = usual_rate(device_type, device_name, num_hosts, copied)
    found = []
    for name, what in (("gather", "parameters, twice a step"), ("exchange", "gradients, once a step")):
        if not sent:
            continue
        rate = sent / slowest[name]
        slow = rate < BELOW * usual
        found.append(
            Finding(
                check=f"ranks.{name}",
                severity="warning" if slow else "ok",
                found=f"{name}: {rate / GB:.2f} GB/s received by each rank; usual is {usual / GB:.2f} and more, {why}",
                means=f"it carries {what}" + (": steps wait for it" if slow else ""),
                do=_faster(device_type, num_hosts) if slow else "",
                data={"bytes_per_s": rate, "usual_bytes_per_s": usual, "message_bytes": sent},
            )
        )
    most = SLOW_SMALL_S["node" if num_hosts == 1 else "network"]
    if sent:
        slow = slowest["small"] > most
        found.append(
            Finding(
                check="ranks.latency",
                severity="warning" if slow else "ok",
                found=f"a small gather takes {slowest['small'] * 1e6:,.0f} us; more than {most * 1e6:,.0f} is unusual",
                means="each unit of a model waits so long at least" + (", whatever its size" if slow else ""),
                do="see who else uses these cores and this network; give each rank cores of its own." if slow else "",
                data={"seconds": slowest["small"]},
            )
        )
    return found


def usual_rate(device_type: str, device_name: str, num_hosts: int, copied: float) -> tuple[float, str]:
    """Bytes a second at the lower end of what is usual, and on what grounds. `copied`: of a copy on the same rank."""
    if device_type == "cpu":
        if num_hosts > 1:
            return 0.1 * GB, "a network of one gigabit"
        return OF_A_COPY * copied, f"{OF_A_COPY:.0%} of a copy in memory ({copied / GB:.2f} GB/s now)"
    if num_hosts > 1:
        return (
            LOW.network * NETWORK_GBPS * GB,
            f"{LOW.network:.0%} of InfiniBand with {NETWORK_GBPS * 8:g} Gbit/s a card",
        )
    words = device_name.lower().replace(" ", "")
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    if not known:
        return LOW.link * PCIE_4 * GB, f"{LOW.link:.0%} of PCIe 4, for a card that is not in the planner's table"
    gpu = max(known, key=lambda gpu: gpu.link_gbps)
    link, gbps = ("PCIe", gpu.host_gbps) if "pcie" in words else (gpu.link, gpu.link_gbps)
    return LOW.link * gbps * GB, f"{LOW.link:.0%} of {link} ({gbps:g} GB/s)"


def _faster(device_type: str, num_hosts: int) -> str:
    if num_hosts > 1:
        return (
            "see that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the fast interface and that NCCL finds InfiniBand "
            "(NCCL_DEBUG=INFO); shard within machines (hybrid_shard) where the network stays slow."
        )
    if device_type == "cpu":
        return "see who else uses these cores and this memory (top); start as many ranks as there are cores, or fewer."
    return "see how the devices are linked (nvidia-smi topo -m), and that PCIe access control (ACS) is off and links are up."


def clocks(answers: Sequence[Answer]) -> list[Finding]:
    errors = _errors("ranks.clocks", answers, "ranks cannot send to each other one by one")
    if errors:
        return errors
    found = answers[0]["clocks"]
    if not found:
        return []
    furthest = max(found, key=lambda clock: abs(clock["ahead_s"]) - clock["within_s"])
    skew = abs(furthest["ahead_s"]) - furthest["within_s"] > SKEW_S
    return [
        Finding(
            check="ranks.clocks",
            severity="warning" if skew else "ok",
            found=f"clocks are within {max(abs(c['ahead_s']) + c['within_s'] for c in found):.4f} s of the first rank's"
            if not skew
            else f"the clock of rank {furthest['rank']} is {abs(furthest['ahead_s']):,.1f} s "
            f"{'ahead of' if furthest['ahead_s'] > 0 else 'behind'} the first rank's",
            means="times in logs of several machines cannot be compared, and files of a shared disk come from the future: "
            "who holds a run folder and which checkpoint is newest may be misread"
            if skew
            else "times of the machines agree",
            do="synchronise the clocks: timedatectl set-ntp true, or chrony, on all machines." if skew else "",
            data={"clocks": found},
            where=f"rank {furthest['rank']}" if skew else "",
        )
    ]


def steps(answers: Sequence[Answer]) -> list[Finding]:
    errors = _errors("ranks.steps", answers, "the engine does not train here")
    if errors:
        return errors
    largest = max((answer["largest"] for answer in answers), key=lambda value: (value != value, value))
    exact, good = all(answer["exact"] for answer in answers), largest <= ROUNDING
    how = "the same bit for bit" if exact else f"the same but for rounding ({largest:.1e} relatively)"
    return [
        Finding(
            check="ranks.steps",
            severity="ok" if exact or good else "problem",
            found=f"{STEPS} steps sharded and unsharded: {how if exact or good else f'apart by {largest:.1e} relatively'}",
            means="the engine trains here as one process would"
            if exact or good
            else "a training here learns something else than it should: messages, a kernel or the engine are wrong",
            do=""
            if exact or good
            else "compare with --device cpu and with --nproc 1 to see whether devices or messages do it; try another torch; "
            "report it with the output of accordion doctor --json.",
            data={"largest": largest, "exact": exact, "losses": list(answers[0]["losses"])},
        )
    ]


def _errors(check: str, answers: Sequence[Answer], means: str) -> list[Finding]:
    wrong = [rank for rank, answer in enumerate(answers) if "error" in answer]
    if not wrong:
        return []
    return [
        Finding(
            check=check,
            severity="problem",
            found=f"{_ranks(wrong)} failed: {answers[wrong[0]]['error']}",
            means=means,
            do="see the other findings first; TORCH_CPP_LOG_LEVEL=INFO and NCCL_DEBUG=INFO say more.",
            where=_ranks(wrong),
        )
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _ranks(which: Sequence[int]) -> str:
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"
