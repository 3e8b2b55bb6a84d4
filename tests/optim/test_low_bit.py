"""Low-bit optimizers of torchao and bitsandbytes on shards: the unsharded optimizer bit for bit, on any number of ranks."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion._torch import local_of
from accordion.checkpoint.command import inspect
from accordion.checkpoint.convert import export
from accordion.checkpoint.reading import verify
from accordion.config import STRATEGIES
from tests.devices import device, here
from tests.support.checks import full, mesh_of
from tests.support.forked import script_under_torchrun
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

SHAPES = {
    "rows": (16, 512),  # quantised as a whole, and of fewer than 4,096 elements on four ranks
    "pairs": (60, 384),  # two rows make whole blocks of 256
    "few": (3, 2048),  # a fourth rank has no rows
    "vector": (5120,),  # on three ranks a block has no rank of its own, unless shard(state_block=256) keeps it whole
    "bias": (300,),
}
KINDS = {
    "8bit": ("torchao", "AdamW8bit", {}),
    "4bit": ("torchao", "AdamW4bit", {}),
    "fp8": ("torchao", "AdamWFp8", {}),
    "bitsandbytes": ("bitsandbytes", "AdamW8bit", {}),
    "paged": ("bitsandbytes", "PagedAdamW8bit", {}),
    "lion": ("bitsandbytes", "Lion8bit", {}),
}
QUANTISED = ["few", "pairs", "rows", "vector"]


class Net(nn.Module):
    """Parameters whose gradients are the arguments of `forward`, exactly."""

    def __init__(self, dtype=torch.float32, seed=0, **shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (shapes or SHAPES).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, grads):
        return sum((p * grads[name]).sum() for name, p in self.named_parameters())


def made(kind, model):
    library, name, options = KINDS[kind]
    pytest.importorskip(library)
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")  # they step as others there
    return getattr(__import__(f"{library}.optim").optim, name)(model.parameters(), lr=1e-2, **options)


def go_on(model, optimizer, steps, shapes=SHAPES):
    """Take steps with gradients of the first rank alone, whose sum over ranks is exact."""
    factor = float(not dist.is_initialized() or dist.get_rank() == 0 or not hasattr(optimizer, "_step_here"))
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for minutes
        for step in steps:
            torch.manual_seed(step)
            grads = {name: (torch.randn(shape) * factor).to(device()) for name, shape in shapes.items()}
            model(grads).backward()
            optimizer.step()
            optimizer.zero_grad()
        if hasattr(optimizer, "_step_here"):
            acc.synchronize(model)  # with Offload the step runs on a thread


def reference(kind):
    model = here(Net())
    return model, made(kind, model)


def sharded(mesh, kind, seed=0, **options):
    options = {"state_block": 256, "reduce_op": "sum"} | options
    model = acc.shard(Net(seed=seed), mesh=mesh, **options)
    return model, acc.wrap_optimizer(made(kind, model))


def assert_as_unsharded(model, optimizer, expected, its):
    for name, value in full(model).items():
        assert torch.equal(value.cpu(), expected.state_dict()[name].cpu()), name
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        own = {key: local_of(v) if hasattr(v, "placements") else v for key, v in optimizer.state[p].items()}
        assert own.keys() == its.state[q].keys()
        for key, value in own.items():
            if local_of(p).numel():
                assert type(value) is type(its.state[q][key]), (name, key)
                assert not hasattr(value, "dtype") or value.dtype == its.state[q][key].dtype, (name, key)


def continued(mesh, kind, source, target, **options):
    """Load `source` if any, take two steps, compare with the unsharded model, save, and take one more."""
    model, optimizer = sharded(mesh, kind, seed=5 if source else 0, **options)
    if source and mesh.size() == 1:
        go_on(model, optimizer, [9])  # states that are overwritten; on more ranks `load` creates them
    start = acc.load(source, model, optimizer) if source else 0
    go_on(model, optimizer, range(start, start + 2))
    unsharded = reference(kind)
    go_on(*unsharded, range(start + 2))
    assert_as_unsharded(model, optimizer, *unsharded)
    acc.save(target, model, optimizer, extra=start + 2)
    for run in ((model, optimizer), unsharded):
        go_on(*run, [start + 2])
    assert_as_unsharded(model, optimizer, *unsharded)
    own_rows = optimizer.state_dict()  # of this rank, as `torch.save` would write them
    go_on(model, optimizer, [9])
    optimizer.load_state_dict(own_rows)


@pytest.mark.parametrize("kind", sampled([*KINDS], ("4bit", "fp8", "bitsandbytes").__contains__))
def test_steps_equal_the_unsharded_optimizer_and_resume_on_any_number_of_ranks(
    world, tmp_path, kind, monkeypatch, request
):
    pytest.importorskip(KINDS[kind][0])
    if KINDS[kind][0] == "bitsandbytes" and request.config.getoption("--device") == "sim":
        pytest.skip("bitsandbytes compiles its kernels for a device that it does not know, which round otherwise")
    source = None
    for num_ranks in (3, 1, 4, 2):
        world.run(num_ranks, continued, kind, source, tmp_path / f"{num_ranks}")
        source = tmp_path / f"{num_ranks}"
    for library in ("torchao", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, library, None)  # neither is needed to read a checkpoint
    assert verify(source) == []
    scales = [name for name in inspect(source)["tensors"] if name.endswith(("/scale", "/absmax1"))]
    assert sorted({name.split("/")[2] for name in scales}) == QUANTISED
    export(source, tmp_path / "model.pt", "torch")
    saved = torch.load(tmp_path / "model.pt")
    monkeypatch.undo()
    expected, its = reference(kind)
    go_on(expected, its, range(8))
    assert all(torch.equal(saved[name], value) for name, value in expected.cpu().state_dict().items())


@pytest.mark.parametrize(
    ("name", "offload"),
    sampled(
        [(name, offload) for name in STRATEGIES for offload in (False, True)],
        lambda name, offload: (name, offload) in (("full_shard", True), ("hybrid_shard_optim", False)),
    ),
)
@on_mesh(lambda given: mesh_of(STRATEGIES[given["name"]]))
def test_strategies_and_states_on_the_host_change_no_bit(mesh, name, offload):
    pytest.importorskip("torchao")
    options = {"strategy": name, **({"offload": acc.Offload(optimizer="host")} if offload else {})}
    model, optimizer = sharded(mesh, "8bit", **options)
    unsharded = reference("8bit")
    for run in ((model, optimizer), unsharded):
        go_on(*run, range(2))
    assert_as_unsharded(model, optimizer, *unsharded)


@on_mesh((2, 2), ("replicate", "shard"))
def test_replicas_round_alike(mesh):
    """Compare replicas and the caller's random numbers after steps that round at random."""
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    options = {"strategy": "hybrid_shard", "precision": acc.Precision(master=None), "reduce_op": "sum"}
    model = acc.shard(Net(torch.bfloat16), mesh=mesh, state_block=256, **options)
    optimizer = acc.wrap_optimizer(AdamW8bit(model.parameters(), lr=1e-3, bf16_stochastic_round=True))
    order = list(optimizer.param_groups[0]["params"])
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    with torch.compiler.set_stance("force_eager"):
        model({name: torch.ones(shape, device=device()) for name, shape in SHAPES.items()}).backward()
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p is q for p, q in zip(order, optimizer.param_groups[0]["params"], strict=True))
    started = Net(torch.bfloat16).state_dict()
    for name, value in full(model).items():
        rows = [torch.empty_like(value) for _ in range(mesh.size(0))]
        dist.all_gather(rows, value.contiguous(), group=mesh.get_group(0))
        assert torch.equal(rows[0], rows[1]), name
        moved = (value.cpu() != started[name])[started[name].abs() > 1].float().mean()
        assert 0.05 < moved < 0.5, f"{name}: the nearest number to 1 +- 1e-3 is 1"


