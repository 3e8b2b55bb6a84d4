"""`initialise` gives bitwise the weights of one device, for any number of ranks and any strategy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from accordion.weights.initialise import initialise
from accordion.weights.write_through import init_mode
from tests.devices import device
from tests.support import families, models
from tests.support.meters import Allocations
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

FLAT, HYBRID = ("shard",), ("replicate", "shard")
LAYOUTS = {
    "one rank": ((1,), FLAT, "full_shard"),
    "two": ((2,), FLAT, "full_shard"),
    "three": ((3,), FLAT, "full_shard"),
    "four": ((4,), FLAT, "shard_grad_op"),
    "replicated": ((2,), FLAT, "no_shard"),
    "shard_optim": ((3,), FLAT, "shard_optim"),
    "hybrid": ((2, 2), HYBRID, "hybrid_shard"),
    "over both": ((2, 2), HYBRID, "hybrid_shard_optim"),
}
on_layout = on_mesh(lambda given: LAYOUTS[given["layout"]][:2])
Init = Callable[[nn.Module], object]


def layout_of_kernels() -> torch.memory_format:
    """torch 2.11 draws a channels_last tensor in the order of its memory; later ones, as `initialise` does, by index."""
    drawn = []
    for layout in (torch.contiguous_format, torch.channels_last):
        state = torch.Generator().manual_seed(0)
        drawn.append(
            nn.init.kaiming_uniform_(torch.empty(5, 3, 3, 3, device="cpu").to(memory_format=layout), generator=state)
        )
    return torch.channels_last if torch.equal(*drawn) else torch.contiguous_format


KERNELS = layout_of_kernels()


class Layered(nn.Module):
    """A model of torch's modules with buffers, attention whose init is private, a recurrent network, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8, padding_idx=3)
        self.norm = nn.BatchNorm1d(7)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.rnn = nn.GRU(8, 6)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=KERNELS)
        self.again = self.block.linear1


LLAMA = families.FAMILIES["LlamaForCausalLM"]
MODELS = {
    "llama": LLAMA,
    "tied llama": dataclasses.replace(LLAMA, config={**LLAMA.config, "tie_word_embeddings": True}),
    "gpt2": families.FAMILIES["GPT2LMHeadModel"],
    "t5": families.FAMILIES["T5ForConditionalGeneration"],
    "mamba": families.FAMILIES["MambaForCausalLM"],
    "mixtral": families.FAMILIES["MixtralForCausalLM"],
}


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "uneven": lambda: models.Tiny(vocab=19, width=10, hidden=7),
    "other dim cut": lambda: nn.Sequential(nn.Linear(70_001, 1), nn.Linear(3, 2)),
    "layered": Layered,
    **{name: family.make for name, family in MODELS.items()},
}
FAMILIES = tuple(MODELS)
OWN = tuple(name for name in BUILDS if name not in MODELS)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return BUILDS[name]()


def tied_anew(copy: nn.Module, meta: nn.Module) -> None:
    """Tie parameters again after `to_empty`, which gives every name of a tied parameter its own memory."""
    first: dict[int, nn.Parameter] = {}
    for name, param in meta.named_parameters(remove_duplicate=False):
        path, _, attr = name.rpartition(".")
        module = copy.get_submodule(path)
        module._parameters[attr] = first.setdefault(id(param), module._parameters[attr])


def one_device(name: str | nn.Module, init: Init | None = None) -> nn.Module:
    """Return the reference: a meta model after `to_empty`, initialised with the same seed."""
    meta = on_meta(name) if isinstance(name, str) else name
    model = copy.deepcopy(meta).to_empty(device=device())
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 77)
    torch.manual_seed(3)
    with torch.no_grad():
        if init is None and hasattr(model, "init_weights"):
            model.init_weights()  # which ties, after it has initialised
        else:
            tied_anew(model, meta)
            model.apply(init or own_reset)
    return model


def own_reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()


