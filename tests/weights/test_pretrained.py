"""Pretrained folders: every rank reads its own rows, whatever the names and layout in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import accordion as acc
from accordion.checkpoint.untrusted_files import HF_INDEX, HF_SINGLE
from accordion.config import STRATEGIES
from accordion.weights.lazy_tensors import rows_of_folder
from accordion.weights.pretrained import load_pretrained
from tests.support import models
from tests.support.meters import Allocations
from tests.support.ranked import on_world
from tests.support.reference import local_of
from tests.support.sample import sampled
from tests.weights.test_initialise import FAMILIES, LAYOUTS, MODELS, Bare, on_layout, unlike


def seeded(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return BUILDS[name]()


class Counts(nn.Module):
    """A module with buffers of several kinds in the file, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(7, 3))
        self.gain = nn.Parameter(torch.randn(()))
        self.wide = nn.Linear(70_001, 1)
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean.uniform_(1, 2)
        self.register_buffer("seen", torch.arange(6).view(2, 3))
        self.register_buffer("table", torch.arange(4) / 4, persistent=False)

    def reset_parameters(self) -> None:
        self.table = torch.arange(4) / 4
        self.seen.zero_()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: models.Tiny(vocab=19, width=10, hidden=7),
    "tied": lambda: models.Tiny(vocab=19, tied=True),
    "counts": Counts,
    **{name: family.make for name, family in MODELS.items()},
}


