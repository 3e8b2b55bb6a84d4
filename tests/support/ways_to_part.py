"""All ways in which ranks part, each as a program of a user's own: how long the others wait, and what they print.

`python -m tests.support.ways_to_part > docs/ways-to-part.md` runs every way and writes the table; `--only a,b` runs
some, `--json` prints what was found.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

import accordion as acc
from accordion import _torch
from tests.support import models
from tests.support.parting import AT, MARGIN_S, STEPS, TIMEOUT_S, Deed, Found, Script, Way, nothing, run
from tests.support.users_ways import users

# -- how a rank ends


def fails(script: Script) -> None:
    raise ValueError("bad sample")


def runs_out(script: Script) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def is_interrupted(script: Script) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def exits(code: int) -> Deed:
    return lambda script: sys.exit(code)


def vanishes(code: int) -> Deed:
    return lambda script: os._exit(code)


def is_killed(number: signal.Signals) -> Deed:
    return lambda script: os.kill(os.getpid(), number)


ENDS: dict[str, tuple[Deed, str]] = {
    "raises": (fails, "ValueError: bad sample"),
    "is out of memory": (runs_out, "OutOfMemoryError"),
    "is interrupted": (is_interrupted, "interrupted"),
    "exits with 0": (exits(0), "has ended"),
    "exits with 3": (exits(3), "has ended"),
    "calls os._exit(0)": (vanishes(0), "without a word"),
    "calls os._exit(7)": (vanishes(7), "without a word"),
    "is killed": (is_killed(signal.SIGKILL), "without a word"),
    "is terminated": (is_killed(signal.SIGTERM), "without a word"),
    "aborts": (is_killed(signal.SIGABRT), "crashed"),
}
MOMENTS = {
    "before_training": ("before the first forward", 0),
    "loader": ("in the loader", AT),
    "forward": ("in its forward", AT),
    "backward": ("in its backward", AT),
    "before_step": ("at the optimizer", AT),
}


def ends() -> Iterator[Way]:
    for how, (deed, said) in ENDS.items():
        for moment, (where, step) in MOMENTS.items():
            if moment == "backward" and how in ("exits with 0", "exits with 3"):
                continue  # autograd turns it into an error of its own
            says = ["rank 1", said]
            yield Way(name=f"{how} {where}", kind="a rank ends", says=says, deeds={moment: deed}, step=step)
    for moment in ("forward", "backward", "before_step"):
        where = MOMENTS[moment][0]
        deed = {moment: fails}
        yield Way(
            name=f"raises {where}, first step", kind="a rank ends", says=["rank 1", "bad sample"], deeds=deed, step=1
        )
        yield Way(
            name=f"rank 0 raises {where}",
            kind="a rank ends",
            says=["rank 0", "bad sample"],
            deeds=deed,
            one=0,
            num_ranks=3,
        )
        yield Way(
            name=f"rank 2 of 3 raises {where}",
            kind="a rank ends",
            says=["rank 2", "bad sample"],
            deeds=deed,
            one=2,
            num_ranks=3,
        )
    for moment in ("before_training", "forward", "before_step"):
        where, step = MOMENTS[moment]
        yield Way(
            name=f"rank 0 is killed {where}", kind="a rank ends", says=["rank 0", "without a word"],
            deeds={moment: is_killed(signal.SIGKILL)}, one=0, num_ranks=3, step=step,
        )  # fmt: skip
    for moment, (where, step) in MOMENTS.items():
        for one in (0, 1):
            yield Way(
                name=f"rank {one} is stopped, as by Ctrl-Z, {where}", kind="a rank ends", stays=True, step=step, one=one,
                says=["rank 1" if one else "rank 0|has not answered for"], deeds={moment: is_killed(signal.SIGSTOP)},
            )  # fmt: skip


# -- what one rank does alone


def evaluates(script: Script) -> None:
    with torch.no_grad():
        script.model(models.batch(9, 0, 0, vocab=48)[0])


def forwards_again(script: Script) -> None:
    script.model(models.batch(9, 0, 0, vocab=48)[0])


def skips_a_batch(script: Script) -> None:
    script.step += 1


def calls_a_block(script: Script) -> None:
    script.model.blocks[1](torch.ones(2, 3, 32, requires_grad=True)).sum().backward()


def clips(script: Script) -> None:
    acc.clip_grad_norm_(script.model, 1.0)


def norm_of_dtensor(script: Script) -> None:
    float(next(script.model.parameters()).grad.norm())  # type: ignore[union-attr, arg-type]


def full_tensor(script: Script) -> None:
    next(script.model.parameters()).full_tensor()  # type: ignore[attr-defined]


def takes_full_state(script: Script) -> None:
    acc.full_state_dict(script.model)


def saves(script: Script) -> None:
    acc.save(f"{script.folder}/step", script.model, script.optimizer)


def saves_behind(script: Script) -> None:
    acc.save(f"{script.folder}/step", script.model, script.optimizer, background=True)


def loads(script: Script) -> None:
    acc.load(f"{script.folder}/step", script.model)


def loads_but_one(script: Script) -> None:
    if not script.is_one:
        loads(script)


def loads_optimizer(script: Script) -> None:
    acc.load(f"{script.folder}/step", script.model, script.optimizer)


def shows_full(script: Script) -> None:
    with acc.full_params(script.model):
        pass


def waits_at_barrier(script: Script) -> None:
    dist.barrier()


def reduces(script: Script) -> None:
    dist.all_reduce(torch.ones(3))


def loads_full(script: Script) -> None:
    script.model.load_state_dict(models.Tiny().state_dict())


def trains_less(script: Script) -> None:
    script.model.blocks[1].requires_grad_(False)


def sleeps(script: Script) -> None:
    time.sleep(5 * TIMEOUT_S)


def leaves_group(script: Script) -> None:
    dist.destroy_process_group()
    time.sleep(TIMEOUT_S)


def alone() -> Iterator[Way]:
    kind = "a rank does alone"
    loner: list[tuple[str, str, Deed, Sequence[str]]] = [
        ("evaluates", "loader", evaluates, ["rank 1", "evaluat"]),
        ("calls the model again", "after_backward", forwards_again, ["rank 1", "forward"]),
        ("calls a block", "loader", calls_a_block, ["rank 1", r"blocks\.1"]),
        ("clips", "after_backward", clips, ["rank 1", "clip"]),
        ("takes the norm of a DTensor", "after_backward", norm_of_dtensor, ["rank 1", r"norm\(\)"]),
        ("takes a full tensor", "after_backward", full_tensor, ["rank 1", r"full_tensor\(\)"]),
        ("takes the full state dict", "loader", takes_full_state, ["rank 1", "full state dict"]),
        ("saves", "loader", saves, ["rank 1", "saves"]),
        ("saves in the background", "loader", saves_behind, ["rank 1", "saves"]),
        ("shows full parameters", "loader", shows_full, ["rank 1", "full parameters"]),
        ("waits at a barrier", "loader", waits_at_barrier, ["rank 1", "barrier"]),
        ("reduces a tensor of its own", "loader", reduces, ["rank 1", "all_reduce"]),
        ("loads a state dict", "loader", loads_full, ["rank 1", "load_state_dict|loads|state dict"]),
        ("freezes a block", "loader", trains_less, ["rank 1", r"training 0 of|train"]),
        ("leaves the process group", "loader", leaves_group, ["rank 1", "process group"]),
        ("sleeps in the loader", "loader", sleeps, ["rank 1", r"sleep"]),
        ("sleeps in its forward", "forward", sleeps, ["rank 1", r"sleep"]),
        ("sleeps before the first forward", "before_training", sleeps, ["rank 1", r"sleep"]),
    ]
    for name, moment, deed, says in loner:
        step = 0 if moment == "before_training" else AT
        yield Way(name=name, kind=kind, says=says, deeds={moment: deed}, step=step, stays=deed is sleeps)
    for name, deed in [
        ("saves", saves),
        ("takes the full state dict", takes_full_state),
        ("takes a full tensor", full_tensor),
        ("evaluates", evaluates),
    ]:
        yield Way(
            name=f"rank 0 {name} at the end", kind=kind, says=["rank 1 has ended its program"], deeds={"end": deed}, one=0,
            step=STEPS, one_says=True,
        )  # fmt: skip
    for name, deed, all_do in [
        ("loads a checkpoint", loads, {}),
        ("loads a checkpoint with its optimizer", loads_optimizer, {}),
        ("loads the optimizer, and the others the model alone", loads_optimizer, {"loader": loads_but_one}),
    ]:
        yield Way(
            name=name, kind=kind, says=["rank 1", "load"], deeds={"loader": deed}, all_do={"before_training": saves, **all_do}
        )  # fmt: skip
    for name, key, says in [
        ("skips its backward", "skips_backward", ["rank 1", "backward"]),
        ("leaves a clip out", "skips_clip", ["rank 1|rank 0", "clip"]),
        ("backs under no_sync", "no_sync", ["rank 1", "no_sync|backward"]),
    ]:
        yield Way(name=name, kind=kind, says=says, deeds={key: nothing}, clips=key == "skips_clip")
    for moment in ("forward", "backward"):
        said = "OutOfMemoryError" if moment == "forward" else "caught an error .*in the backward of step 3"
        yield Way(
            name=f"swallows an out-of-memory error in its {moment}", kind=kind, says=["rank 1", said],
            deeds={moment: runs_out}, swallows=True,
        )  # fmt: skip


# -- what differs in silence


def changes_weights(script: Script) -> None:
    with torch.no_grad():
        next(script.model.blocks[0].parameters()).add_(1e-3)


def drifts(script: Script) -> None:
    with torch.no_grad():
        for p in script.model.blocks[0].parameters():
            p.to_local().view(-1)[:1].add_(1e-3)  # type: ignore[attr-defined]


def lowers_lr(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = 5e-4


def steps_twice(script: Script) -> None:
    script.optimizer.step()


def differs() -> Iterator[Way]:
    kind = "a rank steps alone"
    adam = torch.optim.AdamW
    for name, other, said in [
        ("another learning rate", (adam, {"lr": 2e-3}), r"lr"),
        ("other betas", (adam, {"lr": 1e-3, "betas": (0.8, 0.99)}), "betas"),
        ("another weight decay", (adam, {"lr": 1e-3, "weight_decay": 0.2}), "weight_decay"),
        ("another eps", (adam, {"lr": 1e-3, "eps": 1e-6}), "eps"),
        ("amsgrad", (adam, {"lr": 1e-3, "amsgrad": True}), "amsgrad"),
        ("another kind of optimizer", (torch.optim.SGD, {"lr": 1e-3}), "SGD"),
    ]:
        for wrapped in (True, False):
            yield Way(
                name=f"{name}{'' if wrapped else ', not wrapped'}", kind=kind, says=["rank 1", said, "step 1"],
                others_optimizer=other, wrapped=wrapped, all_say=True,
            )  # fmt: skip
    silent: list[tuple[str, dict[str, Deed], Sequence[str]]] = [
        ("lowers its learning rate", {"before_step": lowers_lr}, ["rank 1", "lr", "step 3"]),
        ("leaves a step out", {"skips_step": nothing}, ["rank 1", "step"]),
        ("steps twice", {"before_step": steps_twice}, ["rank 1", "step"]),
        ("leaves zero_grad out", {"skips_zero_grad": nothing}, ["rank 1", "zero_grad"]),
        ("changes weights", {"after_step": changes_weights}, ["rank 1", "weights|written"]),
    ]
    for strategy in (acc.FULL_SHARD, acc.SHARD_OPTIM, acc.NO_SHARD, acc.HYBRID_SHARD):
        num_ranks = 4 if strategy.hybrid else 2
        for name, deeds, says in silent:
            yield Way(
                name=f"{name}, {strategy.name}", kind=kind, says=says, deeds=deeds, options={"strategy": strategy}, all_say=True,
                num_ranks=num_ranks,
            )  # fmt: skip
    for strategy, num_ranks in ((acc.NO_SHARD, 2), (acc.HYBRID_SHARD, 4)):
        yield Way(
            name=f"its replica drifts, {strategy.name}", kind=kind, says=["rank 1|replica"], deeds={"after_step": drifts},
            options={"strategy": strategy}, all_say=True, num_ranks=num_ranks,
        )  # fmt: skip


# -- what `shard` is given, forks and threads


def forks(script: Script) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            evaluates(script)
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
            os._exit(4)
        os._exit(0)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise ValueError("the child has ended")
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise ValueError("the child waits")


def threads(script: Script) -> None:
    """A second thread calls the model while this one is inside."""
    found: list[BaseException] = []

    def call() -> None:
        try:
            evaluates(script)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    raise found[0] if found else ValueError("the second thread waits")


def given() -> Iterator[Way]:
    kind = "shard is given something else"
    for name, options, said in [
        ("another strategy", {"strategy": acc.SHARD_GRAD_OP}, "strategy"),
        ("another precision", {"precision": acc.Precision(params=torch.bfloat16)}, "precision"),
        ("another reduce_op", {"reduce_op": "sum"}, "reduce_op"),
        ("another debug mode", {"debug": "order"}, "debug"),
        ("an offload", {"offload": acc.Offload(optimizer="host")}, "offload"),
        ("checkpointed activations", {"checkpoint_activations": "full"}, "checkpoint_activations"),
        ("another prefetch", {"prefetch": acc.Prefetch(budget_bytes=1 << 20)}, "prefetch"),
    ]:
        yield Way(name=name, kind=kind, says=["rank 1", said], others_options=options, all_say=True)
    for name, model, said in [
        ("a wider model", {"width": 40}, "parameter"),
        ("a block more", {"num_blocks": 4}, "unit"),
        ("a tied head", {"tied": True}, "parameter|named"),
    ]:
        yield Way(name=name, kind=kind, says=["rank 1", said], others_model=model, all_say=True)
    yield Way(
        name="calls the model in a forked child",
        kind="forks and threads",
        says=["fork"],
        deeds={"loader": forks},
        one_says=True,
    )
    yield Way(
        name="calls the model from two threads",
        kind="forks and threads",
        says=["thread"],
        deeds={"forward": threads},
        one_says=True,
    )
    for name, deed in (("raises", fails), ("exits with 0", exits(0)), ("is killed", is_killed(signal.SIGKILL))):
        yield Way(
            name=f"{name} before shard",
            kind="a rank ends",
            says=["rank 1|another rank"],
            deeds={"before_shard": deed},
            step=0,
        )


WAYS: dict[str, Way] = {way.name: way for make in (ends, alone, differs, given, users) for way in make()}


def table(found: Sequence[Found]) -> str:
    """The page."""
    true, late = sum(f.is_true for f in found), sum(bool(f.late) for f in found)
    harmless = [f for f in found if f.way.harmless]
    silent = sum(not all(f.said.get(r) for r in f.way.speakers) for f in found if f not in harmless)
    lines = [
        "# Ways to part",
        "",
        "What becomes of a job in which one rank does something else than the others: each row is a script of two to",
        "four gloo ranks, without a launcher, in which one of them parts from the rest once. The seconds are from that",
        f"moment until every rank has ended; the process group's time-out is {TIMEOUT_S:g} s. What is printed is the first",
        "sentence of the others.",
        "`python -m tests.support.ways_to_part > docs/ways-to-part.md` runs them and writes this page.",
        "",
        f"{len(found)} ways: {true} are told truly, {silent} are silent, {late} take longer than the time-out plus "
        f"{MARGIN_S:g} s. {len(harmless)} of the true ones are",
        "harmless: no rank waits for another, and nothing is printed.",
        "",
        "| way | seconds | what the others print | true |",
        "|---|---|---|---|",
    ]
    for f in found:
        way = f.way
        said = (
            f.said.get(way.speakers[0], "")
            .removeprefix("accordion: ")
            .removeprefix("accordion.errors.")
            .replace("|", "\\|")
            or "(nothing)"
        )
        said = re.sub(r"/\S*/(?=[\w.]+\.py)", "", said)
        lines.append(f"| {way.kind}: {way.name} | {f.seconds:.0f} | {said} | {'yes' if f.is_true else 'no'} |")
    return "\n".join(lines)


def main() -> Callable[[], None] | None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--only", default="", help="names of ways, or parts of them, separated by commas; after = the whole name"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in _torch.PRELOADED:  # else each rank imports it for half a second, and longer than its steps take
        importlib.import_module(name)
    gc.freeze()  # what was imported is not looked through at the end of each rank
    parts = re.split(r",(?==)", given.only) if given.only.startswith("=") else [p for p in given.only.split(",") if p]
    ways = [
        way for way in WAYS.values() if not parts or any(part == f"={way.name}" or part in way.name for part in parts)
    ]

    def note(found: Found) -> None:
        print(
            f"{'true' if found.is_true else 'FALSE'} {found.seconds:5.1f} s  {found.way.name}",
            file=sys.stderr,
            flush=True,
        )

    out = run(ways, note)
    if callable(out):
        return out
    if given.json:
        print(json.dumps([{**vars(f), "way": f.way.name, "true": f.is_true} for f in out]))
    else:
        print(table(out))
    return None


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