def unlike(model: nn.Module, wanted: nn.Module) -> list[str]:
    """Return, on the first rank, the names of parameters and buffers that are not bitwise those of `wanted`."""
    found = acc.full_state_dict(model)
    other = [n for n, t in wanted.state_dict().items() if found and not torch.equal(t.cpu(), found[n].cpu())]
    own = dict(model.named_buffers())
    return other + [n for n, t in wanted.named_buffers() if not torch.equal(t.cpu(), own[n].cpu())]


def differences(mesh: Any, layout: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    result = {}
    for name in names:
        wanted = one_device(name)
        state = torch.get_rng_state()
        model = acc.shard(on_meta(name), mesh, strategy=STRATEGIES[LAYOUTS[layout][2]])
        torch.manual_seed(3)
        initialise(model)
        bad = unlike(model, wanted)
        if not torch.equal(torch.get_rng_state(), state):
            bad.append("the generator")
        if any("_is_hf" in key for p in model.parameters() for key in vars(p)):
            bad.append("a mark is left")
        result[name] = bad
    return result


@pytest.mark.parametrize("layout", sampled(LAYOUTS, ("three", "over both").__contains__))
@on_layout
def test_equal_to_one_device_for_any_ranks_and_strategy(mesh: Any, layout: str) -> None:
    assert differences(mesh, layout, OWN) == {name: [] for name in OWN}


@pytest.mark.parametrize("layout", sampled(["one rank", "three", "over both"], "three".__eq__))
@on_layout
def test_families_that_write_into_their_children(mesh: Any, layout: str) -> None:
    pytest.importorskip("transformers")
    assert differences(mesh, layout, FAMILIES) == {name: [] for name in FAMILIES}


# -- any init function


class Kind(nn.Module):
    """A module with a matrix and a kernel for one function of `torch.nn.init`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.matrix = nn.Parameter(torch.empty(13, 6))
        self.kernel = nn.Parameter(torch.empty(4, 3, 3))


INITS: dict[str, Callable[[Tensor], object]] = {
    "uniform": lambda t: nn.init.uniform_(t, -1, 2),
    "normal": lambda t: nn.init.normal_(t, 1, 2),
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, std=0.5),
    "constant": lambda t: nn.init.constant_(t, 0.3),
    "eye": lambda t: nn.init.eye_(t) if t.dim() == 2 else nn.init.dirac_(t),
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "orthogonal": lambda t: nn.init.orthogonal_(t, 2.0),
    "sparse": lambda t: nn.init.sparse_(t, 0.4) if t.dim() == 2 else t.log_normal_(),
    "own generator": lambda t: t.normal_(generator=torch.Generator(t.device).manual_seed(5)),
    "data": lambda t: t.data.normal_().clamp_(-1, 1),
    "view": lambda t: t.view(-1)[3:9].uniform_(5, 6),
    "transposed": lambda t: t.transpose(0, 1)[0].fill_(2.0),
    "operators": lambda t: t.normal_().add_(1).mul_(t),
    "copied": lambda t: t.copy_(torch.randn(t.shape)),
    "from numpy": lambda t: t.data.copy_(torch.from_numpy(torch.randn(t.shape).numpy())),
    "into numpy": lambda t: t.detach().cpu().numpy().fill(4.0),  # of an accelerator, a copy
    "list": lambda t: [row.fill_(i) for i, row in enumerate(t.unbind(0))],
    "itself": lambda t: t.normal_().copy_(t.flip(0)),
}


def by_kind(module: nn.Module) -> None:
    if isinstance(module, Kind):
        for tensor in module.parameters():
            INITS[module.kind](tensor.zero_())


def kinds() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleList(Kind(kind) for kind in INITS)


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(5, 2)), nn.Parameter(torch.empty(5, 2))


def careless(module: nn.Module) -> None:
    """An init that keeps references, writes late, assigns, and reads and scales the draws of children."""
    if isinstance(module, Assigns):
        module.a.data = torch.randn(5, 2, device=device())
        module.b = nn.Parameter(torch.randn(5, 2, device=device()))
    if isinstance(module, nn.Sequential):
        params = list(module.parameters())
        for param in params:
            param.normal_()
        for param in reversed(params):
            param /= 1 + params[0].abs().max()
        module[1].weight[1:3] = params[0][:2, :1]
        module[2].weight += module[1].weight.mean()  # the same parameter: written twice
        module[0].bias.copy_(module(torch.ones(1, 4, device=device()))[0, :6])


def careless_model() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 7), nn.Identity())
        model[2].weight = model[1].weight
        return nn.ModuleDict({"run": model, "set": Assigns()})


@pytest.mark.parametrize("layout", sampled(["one rank", "three", "replicated", "over both"], "three".__eq__))
@on_layout
def test_any_init_function_that_works_on_one_device(mesh: Any, layout: str) -> None:
    for meta, init in ((kinds(), by_kind), (careless_model(), careless)):
        wanted = one_device(meta, init)
        model = acc.shard(meta, mesh, strategy=STRATEGIES[LAYOUTS[layout][2]])
        for _ in range(2):  # the second time its weights are real
            torch.manual_seed(3)
            initialise(model, init)
            assert unlike(model, wanted) == []


# -- afterwards


@pytest.mark.parametrize("emptied", [False, True])
@on_world(2)
def test_an_initialised_model_trains(mesh: Any, emptied: bool) -> None:
    """`emptied`: `to_empty` is called on the sharded model first, which `initialise` does not need."""
    tokens, targets = models.batch(0, 0, 0, vocab=48)
    with torch.device("meta"):
        meta = models.Tiny()
    wanted = one_device(meta)
    model = acc.shard(meta, mesh)
    if emptied:
        model.to_empty(device=device())
    torch.manual_seed(3)
    initialise(model)
    losses = [models.loss_of(m(tokens), targets) for m in (model, wanted)]
    losses[0].backward()
    assert losses[0].item() == losses[1].item()
    assert all(type(p.data).__name__ == "DTensor" and p.grad is not None for p in model.parameters())


WIDTH = 256
LAYER_BYTES = 4 * WIDTH * WIDTH


def scaled(module: nn.Module) -> None:
    """An init that reads the draws of other modules and keeps references to all of them."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
    if isinstance(module, nn.ModuleList):
        params = list(module.parameters())
        for param in params:
            param.mul_(0.5)


@pytest.mark.parametrize("init", [None, scaled])
@on_world(4)
def test_one_full_parameter_is_alive_at_a_time(mesh: Any, init: Init | None) -> None:
    with Allocations() as memory:
        with torch.device("meta"):
            model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        model = acc.shard(model, mesh)
        memory.mark("sharded")
        initialise(model, init)
        memory.mark("initialised")
    assert memory.live("initialised") <= memory.live("sharded") + 1024
    peak = memory.peak("sharded", "initialised") - memory.live("sharded")
    assert LAYER_BYTES <= peak <= LAYER_BYTES + 4096


# -- buffers


class Table(nn.Module):
    """A module with a buffer that only its constructor computes, unless it has `reset`."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) / width, persistent=False)


class Resets(Table):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.linear.bias, 0.25)
        self.table = torch.arange(6) / 6


class Gathers(nn.Module):
    """A module that fills a list of parameters, which cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.empty(3), torch.empty(5, 2)])

    def reset_parameters(self) -> None:
        for scale in self.scales:
            nn.init.normal_(scale)