def write(folder: Path, tensors: dict[str, Tensor], num_files: int = 1) -> str:
    """Write a folder of one file, or of several and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return str(folder)
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    weight_map = {key: names[i % num_files] for i, key in enumerate(tensors)}
    for name in names:
        save_file({key: t for key, t in tensors.items() if weight_map[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def of_rank(mesh: Any, folder: Path, tensors: dict[str, Tensor]) -> str:
    """Write a folder that this rank alone reads."""
    return write(folder / str(mesh.get_local_rank()), tensors)


def loaded(
    name: str, folder: str, mesh: Any, strategy: str = "full_shard", real: bool = False, **options: Any
) -> nn.Module:
    """Return the sharded model, loaded from a folder. `real`: built on the CPU with other weights before."""
    with torch.device("cpu" if real else "meta"):
        model = acc.shard(
            BUILDS[name](),
            mesh,
            strategy=STRATEGIES[strategy],
            **options,
        )
    load_pretrained(model, folder)
    return model


def differences(mesh: Any, layout: str, folders: dict[str, str]) -> dict[str, list[str]]:
    result = {}
    for name, folder in folders.items():
        state = torch.get_rng_state()
        model = loaded(name.partition("/")[0], folder, mesh, LAYOUTS[layout][2])
        result[name] = unlike(model, seeded(name.partition("/")[0]))
        if not torch.equal(state, torch.get_rng_state()):
            result[name].append("random numbers were drawn")
    return result


@pytest.fixture(scope="module")
def plain_folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("plain")
    folders = {}
    for name in BUILDS.keys() - MODELS.keys():
        state = seeded(name).state_dict()
        if name == "tied":
            del state["head.weight"]
        folders[name] = write(root / name, state)
        folders[f"{name}/several"] = write(root / f"{name}-several", state, 3)
        prefixed = {f"module._orig_mod.model.{key}": value for key, value in state.items()}
        folders[f"{name}/prefixed"] = write(root / f"{name}-prefixed", prefixed)
    return folders


@pytest.fixture(scope="module")
def family_folders(tmp_path_factory) -> dict[str, str]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("families")
    folders = {}
    for name in FAMILIES:
        model: Any = seeded(name)
        folders[name] = str(root / name)
        model.save_pretrained(root / name)
        folders[f"{name}/base"] = write(root / f"{name}-base", without_base(model))
    folders["llama/several"] = str(root / "llama-several")
    seeded("llama").save_pretrained(root / "llama-several", max_shard_size="12KB")  # type: ignore[operator]
    folders["mixtral/as it is"] = str(root / "as it is")
    seeded("mixtral").save_pretrained(root / "as it is", save_original_format=False)  # type: ignore[operator]
    return folders


def without_base(model: Any) -> dict[str, Tensor]:
    """Return the state that the base model alone would save, with names of old versions, without the heads."""
    state = {name: p for name, p in model.state_dict().items() if name not in model.all_tied_weights_keys}
    state = {name.removeprefix(model.base_model_prefix + "."): p for name, p in state.items()}
    if model.config.model_type == "llama":
        state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    return state


@pytest.mark.parametrize("layout", sampled(["one rank", "three", "replicated", "over both"], "three".__eq__))
@on_layout
def test_plain_models(mesh: Any, plain_folders: dict[str, str], layout: str) -> None:
    assert differences(mesh, layout, plain_folders) == {name: [] for name in plain_folders}


@pytest.mark.parametrize("layout", sampled(["three", "over both"], "three".__eq__))
@on_layout
def test_families_of_transformers(mesh: Any, family_folders: dict[str, str], layout: str) -> None:
    folders = {name: path for name, path in family_folders.items() if layout == "three" or "/" not in name}
    assert differences(mesh, layout, folders) == {name: [] for name in folders}


def test_the_folders_hold_what_the_test_is_about(family_folders):
    assert (Path(family_folders["llama/several"]) / HF_INDEX).is_file()
    with safe_open(Path(family_folders["mixtral"]) / HF_SINGLE, "pt") as file:
        assert any("block_sparse_moe.experts.2.w1" in key for key in file.keys())  # noqa: SIM118
    with safe_open(Path(family_folders["mixtral/as it is"]) / HF_SINGLE, "pt") as file:
        assert any("experts.gate_up_proj" in key for key in file.keys())  # noqa: SIM118
    with safe_open(Path(family_folders["gpt2/base"]) / HF_SINGLE, "pt") as file:
        assert {"wte.weight", "lm_head.weight"} & set(file.keys()) == {"wte.weight"}


# -- dtypes, ignored names, real models


@on_world(2)
def test_tensors_are_cast_to_the_dtypes_of_the_model(mesh: Any, tmp_path: Path) -> None:
    """A file in half precision is loaded into float32 masters of real parameters, with buffers cast by `shard`."""
    state = {
        k: t.to(torch.bfloat16) if t.is_floating_point() else t.int() for k, t in seeded("counts").state_dict().items()
    }
    precision = acc.Precision(params=torch.bfloat16, buffers=torch.bfloat16)
    model = loaded("counts", of_rank(mesh, tmp_path, state), mesh, real=True, precision=precision)
    found = acc.full_state_dict(model, rank0_only=False)
    for name, tensor in state.items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name
    assert found["embed"].dtype == torch.float32
    assert found["norm.running_mean"].dtype == model.table.dtype == torch.bfloat16
    assert found["seen"].dtype == torch.int64


@on_world(2)
def test_ignored_names_may_be_missing_on_either_side(mesh: Any, tmp_path: Path) -> None:
    state = {k: t for k, t in models.seeded(5, vocab=19).state_dict().items() if not k.startswith("head.")}
    state |= {"old.bias": torch.ones(3), "norm.weight": torch.full((32,), 2.0), "norm.bias": torch.ones(32)}
    model = models.seeded(vocab=19)
    nn.init.zeros_(model.embed.weight)  # real and zero: a value
    model = acc.shard(model, mesh)
    load_pretrained(model, of_rank(mesh, tmp_path, state), ignore=["head.*", "old.*", "norm.bias", "embed.*"])
    found = {name: tensor.cpu() for name, tensor in acc.full_state_dict(model, rank0_only=False).items()}
    assert torch.equal(found["head.weight"], models.seeded(vocab=19).head.weight.cpu()), (
        "what is ignored keeps its values"
    )
    assert torch.equal(found["norm.weight"], torch.full((32,), 2.0))
    assert torch.equal(found["norm.bias"], torch.zeros(32))
    assert not found["embed.weight"].any()


# -- what does not fit


def refusals(mesh: Any, folders: dict[str, str]) -> dict[str, str]:
    """Return the messages of loads that fail; each leaves the model unchanged."""
    result = {}
    for name, folder in folders.items():
        model = acc.shard(models.seeded(vocab=19, tied=name == "untied"), mesh)
        before = {n: p.full_tensor() for n, p in model.named_parameters()}
        try:
            load_pretrained(model, folder)
        except acc.CheckpointError as error:
            result[name] = str(error)
        assert all(torch.equal(before[n], p.full_tensor()) for n, p in model.named_parameters())
    return result


def bad_folders(root: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return bad folders by name, and the parts of the error that is expected for each."""
    state = {name: t.detach() for name, t in models.seeded(vocab=19).state_dict().items()}
    wrong = {
        **state,
        "norm.weight": torch.zeros(31),
        "head.weight": torch.zeros(19, 32, dtype=torch.int8),
        "more.bias": torch.zeros(2, 9),
    }
    for name in ("embed.weight", "norm.bias"):
        del wrong[name]
    words = {
        "wrong": [
            "2 missing in the folder: ", "embed.weight (19, 32)", "norm.bias (32,)",
            "1 in the folder but not in the model: more.bias (2, 9)", "2 that do not fit: ",
            "norm.weight is float32 (31,) in the folder and float32 (32,) in the model",
            "head.weight is int8 (19, 32) in the folder and float32 (19, 32) in the model",
        ],
        "twice": ["model.embed.weight and embed.weight both stand for embed.weight"],
        "untied": ["1 tied in the model but not equal in the folder: embed.weight and head.weight"],
        "empty": ["neither model.safetensors nor model.safetensors.index.json"],
        "absent": ["'", "is no folder", "hub"],
        "torn": ["model.safetensors is no safetensors file"],
        "no index": ["is no index of safetensors"],
        "outside": ["'../secret.safetensors'", "plain name"],
    }  # fmt: skip
    folders = {name: str(root / name) for name in words}
    write(root / "wrong", wrong)
    write(root / "twice", {**state, "model.embed.weight": state["embed.weight"].clone()})
    write(root / "untied", {**state, "head.weight": state["embed.weight"] + torch.eye(19, 32)})
    (root / "empty").mkdir()
    write(root / "torn", state)
    torn = root / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-9])
    save_file(state, root / "secret.safetensors")
    outside = {"weight_map": dict.fromkeys(state, "../secret.safetensors")}
    for name, index in {"no index": [], "outside": outside}.items():
        (root / name).mkdir()
        (root / name / HF_INDEX).write_text(json.dumps(index))
    return folders, words


