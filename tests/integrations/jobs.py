"""Shared by tests of integrations: jobs that look like torchrun's to libraries, a small Llama, and its data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import accordion as acc
from accordion.engine.hooks import engine_of
from tests.support.ranked import on_job
from tests.support.reference import local_of

VOCABULARY, LENGTH, WIDTH = 64, 12, 16
TRAINING: dict[str, Any] = {  # arguments of Trainers
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "seed": 0,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
}


def needs(*libraries: str) -> pytest.MarkDecorator:
    """Mark that skips tests if a library is not installed; does not import it, which takes seconds."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def on_first_rank(act: Callable[..., Any], *args: Any) -> None:
    """Call `act(*args)` on the first rank of the job, and wait for it on all others."""
    if dist.get_rank() == 0:
        act(*args)
    dist.barrier()


def mean(values: list[float]) -> list[float]:
    """Return the means over the ranks of the job."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


@contextmanager
def torchrun_job(nodes: int = 1) -> Iterator[None]:
    """Context manager: this rank looks like one that torchrun started, on `nodes` nodes with equally many ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    node, local = divmod(rank, size // nodes)
    variables = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size // nodes}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # the group is there already
    variables |= {"GROUP_RANK": node, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1}
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(action="ignore"):  # the libraries' own
        for key, value in variables.items():
            patched.setenv(key, str(value))
        yield


@contextmanager
def library_job() -> Iterator[None]:
    """Context manager: this rank looks like one that torchrun started, and process-wide state of the libraries is reset."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with torchrun_job():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def on_library_job(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: each rank of a job of exactly `num_ranks` ranks calls the program in a `library_job`."""
    return lambda program: on_job(num_ranks)(library_job()(program))


@contextmanager
def fsdp_job() -> Iterator[None]:
    """A `library_job` in which accelerate treats CPU ranks as accelerators; on CPUs it would not use FSDP."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    before = dict(os.environ)
    with library_job(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU))
        patched.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        try:
            yield
        finally:
            for key in os.environ.keys() - before.keys():  # its plugin's, for libraries that it does not know
                del os.environ[key]


def blocks(depth: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(depth)])


def llama(seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, "eos_token_id": 1, **changes}))


def blocks_and_head(name: str, module: nn.Module) -> bool:
    """Rule for `units=`: the head of a small model is not large enough to be one by default."""
    return type(module).__name__ == "LlamaDecoderLayer" or name.endswith("lm_head")


def sentences(count: int = 64, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return sentences of different lengths, with labels of -100 at the end of some."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - i % 4 :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all full tensors, on every rank."""
    if engine_of(model) is not None:
        return acc.full_state_dict(model, rank0_only=False)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def held(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements on this rank in floating-point tensors, without an optimizer's step counts."""
    return sum(t.numel() for t in map(local_of, tensors) if t.is_floating_point() and t.dim() > 0)


@contextmanager
def sizes_of_steps() -> Iterator[dict[str, int]]:
    """Context manager that records this rank's elements of parameters, gradients and states in the last optimizer step."""
    sizes: dict[str, int] = {}

    def params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sizes["parameters"] = held(params(optimizer))
        sizes["gradients"] = held(p.grad for p in params(optimizer) if p.grad is not None)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sizes["states"] = held(t for state in optimizer.state.values() for t in state.values())

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        yield sizes
    finally:
        for hook in hooks:
            hook.remove()


def assert_held_once(ours: dict[str, int], theirs: dict[str, int]) -> None:
    """Check that all ranks together have what one DDP rank has, and this one about half of it; a collective of two ranks."""
    together = torch.tensor([ours[key] for key in theirs])
    dist.all_reduce(together)
    assert together.tolist() == list(theirs.values()), "all ranks together hold each element once"
    assert {"parameters", "gradients", "states"} == set(theirs)
    for key, whole in theirs.items():
        assert 0.4 * whole < ours[key] < 0.6 * whole, (key, ours[key], whole)


def bytes_held(model: nn.Module) -> int:
    """Return the bytes of this rank's parameters."""
    return sum(local_of(p).nbytes for p in model.parameters())
