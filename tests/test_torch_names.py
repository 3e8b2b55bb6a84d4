"""Every private name of torch that the package uses (`accordion/_torch`): on the installed version it is there and does so."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accordion import _torch
from accordion.workers.ranks import STILL, register_still
from tests.support.ranked import on_world

CPU = torch.device("cpu")
CHECKS: dict[str, Callable[[], None]] = {}
# Names that nothing is checked of here: a torch in which one does something else fails these tests.
HELD_BY: dict[str, tuple[str, ...]] = {
    "compat/test_fsdp1.py": ("is_wrap_policy", "run_wrap_policy", "classes_without_mixed_precision"),
    "compat/test_fsdp2_newer.py": (
        *("gradient_reduction_handle", "reduces_in_own_dtype", "is_shard_placement_result"),
    ),
    "compat/test_migrate.py": ("homes_of_fully_shard",),
    "compat/test_fsdp2_modules.py": ("composed_with", "mark_fully_sharded", "fsdp_module_base"),
    "engine/test_contracts.py": (
        "gather_options",
        "exchange_options",
        "reduce_scatter_options",
        "all_reduce_options",
        "storage_key",
    ),
    "engine/test_entries_and_hooks.py": (
        *("hand_over_hooks", "has_hooks", "post_accumulate_hooks", "grads_of", "which_train", "marks_of"),
    ),
    "engine/test_grid.py": (
        *("foreach_add_", "foreach_copy_", "foreach_mul_", "chunk_cat"),
        *("local_of", "set_local", "as_dtensor", "as_dtensors", "plain_attributes", "untracked_views"),
    ),
    "engine/test_precision.py": ("saving_hook", "asked_grad_dtype", "keep_grad_dtype", "like_in"),
    "engine/test_transforms.py": ("transforms_active", "is_batched"),
    "integrations/test_accelerate.py": ("DDP_LEAVES_OUT",),
    "observe/test_debug.py": ("debug_frontend", "answer_debug_server"),
    "offload/test_programs.py": ("settle_before_unscale",),
    "optim/test_kinds_of_optimizers.py": ("unseen_by_dynamo",),
    "optim/test_low_bit.py": ("rows_dtensor", "local_or_same"),
    "optim/test_muon.py": ("muon_rate",),
    "optim/test_errors.py": ("has_counted_step", "counts_itself", "count_step"),
    "plan/test_counted.py": (
        *("fake_metadata", "fake_like", "fake_view", "fake_collectives", "mutated_arguments", "argument_of"),
        *("named_arguments", "DispatchMode", "EagerMode", "WITHOUT_KERNEL", "around_propagation"),
    ),
    "plan/test_models.py": ("is_compiled", "without_compile"),
    "pool.py": ("PRELOADED",),
    "safety/test_steps.py": ("hooks_after_any_step",),
    "safety/test_waits.py": ("assert_on_device", "ASSERT_BYTES"),
    "test_torch_names.py": (
        *("backend_of", "timeout_of", "timeout_s_of_job", "default_store", "named_group", "BEFORE_2_13"),
        *("collective", "joined_mesh", "flattened_mesh"),
    ),
    "shard/test_api.py": ("foreach_norm", "StridedShard"),
    "shard/test_unedited_programs.py": ("storages_of", "is_plain", "inner_tensors"),
    "shard/test_host_process.py": ("has_rule", "answer_operator", "unanswered"),
    "shard/test_recomputation.py": ("mutates", "pass_hooks_by"),
}

pytestmark = pytest.mark.cpu("names are those of one version, whatever the device")


def checks(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The decorated function is the check of these names."""

    def note(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return note


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A job of the first of two ranks, whose collectives do nothing."""
    register_still()
    dist.init_process_group(STILL, store=_torch.fake_store(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False))


# -- autograd


@checks(
    *("current_graph_task", "NO_BACKWARD", "is_in_backward", "will_execute", "walks_everything", "queue_callback"),
    *("on_gradient", "node_of"),
)
def _() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    said: list[Any] = []
    x = leaf * other
    assert _torch.current_graph_task() == _torch.NO_BACKWARD
    assert not _torch.is_in_backward()
    assert _torch.node_of(x) is x.grad_fn
    assert _torch.node_of(leaf) is not None

    def note(grad: Tensor) -> None:
        reached = _torch.will_execute(torch.autograd.graph.get_gradient_edge(other).node)
        said.append((_torch.is_in_backward(), reached, _torch.walks_everything(other)))
        _torch.queue_callback(lambda: said.append("end"))

    _torch.on_gradient(x, note)
    x.sum().backward(retain_graph=True)
    torch.autograd.grad(x.sum(), leaf)
    assert said == [(True, True, True), "end", (True, False, False), "end"]


@checks("reserve_number", "set_number")
def _() -> None:
    """The newest node that is ready runs first: one with an older number later."""
    order: list[str] = []

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            order.append(ctx.name)
            return grad, None

    leaf = torch.ones(1, requires_grad=True)
    number = _torch.reserve_number()
    first, second = Named.apply(leaf, "first"), Named.apply(leaf, "second")
    _torch.set_number(second, number)
    (first + second).backward()
    assert order == ["first", "second"]


@checks("apply", "run_at_once", "are_ours", "forget_references", "holders_of_memory", "base_of")
def _() -> None:
    ours: list[list[bool]] = []

    @_torch.run_at_once
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            ours.append(_torch.are_ours(grads))
            return grads

    leaves = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    _torch.forget_references()
    a, b = _torch.apply(Asks, *leaves)
    (a * 2 + b.t().t() * 2).sum().backward()
    a, b = _torch.apply(Asks, *leaves)
    (a + b).sum().backward()  # one tensor for both
    assert ours == [[True, True], [False, False]]
    whole = torch.zeros(4)
    before = _torch.holders_of_memory(whole)
    view = whole[1:]
    assert _torch.holders_of_memory(whole) == before + 1
    assert _torch.base_of(view) is whole
    assert _torch.base_of(whole) is None


# -- DTensors


@checks("versions_of", "own_versions_of")
def _() -> None:
    with one_rank() as mesh:
        param = sharded(mesh)
        version, own = _torch.versions_of([param]), _torch.local_of(param)
        with torch.no_grad():
            own.add_(1)
            param.mul_(2)
        assert _torch.versions_of([param]) >= version + 2
        of_wrapper = _torch.own_versions_of([param])
        own.detach().add_(1)
        assert _torch.own_versions_of([param]) == of_wrapper


# -- operators


@checks("fake_tensors", "fake_device", "ASKS_DEVICE", "asks_for_values", "in_place_on_cpu")
def _() -> None:
    with _torch.fake_tensors():
        fake = torch.ones(3)
        assert _torch.fake_device(fake) == CPU
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException) as caught:
            fake.sum().item()
        assert _torch.asks_for_values(caught.value)
    assert _torch.fake_device(torch.ones(3)) is None
    assert not _torch.asks_for_values(ValueError("other"))
    assert _torch.ASKS_DEVICE is not None
    with _torch.in_place_on_cpu({"silu": lambda x: x * 0 + 5.0}):
        assert nn.functional.silu(torch.ones(1)).item() == 5.0
    assert nn.functional.silu(torch.zeros(1)).item() == 0.0


# -- process groups


@checks(
    *("abandon_works", "keep_with_job", "kept_with_job", "name_of_group"),
    *("fake_store", "ranks_of"),
)
def _() -> None:
    with one_rank() as mesh:
        group = mesh.get_group()
        _torch.keep_with_job("accordion/test/1/", thing := object())
        assert _torch.kept_with_job("accordion/test/1/") == [thing]
        assert _torch.kept_with_job("accordion/test/2/") == []
        num_references = sys.getrefcount(group)
        _torch.abandon_works(group, [thing])
        assert _torch.kept_with_job("accordion/abandoned/") == [[thing]]
        assert sys.getrefcount(group) == num_references + 1
        assert _torch.name_of_group(group) == group.group_name
        with _torch.fake_tensors():
            assert _torch.ranks_of(mesh) == [0, 1]
    with one_rank() as mesh:
        assert _torch.kept_with_job("accordion/test/") == [], "it goes with the job"


@on_world(4)  # the whole job: meshes are made
def test_names_of_groups(mesh: DeviceMesh) -> None:
    """What asks groups with a backend: gloo's."""
    group, rank, num = mesh.get_group(), mesh.get_rank(), mesh.size()
    assert _torch.backend_of(group, CPU) == "gloo"
    assert isinstance(_torch.timeout_of(group, CPU), timedelta)
    assert 0 < _torch.timeout_s_of_job() < 1e5
    assert _torch.default_store().add("accordion/test_torch_names", 1) >= 1
    assert _torch.name_of_group(group)
    full, part = torch.zeros(num), torch.zeros(1)
    _torch.collective(group, "all_gather_single")(full, torch.tensor([float(rank)]), _torch.gather_options(True)).wait()
    assert full.tolist() == [float(r) for r in range(num)]
    swapped = torch.zeros(num)
    _torch.collective(group, "all_to_all_single")(
        swapped, full + 10 * rank, [], [], _torch.exchange_options(True)
    ).wait()
    assert swapped.tolist() == [float(10 * r + rank) for r in range(num)]
    scatter = _torch.collective(group, "reduce_scatter_single_coalesced")
    scatter([part], [full], _torch.reduce_scatter_options(True)).wait()
    assert part.item() == float(num * rank)
    _torch.collective(group, "all_gather_single_coalesced")([full], [part], _torch.gather_options(True)).wait()
    assert full.tolist() == [float(num * r) for r in range(num)]
    assert all(callable(_torch.collective(group, name)) for name in _torch.BEFORE_2_13)
    again = _torch.named_group(f"accordion/test/{num}", list(range(num)), None, timedelta(seconds=30))
    assert again.size() == num
    assert _torch.name_of_group(again) == f"accordion/test/{num}"
    joined = _torch.joined_mesh(init_device_mesh("cpu", (num, 1), mesh_dim_names=("a", "b"))["a"])
    assert joined.size() == num
    assert _torch.flattened_mesh(init_device_mesh("cpu", (num, 1), mesh_dim_names=("a", "b")), "ab").ndim == 1


SPLIT_SOURCE = list(inspect.signature(dist.distributed_c10d._get_split_source).parameters)


@pytest.mark.skipif(len(SPLIT_SOURCE) < 2, reason="torch binds no job to a CPU before 2.15")
@on_world(2)
def test_a_named_group_is_bound_to_the_device_of_its_job(mesh: DeviceMesh) -> None:
    """The device of a group made in a job that is bound to one, as torch 2.15 binds every job of NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.group.WORLD, "bound_device_id", torch.device("cpu", 0))
        ranks = list(range(mesh.size()))
        group = _torch.named_group("accordion/test/bound", ranks, torch.device("cpu", 1), timedelta(seconds=30))
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == mesh.size()
        assert str(group.bound_device_id) == "cpu:0"


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 1)])
def test_a_named_group_is_asked_for_on_the_device_of_its_job(
    monkeypatch: pytest.MonkeyPatch, bound: torch.device | None
) -> None:
    with one_rank():
        monkeypatch.setattr(dist, "new_group", lambda *_, device_id, **__: device_id)
        monkeypatch.setattr(dist.group.WORLD, "bound_device_id", bound)
        assert _torch.named_group("accordion/test", [0, 1], CPU) == (bound or CPU)
        monkeypatch.undo()


def test_what_stands_in_for_functions_of_torch_takes_what_they_take() -> None:
    """`named_group` replaces both for as long as torch makes a group."""
    assert list(inspect.signature(dist.distributed_c10d._process_group_name).parameters) == ["ranks", "use_hashed_name"]
    assert SPLIT_SOURCE in (["pg"], ["pg", "requested_backend"])


# -- devices


@checks("has_bf16", "runtime_version", "blocking_events", "sleep_on_device")
def _() -> None:
    assert _torch.has_bf16(CPU) in (True, False)
    assert _torch.runtime_version("xyz") is None

    def plain_event(**given: Any) -> Any:
        if given:
            raise TypeError
        return "plain"

    assert _torch.blocking_events(SimpleNamespace(Event=plain_event))() is None
    _torch.sleep_on_device()


# -- other interfaces


@pytest.mark.parametrize("check", list(dict.fromkeys(CHECKS.values())), ids=lambda check: "")
def test_what_we_think_of_a_name_is_so(check: Callable[[], None]) -> None:
    check()


def test_every_name_is_checked_here_or_held_by_a_test() -> None:
    own = {
        name
        for name, thing in vars(_torch).items()
        if not name.startswith("_") and getattr(thing, "__module__", _torch.__name__).startswith(_torch.__name__)
    }
    imported = {"annotations", "ctypes", "sys", "torch"}
    held = {name for names in HELD_BY.values() for name in names}
    assert all((Path(__file__).parent / file).exists() for file in HELD_BY)
    assert all(hasattr(_torch, name) for name in held)
    assert not {n for n in own - imported - set(CHECKS) - held if not inspect.ismodule(getattr(_torch, n))}
