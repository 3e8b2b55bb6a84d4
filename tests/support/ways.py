"""Programs in which one rank diverges from the others, and the sentences that the others print.

`python -m tests.support.ways --only a,b` runs the programs whose names contain one of these words (`=name`: the whole name) and
prints the outcomes as JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import accordion as acc
from accordion import _torch
from tests.support import models
from tests.support.diverging import AT, STEPS, TIMEOUT_S, Deed, Outcome, Script, Way, nothing, run

PAGE = Path(__file__).parents[2] / "docs" / "ways-to-part.md"
# The sentences of the page, by key. `{rank}`: the rank that diverges; other names in braces stand for any text.
SENTENCES = {**dict(re.findall(r"^\| ([a-z_ ]+) \| `(.+?)` \|", PAGE.read_text(), re.M)), "nothing": ""}

# -- how a rank ends


def fails(script: Script) -> None:
    raise ValueError("bad sample")


def is_bad_hook(*_: Any) -> None:
    raise ValueError("bad sample")


def runs_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fills_disk(script: Script) -> None:
    raise OSError(28, "No space left on device")


def ends_its_loop(script: Script) -> None:
    """Take fewer steps than the others, as with early stopping, a shorter loader, or a skipped batch."""
    raise StopIteration


def is_interrupted(script: Script) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)


def is_killed(number: signal.Signals = signal.SIGKILL) -> Deed:
    return lambda script: os.kill(os.getpid(), number)


ENDS: dict[str, tuple[Deed, str, str]] = {
    "raises": (fails, "failed", "ValueError: bad sample"),
    "is out of memory": (runs_out, "failed", "OutOfMemoryError"),
    "is interrupted": (is_interrupted, "interrupted", ""),
    "exits with 0": (lambda script: sys.exit(0), "ended", ""),
    "exits with 3": (lambda script: sys.exit(3), "ended", ""),
    "calls os._exit(0)": (lambda script: os._exit(0), "silent", ""),
    "calls os._exit(7)": (lambda script: os._exit(7), "silent", ""),
    "is killed": (is_killed(), "silent", ""),
    "is terminated": (is_killed(signal.SIGTERM), "silent", ""),
    "aborts": (is_killed(signal.SIGABRT), "crashed", "Aborted"),
}
MOMENTS = {
    "before_training": ("before the first forward", 0),
    "loader": ("in the loader", AT),
    "forward": ("in its forward", AT),
    "backward": ("in its backward", AT),
    "before_step": ("at the optimizer", AT),
}


def ends() -> Iterator[Way]:
    for how, (deed, sentence, also) in ENDS.items():
        for moment, (where, step) in MOMENTS.items():
            if moment == "backward" and how.startswith("exits"):
                continue  # autograd turns it into an error of its own
            yield Way(f"{how} {where}", sentence, also, {moment: deed}, step=step, is_own=how == "aborts")
    for moment in ("forward", "backward", "before_step"):
        where = MOMENTS[moment][0]
        yield Way(f"raises {where}, first step", "failed", "bad sample", {moment: fails}, step=1)
        yield Way(f"rank 0 raises {where}", "failed", "bad sample", {moment: fails}, one=0, num_ranks=3)
        yield Way(f"rank 2 of 3 raises {where}", "failed", "bad sample", {moment: fails}, one=2, num_ranks=3)
    for moment in ("before_training", "forward", "before_step"):
        where, step = MOMENTS[moment]
        yield Way(f"rank 0 is killed {where}", "silent", deeds={moment: is_killed()}, one=0, num_ranks=3, step=step)
    for moment, (where, step) in MOMENTS.items():
        for one in (0, 1):
            sentence = "nothing new" if moment == "before_training" else "unheard"
            deeds = {moment: is_killed(signal.SIGSTOP)}
            name = f"rank {one} is stopped, as by Ctrl-Z, {where}"
            yield Way(name, sentence, f"there is no answer from rank {one}", deeds, step=step, one=one, stays=True)
    for how in ("raises", "exits with 0", "is killed"):
        yield Way(f"{how} before shard", "before shard", deeds={"before_shard": ENDS[how][0]}, step=0)


# -- what one rank does alone


def a_batch(script: Script) -> tuple[Tensor, Tensor]:
    return models.batch(99, 0, script.rank, vocab=48)


def evaluates(script: Script) -> None:
    with torch.no_grad():
        script.model(a_batch(script)[0])


def evaluates_more(script: Script) -> None:
    """Evaluate one batch more than the others."""
    for _ in range(1 + script.here):
        evaluates(script)


def evaluates_full(script: Script) -> None:
    with acc.full_params(script.model), torch.no_grad():
        script.model(a_batch(script)[0])


def shows_full(script: Script) -> None:
    with acc.full_params(script.model):
        pass


def saves(script: Script) -> None:
    acc.save(f"{script.folder}/step", script.model, script.optimizer)


def loads(script: Script) -> None:
    acc.load(f"{script.folder}/step", script.model)


def loads_optimizer(script: Script) -> None:
    acc.load(f"{script.folder}/step", script.model, script.optimizer)


def loads_but_one(script: Script) -> None:
    if not script.is_one:
        loads(script)


def full_tensor(script: Script) -> None:
    next(script.model.parameters()).full_tensor()


def calls_a_block(script: Script) -> None:
    script.model.blocks[1](torch.ones(2, 3, 32, requires_grad=True)).sum().backward()


def sleeps(script: Script) -> None:
    time.sleep(5 * TIMEOUT_S)


def leaves_group(script: Script) -> None:
    dist.destroy_process_group()
    time.sleep(TIMEOUT_S)


def deletes_model(script: Script) -> None:
    script.optimizer = None
    del script.model
    gc.collect()
    threading.Event().wait()


def waits_for_thread(script: Script) -> None:
    """Wait for a queue whose thread has died."""
    rows: queue.Queue[int] = queue.Queue()
    threading.Thread(target=is_bad_hook, daemon=True).start()
    rows.get()


def loops(script: Script) -> None:
    while True:
        pass


def holds_lock(script: Script) -> None:
    """Call C code that does not release Python's lock, so no thread of this process runs."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def logs_grad_norm(script: Script) -> None:
    print(sum(p.grad.norm() for p in script.model.parameters() if p.grad is not None))


