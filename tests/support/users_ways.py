"""Ways in which programs of users let one rank part from the others: loaders, schedulers, logging, retries."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import accordion as acc
from tests.support import models
from tests.support.parting import STEPS, Deed, Script, Way, nothing

KIND = "what users do"


def a_batch(script: Script, seed: int = 99) -> tuple[Tensor, Tensor]:
    return models.batch(seed, 0, script.rank, vocab=48)


def one_more_step(script: Script, backward: bool = True) -> None:
    script.one_step(*a_batch(script))


def ends_its_loop(script: Script) -> None:
    """As early stopping, a shorter loader, and a batch left out do: this rank takes fewer steps than the others."""
    raise StopIteration


# -- loaders


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


def is_bad() -> None:
    raise ValueError("bad row")


def kills_itself(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def waits_for_thread(script: Script) -> None:
    """The thread that reads ahead has died, and its queue stays empty."""
    rows: queue.Queue[int] = queue.Queue()

    def reads() -> None:
        raise ValueError("bad row")

    threading.Thread(target=reads, daemon=True).start()
    rows.get()


def loops(script: Script) -> None:
    while True:
        pass


def holds_lock(script: Script) -> None:
    """A call into C that keeps Python's lock: no thread of this process runs."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


# -- forks


def forks(end: Callable[[], None]) -> Deed:
    def deed(script: Script) -> None:
        pid = os.fork()
        if pid == 0:
            end()
        os.waitpid(pid, 0)

    return deed


def fails_in_child() -> None:
    raise ValueError("in the child")


# -- logging, evaluation, metrics


def logs_grad_norm(script: Script) -> None:
    print(sum(p.grad.norm() for p in script.model.parameters() if p.grad is not None))


def prints_mean(script: Script) -> None:
    print(next(script.model.parameters()).mean().item())


def clips_with_torch(script: Script) -> None:
    torch.nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)


def evaluates_full(script: Script) -> None:
    with acc.full_params(script.model), torch.no_grad():
        script.model(a_batch(script)[0])


def evaluates_more(script: Script) -> None:
    """Its evaluation set has one batch more."""
    with torch.no_grad():
        for _ in range(1 + script.here):
            script.model(a_batch(script)[0])


def torch_saves(script: Script) -> None:
    torch.save(script.model.state_dict(), f"{script.folder}/model.pt")


def gathers_objects(script: Script) -> None:
    dist.all_gather_object([None] * script.num_ranks, {"loss": 1.0})


def receives(script: Script) -> None:
    dist.recv(torch.zeros(3), src=0)


def waits_in_store(script: Script) -> None:
    dist.distributed_c10d._get_default_store().wait(["never"])


def waits_at_own_barrier(script: Script) -> None:
    dist.barrier(group=script.other_group)


def makes_group(script: Script) -> None:
    script.other_group = dist.new_group()


def makes_group_alone(script: Script) -> None:
    dist.new_group()


# -- steps and options


def makes_scheduler(script: Script) -> None:
    script.scheduler = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, gamma=0.5)


def steps_scheduler(script: Script) -> None:
    script.scheduler.step()