@on_world(2)
def test_buffers_are_computed_by_the_code_of_their_modules(mesh: Any) -> None:
    with torch.device("meta"):
        first = acc.shard(
            nn.ModuleList([Resets(), nn.BatchNorm1d(3), Gathers()]),
            mesh,
            precision=acc.Precision(buffers=torch.bfloat16),
        )
        second = acc.shard(nn.ModuleList([Resets(), nn.BatchNorm1d(3)]), mesh)
    initialise(first)
    torch.manual_seed(3)
    weights_only = lambda m: m.weight.normal_() if isinstance(m, nn.Linear) else None  # noqa: E731
    initialise(second, weights_only)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    torch.empty(6, 6, device=device()).normal_()
    assert torch.equal(after, torch.get_rng_state()), "the second pass draws nothing that counts"
    for model, dtype in ((first, torch.bfloat16), (second, torch.float32)):
        assert torch.equal(model[0].table.cpu(), (torch.arange(6) / 6).to(dtype))
        assert torch.equal(model[1].running_var.cpu(), torch.ones(3, dtype=dtype))
    bias = acc.full_state_dict(second, rank0_only=False)["0.linear.bias"]
    assert torch.equal(bias, torch.zeros(6)), "the second pass is for buffers only"


# -- refusals


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.extra = nn.Parameter(torch.ones(2, 2))