def clips_with_torch(script: Script) -> None:
    torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)


def makes_group(script: Script) -> None:
    script.other_group = dist.new_group()


def loads_optimizer_state(script: Script) -> None:
    script.optimizer.load_state_dict(script.optimizer.state_dict())


def alone() -> Iterator[Way]:
    waits: list[tuple[str, str, Deed, str]] = [
        ("clips", "after_backward", lambda s: acc.clip_grad_norm_(s.model, 1.0), "clip"),
        ("clips with torch's function", "before_step", clips_with_torch, "clip_grad_norm_"),
        ("takes the norm of a DTensor", "after_backward", lambda s: next(s.model.parameters()).grad.norm().item(), "norm"),
        ("adds up norms of gradients for a log", "before_step", logs_grad_norm, "norm"),
        ("prints the mean of a parameter", "before_step", lambda s: next(s.model.parameters()).mean().item(), "mean"),
        ("takes a full tensor", "after_backward", full_tensor, r"full_tensor\(\)"),
        ("waits at a barrier", "loader", lambda script: dist.barrier(), "barrier"),
        ("reduces a tensor of its own", "loader", lambda script: dist.all_reduce(torch.ones(3)), "all_reduce"),
        ("gathers objects", "loader", lambda s: dist.all_gather_object([None] * s.num_ranks, {}), "all_gather_object"),
        ("receives what nobody sends", "loader", lambda script: dist.recv(torch.zeros(3), src=0), "recv"),
        ("makes a group", "loader", lambda script: dist.new_group(), "new_group"),
        ("loads its optimizer's state", "loader", loads_optimizer_state, "load_state_dict"),
        ("shards another model", "loader", lambda script: acc.shard(models.Tiny(), units={models.Block}), "shard"),
    ]  # fmt: skip
    for name, moment, deed, says in waits:
        # Whether gloo lets the rank wait, lets it crash, or fails first depends on sizes.
        yield Way(name, "absent|in vain|crashed", says, {moment: deed}, is_own=True)
    yield Way(
        "waits in the store",
        "failed",
        "wait timeout",
        {"loader": lambda script: dist.distributed_c10d._get_default_store().wait(["never"])},
    )
    yield Way(
        "waits at a barrier of another group",
        "absent",
        "barrier",
        {"loader": lambda script: dist.barrier(group=script.other_group)},
        all_do={"before_training": makes_group},
        is_own=True,
    )
    for name, moment, deed, says in [
        ("sleeps in the loader", "loader", sleeps, "sleep"),
        ("sleeps in its forward", "forward", sleeps, "sleep"),
        ("its thread that reads ahead has died", "loader", waits_for_thread, r"rows\.get"),
        ("deletes its model and goes on", "loader", deletes_model, r"Event\(\)\.wait"),
    ]:
        yield Way(name, "absent", says, {moment: deed}, stays=True)
    yield Way(
        "sleeps before the first forward",
        "nothing new",
        "rank 1 .*sleep",
        {"before_training": sleeps},
        step=0,
        stays=True,
    )
    yield Way(
        "loops for ever", "absent|unheard", "while True|there is no answer from rank 1", {"loader": loops}, stays=True
    )
    yield Way("holds Python's lock", "unheard", deeds={"loader": holds_lock}, stays=True)
    yield Way("leaves the process group", "left", deeds={"loader": leaves_group})
    own: list[tuple[str, str, Deed, str]] = [
        ("saves", "loader", saves, "saves"),
        ("saves in the background", "loader", lambda s: acc.save(f"{s.folder}/step", s.model, background=True), "saves"),
        ("takes the full state dict", "loader", lambda script: acc.full_state_dict(script.model), "full state dict"),
        ("shows full parameters", "loader", shows_full, "full parameters"),
        ("loads a state dict", "loader", lambda script: script.model.load_state_dict(models.Tiny().state_dict()), "state"),
    ]  # fmt: skip
    for name, moment, deed, says in own:
        yield Way(name, "alone", says, {moment: deed})
    yield Way("rank 0 evaluates with full parameters", "alone", "full parameters", {"loader": evaluates_full}, one=0)
    for name, deed in (("loads a checkpoint", loads), ("loads a checkpoint with its optimizer", loads_optimizer)):
        yield Way(name, "alone", "load", {"loader": deed}, all_do={"before_training": saves})
    together = {"before_training": saves, "loader": loads_but_one}
    yield Way(
        "loads the optimizer, and the others the model alone",
        "contents",
        "optimizer",
        {"loader": loads_optimizer},
        all_do=together,
    )
    for name, deed, sentence in [
        ("saves", saves, "ended"),
        ("takes the full state dict", lambda script: acc.full_state_dict(script.model), "ended"),
        ("takes a full tensor", full_tensor, "ends itself"),
        ("evaluates", evaluates, "ended"),
    ]:
        yield Way(
            f"rank 0 {name} at the end",
            sentence,
            "rank 1 has ended its program",
            {"end": deed},
            one=0,
            step=STEPS,
            one_says=True,
        )
    yield Way("evaluates", "evaluates", deeds={"loader": evaluates})
    yield Way(
        "its evaluation has a batch more",
        "evaluates",
        deeds={"before_step": nothing},
        all_do={"before_step": evaluates_more},
    )
    yield Way("calls the model again", "no backward", deeds={"after_backward": lambda s: s.model(a_batch(s)[0])})
    yield Way("skips its backward", "no backward", deeds={"skips_backward": nothing})
    yield Way("backs under no_sync", "no_sync", deeds={"no_sync": nothing})
    yield Way("leaves a clip out", "other waits", "clip", {"skips_clip": nothing}, clips=True)
    yield Way("calls a block", "other unit", r"blocks\.1", {"loader": calls_a_block})
    yield Way(
        "freezes a block", "other unit", "training 0 of", {"loader": lambda s: s.model.blocks[1].requires_grad_(False)}
    )
    yield Way("freezes the head", "other unit", deeds={"loader": lambda s: s.model.head.requires_grad_(False)})
    yield Way("freezes the whole model", "other unit", deeds={"loader": lambda s: s.model.requires_grad_(False)})
    yield Way("casts its model", "failed", "UsageError", {"loader": lambda script: script.model.half()})