def test_all_misfits_are_named_in_one_message_on_every_rank(world, tmp_path):
    folders, words = bad_folders(tmp_path)
    found = world.run(2, refusals, folders)
    assert found[0] == found[1]
    for name, wanted in words.items():
        assert [word for word in wanted if word not in found[0].get(name, "")] == [], (name, found[0].get(name))


@on_world(2)
def test_a_lost_expert_is_named(mesh: Any, tmp_path: Path, family_folders: dict[str, str]) -> None:
    with safe_open(Path(family_folders["mixtral"]) / HF_SINGLE, "pt") as file:
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    lost = [key for key in state if "layers.0" in key and "experts.1.w2" in key]
    folder = of_rank(mesh, tmp_path, {key: tensor for key, tensor in state.items() if key not in lost})
    with pytest.raises(acc.CheckpointError) as error:
        loaded("mixtral", folder, mesh)
    text = str(error.value)
    assert "1 that do not fit: model.layers.0.mlp.experts.down_proj is float32 (7, 32, 48) in the folder" in text
    assert "(from model.layers.0.block_sparse_moe.experts.0.w2.weight, " in text
    assert "float32 (8, 32, 48) in the model" in text


@on_world(2)
def test_a_folder_that_one_rank_lacks_is_an_error_on_all(mesh: Any, tmp_path: Path) -> None:
    folder = of_rank(mesh, tmp_path, models.seeded(vocab=19).state_dict())
    model = acc.shard(models.seeded(vocab=19), mesh)
    with pytest.raises(acc.CheckpointError, match=r"rank 0: .* is no folder"):
        load_pretrained(model, folder if mesh.get_local_rank() else folder + "-not-here")


