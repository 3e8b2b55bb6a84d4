"""Frozen weights of four bits: bitsandbytes' own layers, sharded; filled while streaming, trained with LoRA, exported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import accordion as acc
from accordion import cli
from accordion.observe.allocations import Allocations
from accordion.plan.trained_models import Kernels, trained_model
from accordion.train import checkpoints
from accordion.weights.four_bits import FourBitLinear, num_weights
from tests.devices import device
from tests.pool import Pool
from tests.support import forked, language_folders
from tests.support.ranked import on_world
from tests.support.refused import refused
from tests.support.sample import sampled

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of PEFT and bitsandbytes about themselves
    pytest.mark.cpu("bitsandbytes compiles its kernels for a device that it does not know, for minutes"),
]
KINDS = ["nf4", "fp4", "nf4-double", "fp4-double"]


def theirs(plain: nn.Linear, kind: str) -> nn.Linear:
    """Return the layer of bitsandbytes itself with the weight of `plain`, quantised."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": kind[:3], "compress_statistics": kind.endswith("-double")}
    layer = Linear4bit(plain.in_features, plain.out_features, plain.bias is not None, plain.weight.dtype, **options)
    layer.weight = Params4bit(plain.weight.data.cpu().clone(), module=layer, **options).to(plain.weight.device)
    layer.bias = plain.bias
    return layer.to(plain.weight.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_that_of_bitsandbytes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 192, dtype=dtype))  # 960 blocks: groups of 256 scales, and a part of one
    expected, inputs = theirs(model[0], kind), torch.randn(2, 5, 320, dtype=dtype)
    weight = model[0].weight.detach()
    layer: Any = acc.quantize(model, kind)[0]
    results = []
    for one in (layer, expected):
        x = inputs.clone().requires_grad_()
        out = one(x)
        out.float().square().sum().backward()
        results.append((out, x.grad, one.bias.grad.clone()))
        one.bias.grad = None
    torch.testing.assert_close(*results, rtol=0, atol=0)
    state = {"weight": layer.weight.view(-1, 1)}
    state |= {
        f"weight.{key}": value
        for key, value in layer.quant_state(layer.absmax, layer.nested).as_dict(packed=True).items()
    }
    wanted = {key: value for key, value in expected.state_dict().items() if key != "bias"}
    torch.testing.assert_close(state, wanted, rtol=0, atol=0)
    values = layer.rounded(weight)
    torch.testing.assert_close(layer(torch.eye(320, dtype=dtype)) - layer.bias, values.T, rtol=1e-2, atol=1e-2)


# -- a model of transformers with LoRA


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return language_folders.llama(tmp_path / "base", dtype=torch.bfloat16)


def with_lora(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def unsharded(folder: Path, kind: str) -> Any:
    """Return the QLoRA model whose base has the layers of bitsandbytes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device())
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and name != "lm_head"]
    for name, plain in layers:
        model.set_submodule(name, theirs(plain, kind))
    return with_lora(model).train()


def sharded(mesh: Any, folder: Path, kind: str, *, has_lora: bool = True, **options: Any) -> Any:
    """Return the same model, or its base alone, built on meta, sharded, and filled from the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        model = acc.quantize(model, kind)
        model = with_lora(model) if has_lora else model
    model = acc.shard(model, mesh, **options)
    torch.manual_seed(3)
    acc.load_pretrained(model, folder)
    return model.train()


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(2, 300, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)).to(device())