class Forgets(Bare):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def drops(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.bias = None


def reshapes(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data = torch.zeros(2, 2, device=device())


def ties(module: nn.Module) -> None:
    if isinstance(module, nn.Sequential):
        module[0].weight.fill_(1.0)
        module[1].weight = module[0].weight


def fails(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.fill_(9.0)
        raise KeyError("stop")


REFUSALS: dict[str, tuple[Callable[[], nn.Module], Init | None, list[str]]] = {
    "no reset": (
        lambda: nn.ModuleDict({"a": Bare(), "b": nn.ModuleList([Bare()]), "c": nn.Linear(2, 2)}),
        None,
        ["4 parameters and buffers", "a.weight, a.extra, b.0.weight, b.0.extra", "reset_parameters", "`init`"],
    ),
    "not written": (
        lambda: nn.Sequential(Forgets(), Forgets()),
        None,
        ["2 parameters and buffers", "0.extra, 1.extra"],
    ),
    "no buffer": (lambda: nn.Sequential(Table()), None, ["1 parameters and buffers", "0.table"]),
    "dropped": (lambda: nn.Linear(3, 3), drops, ["'bias'", "(3,)", "nothing"]),
    "reshaped": (lambda: nn.Linear(3, 3), reshapes, ["'weight'", "(3, 3)", "(2, 2)"]),
    "ties": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ties, ["'1.weight'", "tie or drop before"]),
    "fails": (lambda: nn.Sequential(nn.Linear(3, 3), Table()), fails, ["stop"]),
}


@on_world(2)
def test_what_cannot_be_initialised_is_named_in_one_message(mesh: Any) -> None:
    """Afterwards the model is sharded as before, with its buffers on meta."""
    for name, (make, init, words) in REFUSALS.items():
        with torch.device("meta"):
            model = make()
        model = acc.shard(model, mesh)
        before = [(n, id(p)) for n, p in model.named_parameters()]
        with pytest.raises((acc.UsageError, KeyError)) as caught:
            initialise(model, init)
        assert all(word in str(caught.value) for word in words), (name, str(caught.value))
        assert before == [(n, id(p)) for n, p in model.named_parameters()]
        assert all(b.is_meta for b in model.buffers())
        with acc.full_params(model):
            pass


@on_world(2)
def test_ranks_with_other_random_numbers_are_an_error_on_every_rank(mesh: Any) -> None:
    model = acc.shard(nn.Linear(4, 4, device="meta"), mesh)
    with pytest.raises(acc.DivergenceError, match=r"differ after initialise\(\)"):
        initialise(model, lambda m: m.weight.normal_() if mesh.get_local_rank() else None)
    torch.manual_seed(mesh.get_local_rank())
    with pytest.raises(acc.DivergenceError, match=r"differ before initialise\(\)"):
        initialise(model)


@on_world(1)
def test_misuse_is_named(mesh: Any) -> None:
    model = acc.shard(nn.Linear(4, 4), mesh)
    with pytest.raises(acc.UsageError, match="not sharded"):
        initialise(nn.Linear(4, 4))
    with init_mode(model) as fulls, pytest.raises(acc.UsageError, match="init_mode"):
        initialise(model)
    with init_mode(model, only=()):
        model.weight.fill_(7.0)
    with acc.full_params(model):
        assert not (model.weight == 7.0).any()
        assert F.linear(torch.ones(1, 4, device=device()), model.weight).shape == (1, 4)
    assert not fulls.written