@on_world(2)
def test_buffers_and_ignored_parameters_that_nothing_computes_are_named(mesh: Any, tmp_path: Path) -> None:
    folder = of_rank(mesh, tmp_path, nn.Sequential(nn.Linear(2, 2)).state_dict())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_buffer("mask", torch.ones(3), persistent=False)
    model = acc.shard(model, mesh)
    with pytest.raises(acc.UsageError, match=r"1 buffers of the meta device .*: mask"):
        load_pretrained(model, folder)
    assert model.mask.is_meta
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    model = acc.shard(model, mesh)
    with pytest.raises(acc.AccordionError, match=r"2 buffers and parameters .* 1.weight, 1.extra; compute them"):
        load_pretrained(model, folder, ignore=["1.*"])
    assert not model[0].weight.to_local().any()


@pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
@on_world(2)
def test_a_name_of_the_hub_is_downloaded(mesh: Any, tmp_path: Path) -> None:
    """Load by a name of the hub, with a hub that cannot be reached and with one that returns a folder."""
    import huggingface_hub

    folder = of_rank(mesh, tmp_path, models.seeded(5, vocab=19).state_dict())
    asked: list[str] = []

    def give(name: str, **options: Any) -> str:
        asked.append(name)
        if name == "nobody/nothing":
            raise OSError("no network")
        return folder

    model = acc.shard(models.seeded(vocab=19), mesh)
    with mock.patch.object(huggingface_hub, "snapshot_download", give):
        with pytest.raises(acc.CheckpointError, match="no network"):
            load_pretrained(model, "nobody/nothing")
        load_pretrained(model, "owner/name")
    assert asked == ["nobody/nothing", "owner/name"]
    assert unlike(model, models.seeded(5, vocab=19)) == []


# -- conversions


def test_lazy_tensors_compute_what_tensors_do(tmp_path):
    a, b = torch.randn(6, 4, 3), torch.randn(6, 4, 3)
    save_file({"a": a, "b": b}, tmp_path / "model.safetensors")

    def program(x: Any, y: Any) -> dict[str, Any]:
        stacked = torch.stack([x, y, x], dim=1)
        joined = torch.cat([stacked, torch.stack([y, y], 1)], dim=1)
        left, right = torch.chunk(joined.transpose(0, 2), 2, dim=0)
        first, second, _ = torch.split(joined, [1, 3, 1], dim=1)
        return {
            "stacked": stacked, "joined": joined, "left": left.contiguous(), "right": right, "first": first, "second": second,
            "other": x.reshape(3, 2, 12).permute(1, 0, 2), "part": y[2:5, None], "product": torch.mul(x, y),
            "tail": torch.unbind(y)[-1],
        }  # fmt: skip

    rows = rows_of_folder(tmp_path)
    lazy = program(rows["a"], rows["b"])
    for name, wanted in program(a, b).items():
        got = lazy[name]
        assert got.shape == wanted.shape, name
        assert torch.equal(got.whole(), wanted), name
        part = got.narrow(0, 1, wanted.shape[0] - 1).narrow(-1, 1, 2)
        assert torch.equal(part.whole(), wanted[1:, ..., 1:3]), name


# -- memory


@on_world(4)
def test_a_rank_needs_its_shard_and_less_than_one_more_tensor(mesh: Any, tmp_path: Path) -> None:
    """Tied weights are read once."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    plain[5].weight = plain[0].weight
    folder = of_rank(mesh, tmp_path, dict(plain.named_parameters()))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        model[5].weight = model[0].weight
    with Allocations() as memory:
        memory.mark("begun")
        model = acc.shard(model, mesh, units={nn.Linear})
        memory.mark("sharded")
        load_pretrained(model, folder)
        memory.mark("loaded")
    assert model[5].weight is model[0].weight
    shard, one = sum(local_of(p).nbytes for p in model.parameters()), plain[0].weight.nbytes
    assert shard == 5 * one // 4
    assert memory.peak("begun", "loaded") <= shard + one + 1024  # a unit in full, while it is sharded
    assert memory.live("loaded") <= memory.live("sharded") + 1024
    assert memory.peak("sharded", "loaded") - memory.live("sharded") < one
    assert unlike(model, plain) == []