def learn(model: Any, optimizer: torch.optim.Optimizer, steps: range, batches: range, num_calls: int) -> None:
    """Take `steps` on `num_calls` parts of the batches, all of one size. Each call of the model dequantises all layers."""
    for step in steps:
        for x in torch.cat([batch(step, rank) for rank in batches]).chunk(num_calls):
            (model(input_ids=x, labels=x).loss / num_calls).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def trained(mesh: Any, folder: Path, kind: str, path: Path, is_resumed: bool, options: dict[str, Any]) -> None:
    """Train two steps on batches that do not depend on the number of ranks, save or resume, and compare with one device."""
    model, plain = sharded(mesh, folder, kind, **options), unsharded(folder, kind)
    with torch.no_grad():  # adapters begin as on one device, but drawn in another order
        values = {n: p.detach() for n, p in acc.full_state_dict(model, rank0_only=False, only="trained").items()}
        for name, param in plain.named_parameters():
            if param.requires_grad:
                param.copy_(values[name])
    optimizer, reference = acc.wrap_optimizer(adamw(model)), adamw(plain)
    if is_resumed:
        learn(plain, reference, range(2), range(12), 1)
        acc.load(path, model, optimizer, only="trained")
    begin = 2 if is_resumed else 0
    share = 12 // mesh.size()
    own = range(mesh.get_rank() * share, (mesh.get_rank() + 1) * share)
    learn(model, optimizer, range(begin, begin + 2), own, 2)
    learn(plain, reference, range(begin, begin + 2), range(12), 1)
    if not is_resumed:
        acc.save(path, model, optimizer, only="trained")
    full = acc.full_state_dict(model, rank0_only=False)
    for name, value in plain.state_dict().items():
        if name.endswith("base_layer.weight") and value.dtype == torch.uint8:
            assert torch.equal(full[name].view(-1, 1), value.cpu()), f"{name}: the packed base, bit for bit"
        elif name in full:
            torch.testing.assert_close(
                full[name], value.cpu(), rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )


HOST = {"offload": acc.Offload(params="host"), "strategy": acc.SHARD_GRAD_OP}


@pytest.mark.parametrize("kind", sampled(KINDS, "nf4-double".__eq__))
def test_it_trains_and_resumes_as_the_unsharded_model(world: Pool, base: Path, tmp_path: Path, kind: str) -> None:
    world.run(2, trained, base, kind, tmp_path / "c", False, {"checkpoint_activations": "full"})
    world.run(3, trained, base, kind, tmp_path / "c", True, HOST)
    world.run(4, trained, base, kind, tmp_path / "c", True, {})


@pytest.mark.parametrize("kind", sampled(KINDS, {"nf4", "fp4-double"}.__contains__))
@on_world(2)
def test_a_rank_holds_its_shard_and_at_most_one_tensor(mesh: Any, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(96 * 5, 96 * 7, bias=False, dtype=torch.bfloat16) for _ in range(6)])
    if mesh.get_rank() == 0:
        save_file(plain.state_dict(), tmp_path / "model.safetensors")
    torch.distributed.barrier(mesh.get_group())
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(96 * 5, 96 * 7, bias=False) for _ in range(6)])
    with Allocations() as memory:
        model = acc.shard(acc.quantize(model, kind), mesh, units={FourBitLinear})
        memory.mark("sharded")
        acc.load_pretrained(model, tmp_path)
        memory.mark("loaded")
    weights = plain[0].weight.numel()
    for name, share in {"weight": 1 / 2, "absmax": (1 if "double" in kind else 4) / 64}.items():
        assert model[0].get_parameter(name).to_local().nbytes == weights * share / 2, (
            "half of the layer on each of two ranks"
        )
    # Less than a rank's rows of a layer: the codes of the data types, and the last layer's scales until gloo's thread frees them.
    assert memory.live("loaded") <= memory.live("sharded") + weights // 8
    peak = memory.peak("sharded", "loaded") - memory.live("sharded")
    assert weights < peak < 2 * weights, "more than a rank's half, less than a whole tensor of bf16"
    full, own = acc.full_state_dict(model, rank0_only=False), acc.quantize(plain, kind).state_dict()
    torch.testing.assert_close(full, dict(own), rtol=0, atol=0)  # on each number of ranks, as without ranks


