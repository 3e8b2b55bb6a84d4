"""Programs (`WAYS`) in which one rank diverges from the others, and the sentences that the others must print.

`python -m tests.support.ways --only a,b` runs the programs whose names contain "a" or "b", and prints the outcomes as JSON. With
`=a` the whole name must be "a"; without `--only` all programs run.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import accordion as acc
from accordion import _torch
from tests.support import models
from tests.support.diverging import AT, STEPS, TIMEOUT_S, Deed, Outcome, Script, Way, nothing, run

PAGE = Path(__file__).parents[2] / "docs" / "ways-to-part.md"
# The sentences of the page, by key. `{rank}`: the rank that diverges; other names in braces stand for any text.
SENTENCES = {**dict(re.findall(r"^\| ([a-z_ ]+) \| `(.+?)` \|", PAGE.read_text(), re.M)), "nothing": ""}

# -- how a rank ends


def fails(*_: Any) -> None:
    raise ValueError("bad sample")


def runs_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fills_disk(script: Script) -> None:
    raise OSError(28, "No space left on device")


def ends_its_loop(script: Script) -> None:
    """End the loop of training before the other ranks do, as with early stopping or a shorter loader."""
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
            yield Way(f"{how} {where}", sentence, also, moment, deed, step=step, is_own=how == "aborts")
    for moment in ("forward", "backward", "before_step"):
        where = MOMENTS[moment][0]
        yield Way(f"raises {where}, first step", "failed", "bad sample", moment, fails, step=1)
        yield Way(f"rank 0 raises {where}", "failed", "bad sample", moment, fails, one=0, num_ranks=3)
        yield Way(f"rank 2 of 3 raises {where}", "failed", "bad sample", moment, fails, one=2, num_ranks=3)
    for moment in ("before_training", "forward", "before_step"):
        where, step = MOMENTS[moment]
        yield Way(f"rank 0 is killed {where}", "silent", "", moment, is_killed(), one=0, num_ranks=3, step=step)
    stops = is_killed(signal.SIGSTOP)
    for moment, (where, step) in MOMENTS.items():
        for one in (0, 1):
            sentence = "nothing new" if moment == "before_training" else "unheard"
            name, also = f"rank {one} is stopped, as by Ctrl-Z, {where}", f"there is no answer from rank {one}"
            yield Way(name, sentence, also, moment, stops, step=step, one=one, stays=True)
    for how in ("raises", "exits with 0", "is killed"):
        yield Way(f"{how} before shard", "before shard", "", "before_shard", ENDS[how][0], step=0)


# -- what one rank does alone


def a_batch(script: Script) -> tuple[Tensor, Tensor]:
    return models.batch(99, 0, script.rank, vocab=48)


def evaluates(script: Script) -> None:
    with torch.no_grad():
        script.model(a_batch(script)[0])


def evaluates_more(script: Script) -> None:
    """Evaluate one batch, and a second one on the rank that diverges."""
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
    """Wait for ever for a row in a queue, whose thread has died."""
    rows: queue.Queue[int] = queue.Queue()
    threading.Thread(target=fails, daemon=True).start()
    rows.get()


def loops(script: Script) -> None:
    while True:
        pass


def holds_lock(script: Script) -> None:
    """Call C code that sleeps without releasing the GIL, so that no thread of this process runs."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def logs_grad_norm(script: Script) -> None:
    print(sum(p.grad.norm() for p in script.model.parameters() if p.grad is not None))


def takes_grad_norm(script: Script) -> None:
    next(script.model.parameters()).grad.norm().item()


def clips_with_torch(script: Script) -> None:
    torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)


def makes_group(script: Script) -> None:
    script.other_group = dist.new_group()


def waits_at_other_group(script: Script) -> None:
    dist.barrier(group=script.other_group)


def loads_optimizer_state(script: Script) -> None:
    script.optimizer.load_state_dict(script.optimizer.state_dict())