# -- what differs in silence


def changes_weights(script: Script) -> None:
    with torch.no_grad():
        next(script.model.blocks[0].parameters()).add_(1e-3)


def drifts(script: Script) -> None:
    with torch.no_grad():
        for p in script.model.blocks[0].parameters():
            p.to_local().view(-1)[:1].add_(1e-3)


def lowers_lr(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = 5e-4


def makes_scheduler(script: Script) -> None:
    script.scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, gamma=0.5)


def plateaus(script: Script) -> None:
    """Step ReduceLROnPlateau with this rank's own loss."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)


def accumulates(script: Script) -> None:
    """Run one micro-batch more than the others, under no_sync."""
    with acc.no_sync(script.model):
        script.loss(*a_batch(script)).backward()


def adds_group(script: Script) -> None:
    """Move the last parameter to a second parameter group; the others have one group."""
    params = script.optimizer.param_groups[0]["params"]
    script.optimizer.add_param_group({"params": [params.pop()], "lr": 1e-3})


def forgets_params(script: Script) -> None:
    params = script.optimizer.param_groups[0]["params"]
    del params[len(params) // 2 :]


def autocasts(script: Script) -> None:
    loss = script.loss
    script.loss = lambda *args: torch.autocast("cpu", torch.bfloat16)(loss)(*args)


SILENT: dict[str, tuple[str, Deed, str]] = {
    "lowers its learning rate": ("before_step", lowers_lr, "step 3: .*lr"),
    "leaves a step out": ("skips_step", nothing, "steps before it"),
    "steps twice": ("before_step", lambda script: script.optimizer.step(), "steps before it"),
    "leaves zero_grad out": ("skips_zero_grad", nothing, "zero_grad"),
    "changes weights": ("after_step", changes_weights, "weights"),
}


def differs() -> Iterator[Way]:
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
            full = f"{name}{'' if wrapped else ', not wrapped'}"
            yield Way(full, "steps", f"step 1: .*{said}", others_optimizer=other, wrapped=wrapped, all_say=True)
    for strategy in (acc.FULL_SHARD, acc.SHARD_OPTIM, acc.NO_SHARD, acc.HYBRID_SHARD):
        options, num_ranks = {"strategy": strategy}, 4 if strategy.hybrid else 2
        for name, (moment, deed, said) in SILENT.items():
            full = f"{name}, {strategy.name}"
            yield Way(full, "steps", said, {moment: deed}, options=options, all_say=True, num_ranks=num_ranks)
        if strategy in (acc.NO_SHARD, acc.HYBRID_SHARD):
            full = f"its replica drifts, {strategy.name}"
            yield Way(
                full, "steps", "weights", {"after_step": drifts}, options=options, all_say=True, num_ranks=num_ranks
            )
    for name, moment, deed, said in [
        ("its learning rate falls with its own loss", "after_step", plateaus, "lr"),
        ("clears gradients before its step", "before_step", lambda script: script.optimizer.zero_grad(), "gradients"),
        ("has a micro-batch more", "loader", lambda s: s.loss(*a_batch(s)).backward(), "steps before it"),
        ("has another parameter group", "before_training", adds_group, "number of parameters"),
        ("gives its optimizer half of the parameters", "before_training", forgets_params, "number of parameters"),
        ("autocasts", "before_training", autocasts, "autocast"),
        ("forgets model.train()", "before_training", lambda script: script.model.eval(), "eval mode"),
    ]:
        step = 0 if moment == "before_training" else AT
        yield Way(name, "steps", said, {moment: deed}, step=step, all_say=True)
    yield scheduled("its scheduler steps once more")
    yield Way("has a micro-batch more, under no_sync", "no_sync", deeds={"loader": accumulates})


def scheduled(name: str, **more: Any) -> Way:
    deeds = {"before_step": lambda script: script.scheduler.step()}
    return Way(name, "steps", "step 3: .*lr", deeds, all_say=True, all_do={"before_training": makes_scheduler}, **more)


def given() -> Iterator[Way]:
    for name, options, said in [
        ("another strategy", {"strategy": acc.SHARD_GRAD_OP}, "strategy"),
        ("another precision", {"precision": acc.Precision(params=torch.bfloat16)}, "precision"),
        ("another reduce_op", {"reduce_op": "sum"}, "reduce_op"),
        ("another debug mode", {"debug": "order"}, "debug"),
        ("an offload", {"offload": acc.Offload(optimizer="host")}, "offload"),
        ("checkpointed activations", {"checkpoint_activations": "full"}, "checkpoint_activations"),
        ("another prefetch", {"prefetch": acc.Prefetch(budget_bytes=1 << 20)}, "prefetch"),
    ]:
        yield Way(name, "settings", said, others_options=options, all_say=True)
    for name, model, said in [
        ("a wider model", {"width": 40}, "parameter"),
        ("a block more", {"num_blocks": 4}, "unit"),
        ("a tied head", {"tied": True}, "parameter|named"),
    ]:
        yield Way(name, "settings", said, others_model=model, all_say=True)


# -- what users' programs do


class Rows(Dataset[Tensor]):
    def __init__(self, deed: Callable[[], None]) -> None:
        self.deed = deed

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        if i == 2:
            self.deed()
        return torch.zeros(3)


def loads_rows(deed: Callable[[], None]) -> Deed:
    def loads(script: Script) -> None:
        for _ in DataLoader(Rows(deed), num_workers=1, multiprocessing_context="fork"):
            pass

    return loads


def forks(end: Callable[[], None]) -> Deed:
    def deed(script: Script) -> None:
        pid = os.fork()
        if pid == 0:
            end()
        os.waitpid(pid, 0)

    return deed


def calls_in_child(script: Script) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            evaluates(script)
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(4)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise ValueError("the child has ended")
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    raise ValueError("the child waits")


def calls_in_thread(script: Script) -> None:
    """Call the model from a second thread while this one is inside."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            evaluates(script)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    raise errors[0] if errors else ValueError("the second thread waits")