@pytest.mark.parametrize("kind", sampled(KINDS, "nf4-double".__eq__))
@on_world(2)
def test_transformers_loads_what_is_saved(mesh: Any, base: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = sharded(mesh, base, kind, has_lora=False).eval()
    acc.save_pretrained(model, tmp_path / "saved")
    assert not hasattr(model.config, "quantization_config")
    # In evaluation mode, bitsandbytes rounds to bf16 on processors that have AVX-512 BF16, and rejects rows of 96.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32, device_map="cpu").train()
    assert type(again.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"
    with torch.no_grad():
        torch.testing.assert_close(again(batch(0, 0).cpu()).logits, model(batch(0, 0)).logits.cpu())


# -- the commands, and the example


@pytest.mark.parametrize("kind", sampled(["nf4", "nf4-double"], "nf4-double".__eq__))
@on_world(2)
def test_bytes_are_those_of_the_plan(mesh: Any, base: Path, kind: str) -> None:
    from transformers import AutoConfig

    model = sharded(mesh, base, kind)
    frozen = [p for p in model.parameters() if p.dtype == torch.uint8]
    planned = trained_model(AutoConfig.from_pretrained(base), "base", Kernels(lora_rank=4, quantize=kind))
    whole = sum(p.nbytes for p in planned.parameters() if p.dtype == torch.uint8)
    counted = torch.tensor(sum(p.to_local().nbytes for p in frozen))
    torch.distributed.all_reduce(counted, group=mesh.get_group())
    assert int(counted) == whole


@pytest.mark.slow
@pytest.mark.usefixtures("base")
def test_a_run_is_resumed_on_other_ranks_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accordion train --quantize`, and `accordion export`, whose model answers as the adapter next to its four-bit base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text("\n\n".join(f"line {i} of a text that nobody reads" for i in range(800)))
    words = "--model.path base --model.init pretrained --quantize nf4-double --adapter lora --data.path text.txt --run.dir run"
    words += (
        " --data.seq_len 32 --train.global_batch 12 --train.micro_batch 2 --log.tensorboard false --launch.device cpu"
    )
    words += " --train.lr 0.02"
    for num_ranks, steps in ((2, 2), (3, 4)):
        more = ["--launch.nproc", str(num_ranks), "--train.steps", str(steps), "--train.schedule", "constant"]
        assert cli.main(["train", *words.split(), *more]) == 0
    for target, form in (("merged", "hf"), ("adapter", "peft")):
        assert cli.main(["export", "run", target, "--format", form]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert merged.dtype == torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    plain_logits = base(ids := batch(0, 0).cpu()).logits
    for name, plain in [(n, m) for n, m in base.named_modules() if type(m) is nn.Linear and n != "lm_head"]:
        base.set_submodule(name, theirs(plain, "nf4-double"))
    logits = PeftModel.from_pretrained(base, "adapter").train()(ids).logits
    error = (merged.float()(ids).logits - logits).norm()
    assert error < 0.02 * logits.norm(), "rounded to bf16"
    assert error < 0.2 * (plain_logits - logits).norm()


def without_warnings(words: list[str]) -> None:
    warnings.simplefilter("ignore")  # those of PEFT, as above
    forked.script(words)


def test_the_example_trains(capfd: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "qlora.py"
    assert forked.under_torchrun([str(example)], 2, without_warnings) == 0
    losses = [float(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)


REFUSED = {
    "quantize\\(kind='nf5'\\) is unknown; did you mean 'nf4'": lambda m: acc.quantize(m, "nf5"),
    "no multiple of 64, 0 \\(7, 5\\); name them in skip": lambda m: acc.quantize(nn.Sequential(nn.Linear(5, 7), m)),
    "the weights of 0, 1 are tied": lambda m: acc.quantize(nn.Sequential(m, tied(m))),
    "no linear layers": lambda m: acc.quantize(nn.Sequential(m), skip=["0"]),
}


def tied(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(8, 8)
    other.weight = layer.weight
    return other


@pytest.mark.parametrize("sentence", REFUSED)
def test_layers_that_cannot_be_quantised_are_refused(sentence: str) -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(acc.UsageError, match=sentence):
        REFUSED[sentence](layer)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_methods_that_read_the_weight_fail_when_they_are_made(options: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = acc.quantize(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises((RuntimeError, TypeError), match=r"size of tensor a \(32\)|initialize PiSSA under"):
        get_peft_model(model, LoraConfig(r=4, target_modules=["0"], **options))


def test_a_run_is_resumed_with_the_same_base_and_counts_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_extra", lambda path: {"config": {"model.quantize": "nf4"}})
    checkpoints.check_base(Path("c"), "nf4")
    with pytest.raises(acc.UsageError, match=r"with model.quantize 'nf4', and this run has 'fp4'; take --quantize nf4"):
        checkpoints.check_base(Path("c"), "fp4")
    for kind in KINDS:
        assert (
            num_weights(acc.quantize(nn.Sequential(nn.Linear(320, 192), nn.Embedding(5, 7)), kind)) == 320 * 192 + 227
        )


def test_four_bits_without_adapters_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused(
        capsys, ["train", "--quantize", "nf4", "--model.path", "base", "--model.init", "pretrained"], "--adapter lora"
    )