def alone() -> Iterator[Way]:
    waits: list[tuple[str, str, Deed, str]] = [
        ("clips", "after_backward", lambda s: acc.clip_grad_norm_(s.model, 1.0), "clip"),
        ("clips with torch's function", "before_step", clips_with_torch, "clip_grad_norm_"),
        ("takes the norm of a DTensor", "after_backward", takes_grad_norm, "norm"),
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
    ]
    for name, moment, deed, also in waits:
        # Whether gloo lets the rank wait, lets it crash, or fails first depends on sizes.
        yield Way(name, "absent|in vain|crashed", also, moment, deed, is_own=True)
    groups: dict[str, Any] = {"all_do": {"before_training": makes_group}, "is_own": True}
    yield Way("waits at a barrier of another group", "absent", "barrier", "loader", waits_at_other_group, **groups)
    stays: list[tuple[str, str, str, Deed, str]] = [
        ("sleeps in the loader", "absent", "loader", sleeps, "sleep"),
        ("sleeps in its forward", "absent", "forward", sleeps, "sleep"),
        ("its thread that reads ahead has died", "absent", "loader", waits_for_thread, r"rows\.get"),
        ("deletes its model and goes on", "absent", "loader", deletes_model, r"Event\(\)\.wait"),
        ("loops for ever", "absent|unheard", "loader", loops, "while True|there is no answer from rank 1"),
        ("holds Python's lock", "unheard", "loader", holds_lock, ""),
    ]
    for name, sentence, moment, deed, also in stays:
        yield Way(name, sentence, also, moment, deed, stays=True)
    name = "sleeps before the first forward"
    yield Way(name, "nothing new", "rank 1 .*sleep", "before_training", sleeps, step=0, stays=True)
    in_loader: list[tuple[str, str, str, Deed]] = [
        # Both waits end after the same time.
        ("waits in the store", "failed|absent", "wait timeout|never", lambda s: _torch.default_store().wait(["never"])),
        ("leaves the process group", "left", "", leaves_group),
        ("saves", "alone", "saves", saves),
        ("saves in the background", "alone", "saves", lambda s: acc.save(f"{s.folder}/step", s.model, background=True)),
        ("takes the full state dict", "alone", "full state dict", lambda script: acc.full_state_dict(script.model)),
        ("shows full parameters", "alone", "full parameters", shows_full),
        ("loads a state dict", "alone", "state", lambda s: s.model.load_state_dict(models.Tiny().state_dict())),
        ("evaluates", "evaluates", "", evaluates),
        ("calls a block", "other unit", r"blocks\.1", calls_a_block),
        ("freezes a block", "other unit", "training 0 of", lambda s: s.model.blocks[1].requires_grad_(False)),
        ("freezes the head", "other unit", "", lambda script: script.model.head.requires_grad_(False)),
        ("freezes the whole model", "other unit", "", lambda script: script.model.requires_grad_(False)),
        ("casts its model", "failed", "UsageError", lambda script: script.model.half()),
    ]
    for name, sentence, also, deed in in_loader:
        yield Way(name, sentence, also, "loader", deed)
    yield Way("rank 0 evaluates with full parameters", "alone", "full parameters", "loader", evaluates_full, one=0)
    saved: dict[str, Deed] = {"before_training": saves}
    for name, deed in (("loads a checkpoint", loads), ("loads a checkpoint with its optimizer", loads_optimizer)):
        yield Way(name, "alone", "load", "loader", deed, all_do=saved)
    name = "loads the optimizer, and the others the model alone"
    yield Way(name, "contents", "optimizer", "loader", loads_optimizer, all_do={**saved, "loader": loads_but_one})
    at_end: list[tuple[str, str, Deed]] = [
        ("saves", "ended", saves),
        ("takes the full state dict", "ended", lambda script: acc.full_state_dict(script.model)),
        ("takes a full tensor", "ends itself", full_tensor),
        ("evaluates", "ended", evaluates),
    ]
    for name, sentence, deed in at_end:
        name, also = f"rank 0 {name} at the end", "rank 1 has ended its program"
        yield Way(name, sentence, also, "end", deed, one=0, step=STEPS, one_says=True)
    yield Way("its evaluation has a batch more", "evaluates", "", "before_step", all_do={"before_step": evaluates_more})
    yield Way("calls the model again", "no backward", "", "after_backward", lambda s: s.model(a_batch(s)[0]))
    yield Way("skips its backward", "no backward", "", "skips_backward")
    yield Way("backs under no_sync", "no_sync", "", "no_sync")
    yield Way("leaves a clip out", "other waits", "clip", "skips_clip", clips=True)


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
    """Step a `ReduceLROnPlateau` with losses of this rank alone, which lower its learning rate."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)


def accumulates(script: Script) -> None:
    """Run an additional micro-batch, under `no_sync`."""
    with acc.no_sync(script.model):
        script.loss(*a_batch(script)).backward()


def adds_group(script: Script) -> None:
    """Move the last parameter to a second parameter group; other ranks have one group."""
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
    for name, other, also in [
        ("another learning rate", (adam, {"lr": 2e-3}), r"lr"),
        ("other betas", (adam, {"lr": 1e-3, "betas": (0.8, 0.99)}), "betas"),
        ("another weight decay", (adam, {"lr": 1e-3, "weight_decay": 0.2}), "weight_decay"),
        ("another eps", (adam, {"lr": 1e-3, "eps": 1e-6}), "eps"),
        ("amsgrad", (adam, {"lr": 1e-3, "amsgrad": True}), "amsgrad"),
        ("another kind of optimizer", (torch.optim.SGD, {"lr": 1e-3}), "SGD"),
    ]:
        for wrapped in (True, False):
            full = f"{name}{'' if wrapped else ', not wrapped'}"
            yield Way(full, "steps", f"step 1: .*{also}", others_optimizer=other, wrapped=wrapped, all_say=True)
    for strategy in (acc.FULL_SHARD, acc.SHARD_OPTIM, acc.NO_SHARD, acc.HYBRID_SHARD):
        rows = dict(SILENT)
        if strategy in (acc.NO_SHARD, acc.HYBRID_SHARD):
            rows["its replica drifts"] = ("after_step", drifts, "weights")
        more: dict[str, Any] = {"options": {"strategy": strategy}, "num_ranks": 4 if strategy.hybrid else 2}
        for name, (moment, deed, also) in rows.items():
            yield Way(f"{name}, {strategy.name}", "steps", also, moment, deed, all_say=True, **more)
    for name, moment, deed, also in [
        ("its learning rate falls with its own loss", "after_step", plateaus, "lr"),
        ("clears gradients before its step", "before_step", lambda script: script.optimizer.zero_grad(), "gradients"),
        ("has a micro-batch more", "loader", lambda s: s.loss(*a_batch(s)).backward(), "steps before it"),
        ("has another parameter group", "before_training", adds_group, "number of parameters"),
        ("gives its optimizer half of the parameters", "before_training", forgets_params, "number of parameters"),
        ("autocasts", "before_training", autocasts, "autocast"),
        ("forgets model.train()", "before_training", lambda script: script.model.eval(), "eval mode"),
    ]:
        step = 0 if moment == "before_training" else AT
        yield Way(name, "steps", also, moment, deed, step=step, all_say=True)
    yield scheduled("its scheduler steps once more")
    yield Way("has a micro-batch more, under no_sync", "no_sync", "", "loader", accumulates)


def scheduled(name: str, **more: Any) -> Way:
    makes: dict[str, Deed] = {"before_training": makes_scheduler}
    more |= {"all_say": True, "all_do": makes}
    return Way(name, "steps", "step 3: .*lr", "before_step", lambda script: script.scheduler.step(), **more)


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


def loads_rows(deed: Deed) -> Deed:
    """Return a function that loads rows with a worker process of a `DataLoader`, which runs `deed` at the third row."""

    def loads(script: Script) -> None:
        def collated(rows: list[int]) -> Any:
            return deed(script) if rows == [2] else rows

        list(DataLoader(list(range(4)), collate_fn=collated, num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]

    return loads


def forks(end: Deed) -> Deed:
    def deed(script: Script) -> None:
        pid = os.fork()
        if pid == 0:
            end(script)
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
    """Call the model from a second thread during a forward on this one, and raise the error of that call."""
    ThreadPoolExecutor(1).submit(evaluates, script).result(TIMEOUT_S)


def retries(in_backward: bool) -> Deed:
    """Return a function that runs a batch, gets an out-of-memory error in its forward or backward, and then runs two halves."""

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
    """Run a batch whose forward raises, and swallow the error, as a loop with `except: continue` does."""
    handle = script.model.blocks[1].register_forward_pre_hook(fails)
    try:
        script.loss(*a_batch(script)).backward()
    except ValueError:
        handle.remove()


def handles(then: Callable[[], object], *, catches: bool = False) -> Deed:
    """Return a function that calls `then()` while it handles an error, then raises the error, or with `catches` exits with 1."""

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
    return lambda script: getattr(on(script), register)(fails)


def a_parameter(script: Script) -> Tensor:
    return next(script.model.blocks[1].parameters())


def shards_two(script: Script) -> None:
    script.second = acc.shard(models.Tiny(), units={models.Block})


def turns_two_round(script: Script) -> None:
    """Train two models, as in a GAN, which the rank that diverges calls in another order."""
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
    """Run a forward and a backward, between which the rank that diverges calls `autograd.grad` for one parameter."""
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


def saves_in_background_and(then: Deed) -> dict[str, Deed]:
    """Return functions for `Way.all_do`: all ranks save in the background, and one rank runs `then` meanwhile."""

    def begins(script: Script) -> None:
        script.saving = acc.save(f"{script.folder}/step", script.model, script.optimizer, background=True)
        if script.here:
            then(script)
        script.saving.wait()

    return {"loader": begins}


def of_loaders() -> Iterator[Way]:
    name = "its loader is shorter"
    yield Way(name, "ended", "", "loader", ends_its_loop)
    saves_last: dict[str, Deed] = {"end": lambda script: acc.save(f"{script.folder}/last", script.model)}
    also = "saves a checkpoint alone"
    yield Way(f"{name}, and all save at the end", "alone", also, "loader", ends_its_loop, all_do=saves_last)
    meet: dict[str, Any] = {"all_do": {"end": lambda script: dist.barrier()}, "is_own": True}
    gloo = "absent|in vain|crashed"
    yield Way(f"{name}, and all meet at a barrier", gloo, "barrier", "loader", ends_its_loop, **meet)
    yield Way("leaves out a step whose loss is NaN", "ended", "", "skips_step_of_loop")
    for name, deed, also in [
        ("a row of its loader's worker is bad", fails, "bad row|ValueError"),
        ("its loader's worker is killed", is_killed(), r"DataLoader worker|DataLoader\("),
        # torch says what it met first: no such file, an end of file, a connection reset
        ("its loader's worker is interrupted", is_killed(signal.SIGINT), r"DataLoader\("),
    ]:
        yield Way(name, "failed", also, "loader", loads_rows(deed))
    for name, deed in [
        ("saves its state dict with torch.save", lambda s: torch.save(s.model.state_dict(), f"{s.folder}/model.pt")),
        ("loads rows with a worker", loads_rows(nothing)),
        ("a child that it forked ends", forks(ENDS["calls os._exit(0)"][0])),
        ("a child that it forked ends as a script does", forks(ENDS["exits with 0"][0])),
        ("a child that it forked fails", forks(fails)),
    ]:
        yield Way(name, "nothing", "", "loader", deed)
    yield Way("calls the model in a forked child", "caller", "fork", "loader", calls_in_child, one_says=True)
    yield Way("calls the model from two threads", "caller", "two threads", "forward", calls_in_thread, one_says=True)


def with_errors() -> Iterator[Way]:
    for where, also in (("forward", "OutOfMemoryError"), ("backward", "in the backward of step 3")):
        yield Way(f"swallows an out-of-memory error in its {where}", "caught", also, where, runs_out, swallows=True)
        name, deed = f"takes a batch again where memory is full in its {where}", retries(where == "backward")
        yield Way(name, "caught", "OutOfMemoryError", "loader", deed)
    leaves, exits = handles(dist.destroy_process_group), handles(dist.destroy_process_group, catches=True)
    rows: list[tuple[str, str, str, str, Deed]] = [
        ("goes on after a bad sample", "caught", "bad sample", "loader", skips_after_error),
        ("leaves the process group on the way of an error", "left", "bad sample", "loader", leaves),
        ("leaves the process group in an except clause and exits", "left", "bad sample", "loader", exits),
        ("prints an error and exits", "ended", "", "loader", logs_and_exits),
        ("exits when a signal comes", "ended", "", "loader", on_signal(lambda script: sys.exit(0))),
        ("saves when a signal comes", "alone", "saves", "forward", on_signal(saves)),
    ]
    for name, sentence, also, moment, deed in rows:
        yield Way(name, sentence, also, moment, deed)
    name = "waits at a barrier on the way of an error"
    yield Way(name, "in vain|absent", "bad sample", "loader", handles(dist.barrier), is_own=True)
    for name, hook, on in [
        ("a forward hook fails", "register_forward_hook", lambda s: s.model.blocks[1]),
        ("a hook of the whole model fails", "register_forward_pre_hook", lambda s: s.model),
        ("a full backward hook fails", "register_full_backward_hook", lambda s: s.model.blocks[1]),
        ("a hook on a parameter's gradient fails", "register_hook", a_parameter),
        ("a hook after a gradient is there fails", "register_post_accumulate_grad_hook", a_parameter),
        ("a hook of the optimizer fails", "register_step_pre_hook", lambda s: s.optimizer),
    ]:
        yield Way(name, "failed", "bad sample", "loader", hooks(hook, on))


def streams_and(deed: Deed) -> Deed:
    """Return a function that streams the weights, one tensor at a time. The rank that diverges runs `deed` at the second one."""

    def streams(script: Script) -> None:
        for i, _ in enumerate(acc.stream_weights(script.model, 1)):
            if i == 1 and script.here:
                deed(script)

    return streams


def of_all() -> Iterator[Way]:
    """Yield ways in which all ranks call one function, which does something else on the rank that diverges."""
    two: dict[str, Deed] = {"before_training": shards_two, "loader": turns_two_round}
    yield Way("calls two models in another order", "absent|other unit|circle", "", "loader", all_do=two)
    other: dict[str, Deed] = {"before_training": saves_two, "loader": loads_elsewhere}
    yield Way("loads another checkpoint", "paths", "different checkpoints", "loader", all_do=other, all_say=True)
    rows: list[tuple[str, str, str, Deed, bool]] = [
        ("goes back twice", "alone", "begins a backward", backs_twice, False),
        ("asks for gradients of one parameter first", "circle", "backward", penalises, False),
        ("saves elsewhere", "paths", "best", saves_elsewhere, True),
        ("saves with a learning rate of its own, before a step with it", "contents", "lr", saves_with_own_rate, True),
    ]
    for name, sentence, also, deed, all_say in rows:
        yield Way(name, sentence, also, "loader", all_do={"loader": deed}, all_say=all_say)
    for prefix, one in (("", 1), ("rank 0 ", 0)):
        name, stops = "while all save in the background", saves_in_background_and(is_killed(signal.SIGSTOP))
        dies = saves_in_background_and(is_killed())
        yield Way(f"{prefix}is killed {name}", "save ends", "", "loader", all_do=dies, one=one)
        yield Way(f"{prefix}is stopped {name}", "save waits", "", "loader", all_do=stops, one=one, stays=True)
    stream: dict[str, Deed] = {"loader": streams_and(is_killed())}
    yield Way("is killed while all stream", "silent", "streams bucket", "loader", all_do=stream, num_ranks=3)
    yield Way("raises while all stream", "failed", "bad sample", "loader", all_do={"loader": streams_and(fails)})
    raises = saves_in_background_and(fails)
    yield Way("raises while all save in the background", "failed", "bad sample", "loader", all_do=raises)


def with_options() -> Iterator[Way]:
    host = {"offload": acc.Offload(params="host", optimizer="host")}
    for name, options, num_ranks, num_steps in [
        ("offload to host", host, 2, 16),  # digests go over the hub
        ("hybrid_shard", {"strategy": acc.HYBRID_SHARD}, 4, STEPS),
        ("no_shard", {"strategy": acc.NO_SHARD}, 2, STEPS),
        ("shard_grad_op", {"strategy": acc.SHARD_GRAD_OP}, 2, STEPS),
    ]:
        more: dict[str, Any] = {"options": options, "num_ranks": num_ranks, "num_steps": num_steps}
        harmless = name == "no_shard"
        rows: list[tuple[str, str, str, str, Deed]] = [
            ("a bad sample", "failed", "bad sample", "loader", fails),
            ("its step fails", "failed", "bad sample", "before_step", fails),
            ("its disk is full at the step", "failed", "No space", "before_step", fills_disk),
            ("is killed in its backward", "silent", "", "backward", is_killed()),
            ("evaluates alone", "nothing" if harmless else "evaluates", "", "loader", evaluates),
            ("its loader is shorter", "ended", "", "loader", ends_its_loop),
            ("skips its backward", "no backward", "", "skips_backward", nothing),
            ("a step left out", "steps", "steps before it", "skips_step", nothing),
            ("weights written", "steps", "weights", "after_step", changes_weights),
        ]
        for what, sentence, also, moment, deed in rows:
            yield Way(f"{what}, {name}", sentence, also, moment, deed, all_say=sentence == "steps", **more)
        yield scheduled(f"its scheduler steps once more, {name}", **more)


MAKERS = (ends, alone, differs, given, of_loaders, with_errors, of_all, with_options)
WAYS: dict[str, Way] = {way.name: way for make in MAKERS for way in make()}


def pattern_of(sentence: str, rank: int) -> str:
    """Return a regular expression for the text of `SENTENCES[sentence]`, with `rank` as the rank that it is about."""
    text = re.escape(SENTENCES[sentence].replace("{rank}", str(rank)))
    return re.sub(r"\\{.*?\\}", ".*", text)


def is_expected(outcome: Outcome) -> bool:
    """Return True if each rank that should print a sentence printed, in time, one of those that its `Way` names, which matches
    `also`. If no rank should print, return True if all ended in time with exit code 0."""
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
    gc.freeze()  # no rank's last collection visits the imported objects
    words = re.split(r",(?==)", only) if only.startswith("=") else [word for word in only.split(",") if word]
    ways = [
        way for way in WAYS.values() if not words or any(word == f"={way.name}" or word in way.name for word in words)
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