def retries(in_backward: bool) -> Deed:
    """Run the batch in two halves after an out-of-memory error."""

    def deed(script: Script) -> None:
        tokens, targets = a_batch(script)
        block = script.model.blocks[1]
        register = block.register_full_backward_pre_hook if in_backward else block.register_forward_pre_hook
        handle = register(runs_out)
        try:
            script.loss(tokens, targets).backward()
        except torch.OutOfMemoryError:
            handle.remove()
            for half in (0, 1):
                script.loss(tokens[half : half + 1], targets[half : half + 1]).backward()

    return deed


def skips_after_error(script: Script) -> None:
    """Wrap a step in `except Exception: continue`, which takes the next batch."""
    handle = script.model.blocks[1].register_forward_pre_hook(is_bad_hook)
    try:
        script.loss(*a_batch(script)).backward()
    except ValueError:
        handle.remove()


def handles(then: Callable[[], object], *, catches: bool = False) -> Deed:
    """Programs in which a rank does something else while it handles an error, in `finally` or in `except` before the end."""

    def deed(script: Script) -> None:
        try:
            raise ValueError("bad sample")
        except ValueError:
            then()
            if not catches:
                raise
            sys.exit(1)

    return deed


def logs_and_exits(script: Script) -> None:
    try:
        raise ValueError("bad sample")
    except ValueError as error:
        print(error)
    sys.exit(1)