@on_world(3)
def test_what_cannot_be_stepped_or_loaded_is_refused(mesh, tmp_path):
    ao, bnb = pytest.importorskip("torchao.optim"), pytest.importorskip("bitsandbytes.optim")

    def refused(match, make, shapes=SHAPES, **options):
        model = acc.shard(Net(**shapes), mesh=mesh, **options)
        optimizer = make(model.parameters())
        kind = type(optimizer)
        with pytest.raises(acc.UsageError, match=match) as caught:
            acc.wrap_optimizer(optimizer)
        assert type(optimizer) is kind
        assert "\n" not in str(caught.value)
        return model

    model = refused(r"'vector' of shape \(5120,\).*parts of a block of 256.*state_block=256", ao.AdamW8bit)
    refused("'vector'.*state_block=256.*GlobalOptimManager", bnb.AdamW8bit)
    large = {"large": (1036, 64)}  # above 256 KiB, and 346 rows of 64 elements are 86.5 blocks
    refused("'large'.*parts of a block", ao.AdamW8bit, large, state_block=256)
    refused("'odd'.*block of 256", bnb.AdamW8bit, {"odd": (4099,)})
    refused("'last'.*another dim", bnb.AdamW8bit, {"last": (1, 90_000)})
    refused("pass elementwise=True", bnb.LAMB8bit)
    wide = {"wide": (6, 2048)}
    refused("root.*paged", bnb.AdamW8bit, wide, offload=acc.Offload(optimizer="host"))
    refused("root.*chunk by chunk", ao.AdamW8bit, wide, offload=acc.Offload(optimizer=f"disk:{tmp_path}"))

    acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))  # the refused model is as it was
    optimizer = acc.wrap_optimizer(ao.AdamW8bit([model.rows]))
    with pytest.raises(acc.UsageError, match="'vector'"):
        optimizer.add_param_group({"params": [model.vector]})
    assert len(optimizer.param_groups) == 1

    model, optimizer = sharded(mesh, "8bit")
    go_on(model, optimizer, [0])
    acc.save(tmp_path / "saved", model, optimizer)
    for other, match in (
        (ao.AdamW8bit(model.parameters()), "pass the AdamW8bit to wrap_optimizer"),
        (acc.wrap_optimizer(ao.AdamW8bit(model.parameters(), block_size=128)), "block_size=256"),
    ):
        with pytest.raises(acc.AccordionError, match=match):
            acc.load(tmp_path / "saved", model, other)


