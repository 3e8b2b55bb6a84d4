"""torch on the simulator: modules, operators, optimizers and programs give the CPU's results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sim
BF16 = torch.bfloat16


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


def ids(*shape: int, high: int = 9) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


LAYERS = {"Conv": (4, 6, 3), "ConvTranspose": (4, 6, 3), "BatchNorm": (4,), "MaxPool": (2,)}  # of 1 to 3 dims
Input = tuple[int, ...] | Callable[[], Tensor]
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Input, ...]]] = {  # name -> (constructor, inputs)
    **{
        f"{kind} {options}": (lambda kind=kind, options=options: getattr(nn, kind)(5, 6, **options), ((3, 4, 5),))
        for kind in ("RNN", "LSTM", "GRU")
        for options in ({}, {"num_layers": 2, "bidirectional": True, "batch_first": True}, {"bias": False})
    },
    **{
        f"{kind}Cell": (lambda kind=kind: getattr(nn, f"{kind}Cell")(5, 6), ((4, 5),))
        for kind in ("RNN", "LSTM", "GRU")
    },
    "LSTM with a projection": (lambda: nn.LSTM(5, 6, proj_size=3), ((3, 4, 5),)),
    **{
        f"{kind}{d}d": (lambda kind=kind, d=d: getattr(nn, f"{kind}{d}d")(*LAYERS[kind]), ((2, 4, *[6] * d),))
        for d in (1, 2, 3)
        for kind in LAYERS
    },
    "BatchNorm2d in bfloat16": (lambda: nn.BatchNorm2d(4).to(BF16), (lambda: torch.randn(2, 4, 6, 6).to(BF16),)),
    "BatchNorm2d, evaluated": (lambda: nn.BatchNorm2d(4).eval(), ((2, 4, 6, 6),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), ((2, 4, 5),)),
    "LayerNorm": (lambda: nn.LayerNorm(5), ((2, 4, 5),)),
    "RMSNorm": (lambda: nn.RMSNorm(5), ((2, 4, 5),)),
    "Embedding": (lambda: nn.Embedding(9, 4, padding_idx=1), (ids(3, 5),)),
    **{
        f"EmbeddingBag {mode}": (lambda mode=mode: nn.EmbeddingBag(9, 4, mode=mode), (ids(3, 5),))
        for mode in ("sum", "mean", "max")
    },
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), ((2, 3, 8),) * 3),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        ((2, 3, 8),),
    ),
    "attention, causal": (
        lambda: Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ((2, 4, 4, 8),) * 3,
    ),
    "cross entropy": (lambda: Call(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)), ((6, 5), ids(6, high=5))),
    "mean square": (lambda: Call(F.mse_loss), ((4, 5), (4, 5))),
    "ctc": (
        lambda: Call(lambda x, t: F.ctc_loss(x.log_softmax(-1), t + 1, (6, 6), (3, 2))),
        ((6, 2, 5), ids(2, 3, high=3)),
    ),
}
OPERATORS: dict[str, Callable[[Tensor], Any]] = {  # of a (4, 6)
    "topk": lambda x: x.topk(3),
    "sort": lambda x: x.sort(descending=True),
    "median": lambda x: x.median(-1),
    "cumsum": lambda x: x.cumsum(0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0, 1.0, x),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0, 2], device=x.device), x[:3]),
    "index_put": lambda x: x.index_put((torch.tensor([0, 0], device=x.device),), x[:2], accumulate=True),
    "indices of the CPU": lambda x: x[torch.tensor([0, 2])],
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros(4, 6, dtype=torch.long, device=x.device), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, torch.zeros(4, 6, dtype=torch.long, device=x.device), x, "mean"),
    "gather": lambda x: x.gather(0, torch.zeros(2, 6, dtype=torch.long, device=x.device)),
    "one_hot": lambda x: F.one_hot((x > 0).long()),
    "bincount": lambda x: torch.bincount((x > 0).long().flatten()),
    "unique": lambda x: x.detach().round().unique(return_inverse=True, return_counts=True),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3], device=x.device), 0),
    "complex": lambda x: torch.complex(x, x * 2) * 1j,
    "conjugate": lambda x: torch.complex(x, x * 2).conj().resolve_conj(),
    "imaginary part": lambda x: torch.complex(x, x * 2).conj().imag + 0,
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "grid": lambda x: F.affine_grid(x.view(1, 4, 6)[:, :2, :3], (1, 1, 4, 4), align_corners=False),
    "solve": lambda x: torch.linalg.solve(x[:4, :4], x[:4, 4]),
    "written into": lambda x: x.clone().t().mul_(2),
    "broadcast copy": lambda x: torch.empty_like(x).copy_(x[0]),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0),
    "foreach norm": lambda x: torch._foreach_norm([x, x]),
}


def values(module: nn.Module, inputs: list[Tensor], device: str) -> list[Tensor | None]:
    """Return the outputs, gradients and buffers of a call."""
    module = module.to(device)
    inputs = [x.to(device).detach().requires_grad_(x.is_floating_point()) for x in inputs]
    outs = [out for out in tree_leaves(module(*inputs)) if isinstance(out, Tensor)]
    losses = [out.abs().square().sum() for out in outs if out.requires_grad]
    if losses:
        sum(losses).backward()
    return [*outs, *(p.grad for p in module.parameters()), *(x.grad for x in inputs), *module.buffers()]


def assert_alike(run: Callable[[str], Iterable[Tensor | None]], rtol: float, atol: float) -> None:
    """Fail unless the tensors that `run(device)` returns are close on the CPU and on the simulator, or equal if both tolerances
    are 0."""
    found = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        found.append([None if value is None else value.detach().cpu() for value in run(device)])
    for wanted, value in zip(*found, strict=True):
        if wanted is None or value is None:
            assert value is wanted
        else:
            torch.testing.assert_close(value, wanted, rtol=rtol, atol=atol)


def assert_alike_modules(make: Callable[[], nn.Module], inputs: tuple[Input, ...], tolerance: float) -> None:
    def run(device: str) -> list[Tensor | None]:
        module = make()
        return values(module, [torch.randn(x) if isinstance(x, tuple) else x() for x in inputs], device)

    assert_alike(run, tolerance, tolerance)


@pytest.fixture(autouse=True)
def _the_device_goes_on():
    yield
    torch.sim.clear_error()  # else one failure is that of all that follow


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    assert_alike_modules(*MODULES[name], 1e-5)


def test_an_encoders_fused_evaluation():
    def run(device: str) -> list[Tensor]:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(device)
        with torch.no_grad():
            return [layer(torch.linspace(-1, 1, 48).view(2, 3, 8).to(device))]

    assert_alike(run, 1e-5, 1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name):
    assert_alike_modules(lambda: Call(OPERATORS[name]), ((4, 6),), 1e-6)


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_optimizers_step_bit_for_bit_as_on_the_cpu(kind, how):
    def run(device: str) -> Iterable[Tensor]:
        model = nn.Linear(5, 3).to(device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **how)
        for _ in range(3):
            model(torch.ones(2, 5, device=device)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return model.parameters()

    assert_alike(run, 0.0, 0.0)


def test_autocast_and_a_scaler_do_as_on_the_cpu():
    def run(device: str) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(device, init_scale=256.0)
        with torch.autocast(device, dtype=torch.float16):
            out = model(torch.linspace(-1, 1, 32).view(4, 8).to(device))
            assert out.dtype == torch.float16
            loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [loss, *model.parameters()]

    assert_alike(run, 1e-3, 1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_draws_the_same_dropout(use_reentrant):
    x = torch.ones(2, 64, device="sim", requires_grad=True)
    out = checkpoint(nn.Dropout(0.5), x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
    assert 0 < int((out == 0).sum()) < 128


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to("sim")
    x = torch.ones(2, 4, device="sim")
    assert torch.equal(torch.compile(model, backend=backend)(x), model(x))


def test_copies_between_devices_follow_both():
    x = torch.zeros(1000, device="sim:0")
    torch.sim._sleep(5_000_000)
    x.fill_(3)
    assert x.to("sim:1").eq(3).all()


def test_an_operator_that_the_cpu_lacks_is_refused_where_it_is_called():
    with pytest.raises(NotImplementedError, match=r"sim has no kernel for aten::cudnn_batch_norm"):
        torch.ops.aten.cudnn_batch_norm(*[torch.ones(2, 2, device="sim")] * 2, None, None, None, True, 0.1, 1e-5)
    assert torch.ones(2, device="sim").sum().item() == 2