def plateaus(script: Script) -> None:
    """ReduceLROnPlateau with this rank's own loss."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(script.optimizer, patience=0)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)


def clears_before_step(script: Script) -> None:
    script.optimizer.zero_grad()


def accumulates(script: Script) -> None:
    """One micro-batch more than the others, under no_sync."""
    with acc.no_sync(script.model):
        script.loss(*a_batch(script)).backward()


def accumulates_aloud(script: Script) -> None:
    script.loss(*a_batch(script)).backward()


def adds_group(script: Script) -> None:
    """Two parameter groups where the others have one."""
    params = script.optimizer.param_groups[0]["params"]
    script.optimizer.add_param_group({"params": [params.pop()], "lr": 1e-3})


def forgets_params(script: Script) -> None:
    """As where its list of parameters is made by a rule of its own."""
    params = script.optimizer.param_groups[0]["params"]
    del params[len(params) // 2 :]


def loads_optimizer_state(script: Script) -> None:
    script.optimizer.load_state_dict(script.optimizer.state_dict())


def autocasts(script: Script) -> None:
    loss = script.loss
    script.loss = lambda *args: torch.autocast("cpu", torch.bfloat16)(loss)(*args)


def to_eval(script: Script) -> None:
    script.model.eval()


def trains_in_eval(script: Script) -> None:
    script.model.blocks[1].eval()


# -- errors that are caught


def is_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def retries(script: Script, in_backward: bool) -> None:
    """What a loop does that halves the batch where memory is full."""
    tokens, targets = a_batch(script)
    block = script.model.blocks[1]
    register = block.register_full_backward_pre_hook if in_backward else block.register_forward_pre_hook
    handle = register(is_out_of_memory)
    try:
        script.loss(tokens, targets).backward()
    except torch.OutOfMemoryError:
        handle.remove()
        for half in (0, 1):
            script.loss(tokens[half : half + 1], targets[half : half + 1]).backward()


def skips_after_error(script: Script) -> None:
    """`except Exception: continue` around a step: the next batch is taken."""
    handle = script.model.blocks[1].register_forward_pre_hook(is_bad_hook)
    try:
        script.loss(*a_batch(script)).backward()
    except ValueError:
        handle.remove()


def is_bad_hook(*_: Any) -> None:
    raise ValueError("bad sample")


def destroys_and_fails(script: Script) -> None:
    try:
        raise ValueError("bad sample")
    finally:
        dist.destroy_process_group()


def fails_and_waits(script: Script) -> None:
    try:
        raise ValueError("bad sample")
    finally:
        dist.barrier()


def prints_and_exits(script: Script) -> None:
    try:
        raise ValueError("bad sample")
    except ValueError:
        dist.destroy_process_group()
        sys.exit(1)


def logs_and_exits(script: Script) -> None:
    try:
        raise ValueError("bad sample")
    except ValueError as error:
        print(error)
    sys.exit(1)


def saves_on_signal(script: Script) -> None:
    """As a job does that its scheduler warns: each rank saves when its signal comes, and one alone has it."""
    signal.signal(signal.SIGTERM, lambda *_: acc.save(f"{script.folder}/last", script.model, script.optimizer))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


def exits_on_signal(script: Script) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


# -- hooks


def hooks(register: str, on: Callable[[Script], Any]) -> Deed:
    def deed(script: Script) -> None:
        getattr(on(script), register)(is_bad_hook)

    return deed


# -- models


def deletes_model(script: Script) -> None:
    script.optimizer = None
    del script.model
    gc.collect()
    threading.Event().wait()


def shards_another(script: Script) -> None:
    acc.shard(models.Tiny(), units={models.Block})


def shards_two(script: Script) -> None:
    script.second = acc.shard(models.Tiny(), units={models.Block})


def turns_two_round(script: Script) -> None:
    """A GAN whose parts are called in another order on one rank."""
    tokens, targets = a_batch(script)
    two = [script.model, script.second]
    for model in reversed(two) if script.here else two:
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()


def freezes_all(script: Script) -> None:
    script.model.requires_grad_(False)


def freezes_head(script: Script) -> None:
    script.model.head.requires_grad_(False)


def backs_twice(script: Script) -> None:
    loss = script.loss(*a_batch(script))
    loss.backward(retain_graph=True)
    if script.here:
        loss.backward()


def penalises(script: Script) -> None:
    """One rank asks for gradients of the input first."""
    out = script.model(a_batch(script)[0])
    if script.here:
        torch.autograd.grad(out.sum(), [script.model.blocks[0].norm.weight], retain_graph=True, allow_unused=True)
    out.sum().backward()


def casts(script: Script) -> None:
    script.model.half()


# -- checkpoints


def saves_elsewhere(script: Script) -> None:
    acc.save(f"{script.folder}/{'best' if script.here else 'step'}", script.model, script.optimizer)


def saves_with_own_rate(script: Script) -> None:
    if script.here:
        for group in script.optimizer.param_groups:
            group["lr"] /= 2
    acc.save(f"{script.folder}/step", script.model, script.optimizer)


def loads_elsewhere(script: Script) -> None:
    acc.load(f"{script.folder}/{'two' if script.here else 'one'}", script.model, script.optimizer)


def saves_two(script: Script) -> None:
    acc.save(f"{script.folder}/one", script.model, script.optimizer)
    with torch.no_grad():
        for p in script.model.parameters():
            p.add_(1)
    acc.save(f"{script.folder}/two", script.model, script.optimizer)


def saves_behind_and(then: Deed) -> dict[str, Deed]:
    """A save in the background is under way when one rank ends."""

    def begins(script: Script) -> None:
        script.saving = acc.save(f"{script.folder}/step", script.model, script.optimizer, background=True)
        if script.here:
            then(script)
        script.saving.wait()

    return {"loader": begins}


def saves_last(script: Script) -> None:
    acc.save(f"{script.folder}/last", script.model)


def waits(script: Script) -> None:
    dist.barrier()


def is_killed(number: signal.Signals) -> Deed:
    return lambda script: os.kill(os.getpid(), number)


def fails(script: Script) -> None:
    raise ValueError("bad sample")


def fills_disk(script: Script) -> None:
    raise OSError(28, "No space left on device")


def users() -> Iterator[Way]:
    def way(name: str, moment: str, deed: Deed, *says: str, **more: Any) -> Way:
        return Way(name=name, kind=KIND, says=[more.pop("who", "rank 1"), *says], deeds={moment: deed}, **more)

    evaluates_together = {"before_step": evaluates_more}
    yield way("its loader is shorter", "loader", ends_its_loop, "has ended its program")
    yield way(
        "its loader is shorter, and all save at the end",
        "loader",
        ends_its_loop,
        "saves a checkpoint alone",
        all_do={"end": saves_last},
    )
    yield way(
        "its loader is shorter, and all meet at a barrier", "loader", ends_its_loop, "barrier", all_do={"end": waits}
    )
    yield way("leaves out a step whose loss is NaN", "loader", nothing, "has ended its program", leaves_step_out=True)
    yield way("its evaluation has a batch more", "before_step", nothing, "evaluat", all_do=evaluates_together)
    yield way("rank 0 evaluates with full parameters", "loader", evaluates_full, "full parameters", one=0, who="rank 0")
    yield way("adds up norms of gradients for a log", "before_step", logs_grad_norm, "norm")
    yield way("prints the mean of a parameter", "before_step", prints_mean, "mean")
    yield way("clips with torch's function", "before_step", clips_with_torch, "clip_grad_norm_")
    yield way("gathers objects", "loader", gathers_objects, "all_gather_object")
    yield way("receives what nobody sends", "loader", receives, "recv")
    yield way("waits in the store", "loader", waits_in_store, "wait")
    yield way(
        "waits at a barrier of another group",
        "loader",
        waits_at_own_barrier,
        "barrier",
        all_do={"before_training": makes_group},
    )
    yield way("makes a group", "loader", makes_group_alone, "new_group")
    yield way("saves its state dict with torch.save", "loader", torch_saves, harmless=True)
    yield way("a row of its loader's worker is bad", "loader", loads_rows(is_bad), "bad row|ValueError")
    yield way("its loader's worker is killed", "loader", loads_rows(kills_itself(signal.SIGKILL)), "DataLoader worker")
    yield way(
        "its loader's worker is interrupted",
        "loader",
        loads_rows(kills_itself(signal.SIGINT)),
        r"DataLoader\(",  # torch says what it met first: no such file, an end of file, a connection reset
    )
    yield way("loads rows with a worker", "loader", loads_rows(lambda: None), harmless=True)
    yield way("its thread that reads ahead has died", "loader", waits_for_thread, r"rows\.get", stays=True)
    yield way("loops for ever", "loader", loops, "while True|nothing is heard of rank 1", stays=True)
    yield way("holds Python's lock", "loader", holds_lock, "nothing is heard of rank 1", stays=True)
    yield way("a child that it forked ends", "loader", forks(lambda: os._exit(0)), harmless=True)
    yield way("a child that it forked ends as a script does", "loader", forks(lambda: sys.exit(0)), harmless=True)
    yield way("a child that it forked fails", "loader", forks(fails_in_child), harmless=True)
    yield way(
        "its scheduler steps once more",
        "before_step",
        steps_scheduler,
        "lr",
        "step 3",
        all_say=True,
        all_do={"before_training": makes_scheduler},
    )
    yield way("its learning rate falls with its own loss", "after_step", plateaus, "lr", all_say=True)
    yield way("clears gradients before its step", "before_step", clears_before_step, "gradient", all_say=True)
    yield way("has a micro-batch more, under no_sync", "loader", accumulates, "no_sync")
    yield way("has a micro-batch more", "loader", accumulates_aloud, "step|optimizer", all_say=True)
    yield way(
        "has another parameter group", "before_training", adds_group, "number of parameters", step=0, all_say=True
    )
    yield way(
        "gives its optimizer half of the parameters", "before_training", forgets_params, "param", step=0, all_say=True
    )
    yield way("loads its optimizer's state", "loader", loads_optimizer_state, "load_state_dict|optimizer")
    yield way("autocasts", "before_training", autocasts, "autocast", step=0, all_say=True)
    yield way("forgets model.train()", "before_training", to_eval, "eval|training mode", step=0, all_say=True)
    yield way(
        "takes a batch again where memory is full in its forward",
        "loader",
        lambda s: retries(s, False),
        "OutOfMemoryError",
    )
    yield way(
        "takes a batch again where memory is full in its backward",
        "loader",
        lambda s: retries(s, True),
        "OutOfMemoryError",
    )
    yield way("goes on after a bad sample", "loader", skips_after_error, "bad sample")
    yield way("leaves the process group on the way of an error", "loader", destroys_and_fails, "bad sample")
    yield way("waits at a barrier on the way of an error", "loader", fails_and_waits, "bad sample")
    yield way("leaves the process group in an except clause and exits", "loader", prints_and_exits, "bad sample")
    yield way("prints an error and exits", "loader", logs_and_exits, "has ended its program")
    yield way("saves when a signal comes", "forward", saves_on_signal, "saves|checkpoint")
    yield way("exits when a signal comes", "loader", exits_on_signal, "has ended its program")
    yield way(
        "a forward hook fails", "loader", hooks("register_forward_hook", lambda s: s.model.blocks[1]), "bad sample"
    )
    yield way(
        "a hook of the whole model fails", "loader", hooks("register_forward_pre_hook", lambda s: s.model), "bad sample"
    )
    yield way(
        "a full backward hook fails",
        "loader",
        hooks("register_full_backward_hook", lambda s: s.model.blocks[1]),
        "bad sample",
    )
    yield way(
        "a hook on a parameter's gradient fails",
        "loader",
        hooks("register_hook", lambda s: next(s.model.blocks[1].parameters())),
        "bad sample",
    )
    yield way(
        "a hook after a gradient is there fails",
        "loader",
        hooks("register_post_accumulate_grad_hook", lambda s: next(s.model.blocks[1].parameters())),
        "bad sample",
    )
    yield way(
        "a hook of the optimizer fails", "loader", hooks("register_step_pre_hook", lambda s: s.optimizer), "bad sample"
    )
    yield way("deletes its model and goes on", "loader", deletes_model, r"Event\(\)\.wait", stays=True)
    yield way("shards another model", "loader", shards_another, "shard")
    yield way(
        "calls two models in another order",
        "loader",
        nothing,
        "rank 0|unit",
        all_do={"before_training": shards_two, "loader": turns_two_round},
    )
    yield way("freezes the whole model", "loader", freezes_all, "train|gradient|require", all_say=False)
    yield way("freezes the head", "loader", freezes_head, "train")
    yield way("goes back twice", "loader", nothing, "backward", all_do={"loader": backs_twice})
    yield way("asks for gradients of one parameter first", "loader", nothing, "backward", all_do={"loader": penalises})
    yield way("casts its model", "loader", casts, "UsageError")
    yield way(
        "saves elsewhere",
        "loader",
        nothing,
        "best",
        all_do={"loader": saves_elsewhere},
        who="rank 1|this rank saves",
        all_say=True,
    )
    yield way(
        "saves with a learning rate of its own, before a step with it",
        "loader",
        nothing,
        "lr",
        all_do={"loader": saves_with_own_rate},
        who="rank 1|this rank",
        all_say=True,
    )
    yield way(
        "loads another checkpoint",
        "loader",
        nothing,
        "other checkpoints",
        all_do={"before_training": saves_two, "loader": loads_elsewhere},
        all_say=True,
    )
    yield way(
        "is killed while all save in the background",
        "loader",
        nothing,
        "ended",
        all_do=saves_behind_and(is_killed(signal.SIGKILL)),
    )
    yield way(
        "rank 0 is killed while all save in the background",
        "loader",
        nothing,
        "ended",
        all_do=saves_behind_and(is_killed(signal.SIGKILL)),
        one=0,
        who="rank 0|store",
    )
    yield way(
        "is stopped while all save in the background",
        "loader",
        nothing,
        "",
        all_do=saves_behind_and(is_killed(signal.SIGSTOP)),
        stays=True,
    )
    yield way(
        "rank 0 is stopped while all save in the background",
        "loader",
        nothing,
        "",
        all_do=saves_behind_and(is_killed(signal.SIGSTOP)),
        one=0,
        who="rank 0|store",
        stays=True,
    )
    yield way("raises while all save in the background", "loader", nothing, "", all_do=saves_behind_and(fails))
    for name, options, num_ranks in (
        ("offload to host", {"offload": acc.Offload(params="host", optimizer="host")}, 2),  # told over the party line
        ("hybrid_shard", {"strategy": acc.HYBRID_SHARD}, 4),
        ("no_shard", {"strategy": acc.NO_SHARD}, 2),
        ("shard_grad_op", {"strategy": acc.SHARD_GRAD_OP}, 2),
    ):
        more: dict[str, Any] = {
            "options": options,
            "num_ranks": num_ranks,
            "num_steps": 16 if "offload" in name else STEPS,
        }
        yield way(f"a bad sample, {name}", "loader", fails, "bad sample", **more)
        yield way(f"its step fails, {name}", "before_step", fails, "bad sample", **more)
        yield way(f"its disk is full at the step, {name}", "before_step", fills_disk, "No space left", **more)
        yield way(f"is killed in its backward, {name}", "backward", is_killed(signal.SIGKILL), "without a word", **more)
        yield way(f"evaluates alone, {name}", "loader", evaluates_alone, "evaluat", harmless=name == "no_shard", **more)
        yield way(f"its loader is shorter, {name}", "loader", ends_its_loop, "has ended its program", **more)
        yield way(f"skips its backward, {name}", "skips_backward", nothing, "backward", **more)
        yield way(
            f"its scheduler steps once more, {name}",
            "before_step",
            steps_scheduler,
            "lr",
            all_say=True,
            all_do={"before_training": makes_scheduler},
            **more,
        )
        yield way(f"a step left out, {name}", "skips_step", nothing, "step", all_say=True, **more)
        yield way(
            f"weights written, {name}", "after_step", changes_weights, "weights|written|replica", all_say=True, **more
        )


def changes_weights(script: Script) -> None:
    with torch.no_grad():
        next(script.model.blocks[0].parameters()).add_(1e-3)


def evaluates_alone(script: Script) -> None:
    with torch.no_grad():
        script.model(a_batch(script)[0])