def on_signal(handler: Callable[[Script], object]) -> Deed:
    def deed(script: Script) -> None:
        signal.signal(signal.SIGTERM, lambda *_: handler(script))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

    return deed


def hooks(register: str, on: Callable[[Script], Any]) -> Deed:
    return lambda script: getattr(on(script), register)(is_bad_hook)


def a_parameter(script: Script) -> Tensor:
    return next(script.model.blocks[1].parameters())


def shards_two(script: Script) -> None:
    script.second = acc.shard(models.Tiny(), units={models.Block})


def turns_two_round(script: Script) -> None:
    """Train a GAN whose parts are called in another order on one rank."""
    tokens, targets = a_batch(script)
    two = [script.model, script.second]
    for model in reversed(two) if script.here else two:
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


def backs_twice(script: Script) -> None:
    loss = script.loss(*a_batch(script))
    loss.backward(retain_graph=True)
    if script.here:
        loss.backward()


def penalises(script: Script) -> None:
    """Compute gradients of the input first on one rank."""
    out = script.model(a_batch(script)[0])
    if script.here:
        torch.autograd.grad(out.sum(), [script.model.blocks[0].norm.weight], retain_graph=True, allow_unused=True)
    out.sum().backward()


def saves_elsewhere(script: Script) -> None:
    acc.save(f"{script.folder}/{'best' if script.here else 'step'}", script.model, script.optimizer)


