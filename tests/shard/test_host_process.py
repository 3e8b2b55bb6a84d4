"""`shard` changes nothing in the process that tensors and optimizers of others notice, but what docs/guide.md lists."""

from __future__ import annotations

import copyreg
import platform
import resource
import sys
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import optimizer as optimizers

import accordion as acc
from accordion.optimizers.wrap import StepHooks
from accordion.safety.dtensor_calls import ANY_TRUE, DRAWS_INTO, DRAWS_LIKE, NUMBER, TANGENT, VIEW, WRITES
from accordion.safety.own_process import keep_freed_memory
from tests.devices import device
from tests.support import forked
from tests.support.compare import assert_alike
from tests.support.ranked import on_world

DOCUMENTED: set[str] = set()
NUM_HOOKS = 1
WATCHED = ("torch", "safetensors", "transformers", "accelerate", "numpy")
STANDARD = ("sys", "os", "signal", "socket", "threading", "warnings", "copyreg", "pickle", "builtins", "gc", "atexit")


def functions() -> dict[str, Any]:
    """Return all functions, classes and methods of the modules that other code calls."""
    modules = {name: m for name, m in sys.modules.items() if name.split(".")[0] in WATCHED or name in STANDARD}
    listed = {
        f"{name}.{key}": value for name, m in modules.items() for key, value in vars(m).items() if callable(value)
    }
    classes = {name: value for name, value in listed.items() if isinstance(value, type)}
    methods = {f"{name}.{key}": value for name, kind in classes.items() for key, value in vars(kind).items()}
    return listed | {name: value for name, value in methods.items() if callable(value) or isinstance(value, property)}


def tables() -> dict[str, Any]:
    """Return copies of the registries of torch and Python that a library could write to."""
    dispatcher = DTensor._op_dispatcher
    propagator: Any = dispatcher.sharding_propagator
    return {
        "answers of DTensor": dict(dispatcher._custom_op_handlers),
        "random operators of DTensor": set(dispatcher._random_ops),
        "rules of DTensor": [list(t) for t in (propagator.op_strategy_funcs, propagator.op_to_rules)],
        "hooks before steps": list(optimizers._global_optimizer_pre_hooks.values()),
        "hooks after steps": list(optimizers._global_optimizer_post_hooks.values()),
        "hooks of modules": [
            list(nn.modules.module._global_forward_hooks),
            list(nn.modules.module._global_backward_hooks),
        ],
        "pickles": dict(copyreg.dispatch_table),
        "safe globals": list(torch.serialization.get_safe_globals()),
        "warnings": list(warnings.filters),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


def ordinary(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    """Return what programs do to DTensors, files and optimizers that belong to no sharded model."""
    torch.manual_seed(0)
    p = nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    odd = distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])

    def nan_check() -> None:
        with torch.autograd.set_detect_anomaly(True):
            (p * 2).sum().full_tensor().backward()

    def counted() -> Any:
        before = p._version
        p.data.mul_(2)
        return p._version - before

    def stepped(kind: Any) -> Any:
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return (
            weight.detach(),
            type(optimizer).__name__,
            sorted(vars(optimizer)),
            len(optimizer._optimizer_step_pre_hooks),
        )

    def saved() -> Any:
        from safetensors.torch import save

        return save({"p": p})

    return {
        "number": lambda: p.detach().norm().item(),
        "draw": lambda: torch.randn_like(p).to_local(),
        "write": counted,
        "view": lambda: p.detach()[0].zero_().to_local(),
        "index": lambda: p.detach().__setitem__(0, 0),
        "flatten": odd.flatten,
        "anomaly": nan_check,
        "SGD": lambda: stepped(torch.optim.SGD),
        "Adam": lambda: stepped(torch.optim.Adam),  # torch itself replaces `step` when it makes the first one
        "Adafactor": lambda: stepped(torch.optim.Adafactor),
        "safetensors": saved,
    }


def outcomes(mesh: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, use in ordinary(mesh).items():
        torch.manual_seed(1)
        try:
            found[name] = use()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(_: list[str]) -> None:
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    dist.init_process_group("gloo")
    mesh, mesh_of_model = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model(torch.ones(2, 4)).sum().backward()  # what torch makes at its first backward
    model.zero_grad()
    results, known, registered = outcomes(mesh), functions(), tables()

    acc.shard(model, mesh_of_model, sync=True)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        acc.wrap_optimizer(torch.optim.Adam(model.parameters())),
    ):
        with torch.autograd.set_detect_anomaly(True):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    now = functions()
    changed = {name for name, value in known.items() if now.get(name) is not value}
    assert changed <= DOCUMENTED, changed
    after = tables()
    for kind in ("before", "after"):
        before = registered.pop(f"hooks {kind} steps")
        ours = [hook for hook in after.pop(f"hooks {kind} steps") if hook not in before]
        assert [type(hook.__self__) for hook in ours] == [StepHooks] * NUM_HOOKS, ours
    answers = after.pop("answers of DTensor")
    theirs = registered.pop("answers of DTensor")
    assert {name: answers[name] for name in theirs} == theirs
    assert set(answers) - set(theirs) <= {*DRAWS_INTO, *DRAWS_LIKE, *WRITES, NUMBER, TANGENT, ANY_TRUE, VIEW}
    assert after == registered
    for name, value in outcomes(mesh).items():
        assert_alike({name: value}, {name: results[name]})
    dist.destroy_process_group()


def test_shard_changes_nothing_that_other_code_sees_but_what_is_documented():
    assert forked.under_torchrun([], 2, main) == 0


# -- memory that a step frees; under our own commands it stays with the process on a CPU


@pytest.mark.cpu("it counts pages of the process")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
@on_world(2)
def test_a_step_is_done_in_memory_of_the_step_before(mesh):
    """Count the bytes of new pages per step. By default glibc needs 4 weights or more in each step, of the 12 allocated."""
    width = 2**11  # a block of 32 MiB in float32
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2)))
    keep_freed_memory()
    acc.shard(model, mesh, units=lambda name, _: name.isdigit())
    new_bytes = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(torch.ones(2, width, device=device())).sum().backward()
        model.zero_grad()
        new_bytes.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
    # Which free block malloc picks depends on the threads: single steps extend the heap by a weight or two.
    assert median(new_bytes[2:]) < 3 * 4 * width * width, (
        "three weights; a step gathers 8 of them and makes 4 gradients"
    )