@on_world(2)
def test_bitsandbytes_finds_the_options_of_a_sharded_parameter(mesh):
    bnb = pytest.importorskip("bitsandbytes")
    model = acc.shard(Net(rows=(16, 512), more=(16, 512)), mesh=mesh, reduce_op="sum")
    bnb.optim.GlobalOptimManager.get_instance().override_config(model.more, "optim_bits", 32)
    optimizer = acc.wrap_optimizer(bnb.optim.AdamW8bit(model.parameters()))
    go_on(model, optimizer, [0], dict.fromkeys(("rows", "more"), (16, 512)))
    kinds = {name: local_of(optimizer.state[p]["state1"]).dtype for name, p in model.named_parameters()}
    assert kinds == {"rows": torch.uint8, "more": torch.float32}


def test_the_example_counts_states_and_resumes(tmp_path, capfd):
    pytest.importorskip("torchao")
    script = Path(__file__).parents[2] / "examples" / "low_bit_adam.py"
    for _ in range(2):
        assert script_under_torchrun(script, 2, str(tmp_path)) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "counted" in line]
    eight = [line for line in lines if line.startswith("adamw_8bit")]
    assert len(lines) == 8
    assert all("1,064,960 bytes planned, 1,073,152 counted, 2.047 an element" in line for line in eight)
    losses = [
        [float(line.split()[-1]) for line in lines if line.startswith(f"{name}:")] for name in ("adamw", "adamw_8bit")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3), "in both runs the loss is that of AdamW"