def saves_with_own_rate(script: Script) -> None:
    if script.here:
        for group in script.optimizer.param_groups:
            group["lr"] /= 2
    saves(script)


def loads_elsewhere(script: Script) -> None:
    acc.load(f"{script.folder}/{'two' if script.here else 'one'}", script.model, script.optimizer)


def saves_two(script: Script) -> None:
    acc.save(f"{script.folder}/one", script.model, script.optimizer)
    with torch.no_grad():
        for p in script.model.parameters():
            p.add_(1)
    acc.save(f"{script.folder}/two", script.model, script.optimizer)


def saves_behind_and(then: Deed) -> dict[str, Deed]:
    """Start a background save, during which one rank ends."""

    def begins(script: Script) -> None:
        script.saving = acc.save(f"{script.folder}/step", script.model, script.optimizer, background=True)
        if script.here:
            then(script)
        script.saving.wait()

    return {"loader": begins}


def users() -> Iterator[Way]:
    loader = {"loader": nothing}
    yield Way("its loader is shorter", "ended", deeds={"loader": ends_its_loop})
    yield Way(
        "its loader is shorter, and all save at the end",
        "alone",
        "saves a checkpoint alone",
        {"loader": ends_its_loop},
        all_do={"end": lambda script: acc.save(f"{script.folder}/last", script.model)},
    )
    yield Way(
        "its loader is shorter, and all meet at a barrier",
        "absent|in vain|crashed",
        "barrier",
        {"loader": ends_its_loop},
        all_do={"end": lambda script: dist.barrier()},
        is_own=True,
    )
    yield Way("leaves out a step whose loss is NaN", "ended", deeds=loader, leaves_step_out=True)
    for name, deed, says in [
        ("a row of its loader's worker is bad", loads_rows(lambda: is_bad_hook()), "bad row|ValueError"),
        ("its loader's worker is killed", loads_rows(lambda: os.kill(os.getpid(), signal.SIGKILL)), "DataLoader worker"),
        # torch says what it met first: no such file, an end of file, a connection reset
        ("its loader's worker is interrupted", loads_rows(lambda: os.kill(os.getpid(), signal.SIGINT)), r"DataLoader\("),
    ]:  # fmt: skip
        yield Way(name, "failed", says, {"loader": deed})
    for name, deed in [
        ("saves its state dict with torch.save", lambda s: torch.save(s.model.state_dict(), f"{s.folder}/model.pt")),
        ("loads rows with a worker", loads_rows(lambda: None)),
        ("a child that it forked ends", forks(lambda: os._exit(0))),
        ("a child that it forked ends as a script does", forks(lambda: sys.exit(0))),
        ("a child that it forked fails", forks(lambda: is_bad_hook())),
    ]:
        yield Way(name, "nothing", deeds={"loader": deed})
    yield Way("calls the model in a forked child", "caller", "fork", {"loader": calls_in_child}, one_says=True)
    yield Way("calls the model from two threads", "caller", "two threads", {"forward": calls_in_thread}, one_says=True)
    for where, said in (("forward", "OutOfMemoryError"), ("backward", "in the backward of step 3")):
        name = f"swallows an out-of-memory error in its {where}"
        yield Way(name, "caught", said, {where: runs_out}, swallows=True)
        name = f"takes a batch again where memory is full in its {where}"
        yield Way(name, "caught", "OutOfMemoryError", {"loader": retries(where == "backward")})
    yield Way("goes on after a bad sample", "caught", "bad sample", {"loader": skips_after_error})
    leave = dist.destroy_process_group
    yield Way("leaves the process group on the way of an error", "left", "bad sample", {"loader": handles(leave)})
    yield Way(
        "leaves the process group in an except clause and exits",
        "left",
        "bad sample",
        {"loader": handles(leave, catches=True)},
    )
    yield Way(
        "waits at a barrier on the way of an error",
        "in vain|absent",
        "bad sample",
        {"loader": handles(dist.barrier)},
        is_own=True,
    )
    yield Way("prints an error and exits", "ended", deeds={"loader": logs_and_exits})
    yield Way("exits when a signal comes", "ended", deeds={"loader": on_signal(lambda script: sys.exit(0))})
    yield Way("saves when a signal comes", "alone", "saves", {"forward": on_signal(saves)})
    for name, hook, on in [
        ("a forward hook fails", "register_forward_hook", lambda s: s.model.blocks[1]),
        ("a hook of the whole model fails", "register_forward_pre_hook", lambda s: s.model),
        ("a full backward hook fails", "register_full_backward_hook", lambda s: s.model.blocks[1]),
        ("a hook on a parameter's gradient fails", "register_hook", a_parameter),
        ("a hook after a gradient is there fails", "register_post_accumulate_grad_hook", a_parameter),
        ("a hook of the optimizer fails", "register_step_pre_hook", lambda s: s.optimizer),
    ]:  # fmt: skip
        yield Way(name, "failed", "bad sample", {"loader": hooks(hook, on)})
    both = {"before_training": shards_two, "loader": turns_two_round}
    yield Way("calls two models in another order", "absent|other unit|circle", deeds=loader, all_do=both)
    yield Way("goes back twice", "alone", "begins a backward", loader, all_do={"loader": backs_twice})
    yield Way("asks for gradients of one parameter first", "circle", "backward", loader, all_do={"loader": penalises})
    yield Way("saves elsewhere", "paths", "best", loader, all_do={"loader": saves_elsewhere}, all_say=True)
    yield Way(
        "saves with a learning rate of its own, before a step with it",
        "contents",
        "lr",
        loader,
        all_do={"loader": saves_with_own_rate},
        all_say=True,
    )
    yield Way(
        "loads another checkpoint",
        "paths",
        "other checkpoints",
        loader,
        all_do={"before_training": saves_two, "loader": loads_elsewhere},
        all_say=True,
    )
    for prefix, one in (("", 1), ("rank 0 ", 0)):
        stopped = saves_behind_and(is_killed(signal.SIGSTOP))
        name = "while all save in the background"
        yield Way(f"{prefix}is killed {name}", "save ends", "", loader, all_do=saves_behind_and(is_killed()), one=one)
        yield Way(f"{prefix}is stopped {name}", "save waits", "", loader, all_do=stopped, one=one, stays=True)
    yield Way("raises while all save in the background", "failed", "bad sample", loader, all_do=saves_behind_and(fails))
    for name, options, num_ranks, num_steps in (
        (
            "offload to host",
            {"offload": acc.Offload(params="host", optimizer="host")},
            2,
            16,
        ),  # digests go over the hub
        ("hybrid_shard", {"strategy": acc.HYBRID_SHARD}, 4, STEPS),
        ("no_shard", {"strategy": acc.NO_SHARD}, 2, STEPS),
        ("shard_grad_op", {"strategy": acc.SHARD_GRAD_OP}, 2, STEPS),
    ):
        more: dict[str, Any] = {"options": options, "num_ranks": num_ranks, "num_steps": num_steps}
        harmless = name == "no_shard"
        yield Way(f"a bad sample, {name}", "failed", "bad sample", {"loader": fails}, **more)
        yield Way(f"its step fails, {name}", "failed", "bad sample", {"before_step": fails}, **more)
        yield Way(f"its disk is full at the step, {name}", "failed", "No space", {"before_step": fills_disk}, **more)
        yield Way(f"is killed in its backward, {name}", "silent", deeds={"backward": is_killed()}, **more)
        yield Way(
            f"evaluates alone, {name}", "nothing" if harmless else "evaluates", deeds={"loader": evaluates}, **more
        )
        yield Way(f"its loader is shorter, {name}", "ended", deeds={"loader": ends_its_loop}, **more)
        yield Way(f"skips its backward, {name}", "no backward", deeds={"skips_backward": nothing}, **more)
        yield scheduled(f"its scheduler steps once more, {name}", **more)
        yield Way(f"a step left out, {name}", "steps", "steps before it", {"skips_step": nothing}, all_say=True, **more)
        yield Way(f"weights written, {name}", "steps", "weights", {"after_step": changes_weights}, all_say=True, **more)


WAYS: dict[str, Way] = {way.name: way for make in (ends, alone, differs, given, users) for way in make()}


def pattern_of(sentence: str, rank: int) -> str:
    """Return a regular expression of a sentence's text."""
    text = re.escape(SENTENCES[sentence].replace("{rank}", str(rank)))
    return re.sub(r"\\{.*?\\}", ".*", text)


def is_expected(outcome: Outcome) -> bool:
    """Return True if all ranks that should print did so in time: first the way's sentence, with its other pattern."""
    way = outcome.way
    if way.sentence == "nothing":
        return not outcome.late and not any(outcome.codes.values())
    said = [outcome.said.get(rank, "") for rank in way.speakers]
    subject = 1 if way.sentence in ("ended", "ends itself") and way.one_says else way.one
    patterns = [pattern_of(sentence, subject) for sentence in way.sentence.split("|")]
    return not outcome.late and all(
        text.startswith(("accordion", "child: "))
        and re.search(way.also, text) is not None
        and any(re.search(pattern, text) for pattern in patterns)
        for text in said
    )


def main() -> Callable[[], None] | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    for name in _torch.PRELOADED:  # else each rank imports it for half a second, and longer than its steps take
        importlib.import_module(name)
    gc.freeze()  # what was imported is not looked through at the end of each rank
    parts = re.split(r",(?==)", only) if only.startswith("=") else [part for part in only.split(",") if part]
    ways = [
        way for way in WAYS.values() if not parts or any(part == f"={way.name}" or part in way.name for part in parts)
    ]

    def note(outcome: Outcome) -> None:
        verdict = "true" if is_expected(outcome) else "FALSE"
        print(f"{verdict} {outcome.seconds:5.1f} s  {outcome.way.name}", file=sys.stderr, flush=True)

    outcomes = run(ways, note)
    if callable(outcomes):
        return outcomes
    print(json.dumps([{**vars(one), "way": one.way.name, "true": is_expected(one)} for one in outcomes]))
    return None


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
