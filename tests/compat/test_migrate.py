"""`examples/migrate`: programs learn the same after their imports were changed, and unedited, under `fsdp2.install`."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion.compat import deepspeed, fsdp2
from accordion.compat.fsdp2.launching import arguments
from accordion.errors import UsageError
from tests.devices import device
from tests.support.ranked import on_world
from tests.support.sample import sampled

GPU = pytest.mark.cpu("on accelerators tests/gpu/test_migrate.py has it")
EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
MODULES = {
    "fsdp2": ("from torch.distributed.fsdp", "from accordion.compat.fsdp2"),
    "fsdp1": ("from torch.distributed.fsdp", "from accordion.compat.fsdp1"),
    "fsdp1_digits": ("from torch.distributed.fsdp", "from accordion.compat.fsdp1"),
    "fsdp1_transformer": ("from torch.distributed.fsdp", "from accordion.compat.fsdp1"),
    "deepspeed": ("import deepspeed", "from accordion.compat import deepspeed"),
}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}  # the test adds the folder
ZERO: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2)},
    "stage 3 in groups of 2": {"stage": 3, "zero_hpz_partition_size": 2},
    "MiCS in groups of 2": {"stage": 3, "mics_shard_size": 2},
    "stage 2, cpu": {"stage": 2, "offload_optimizer": CPU},
    "stage 3, cpu": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "stage 3, parameters on cpu": {"stage": 3, "offload_param": CPU},
    "stage 3, optimizer on nvme": {"stage": 3, "offload_optimizer": NVME, "offload_param": CPU},
    "stage 3, nvme": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME},
}


def program(name: str, folder: Path = EXAMPLES) -> Any:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODULES)
def test_the_programs_differ_in_their_imports_alone(name):
    before, after = ((EXAMPLES / f"{name}_{kind}.py").read_text().splitlines() for kind in ("before", "after"))
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed
    for old, new in changed:
        assert old.startswith(MODULES[name][0])
        assert new == old.replace(*MODULES[name])


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
@on_world(4)
def test_each_program_learns_the_same(mesh: DeviceMesh, name: str) -> None:
    """An unedited program for FSDP2 learns the same under `install` too."""
    with warnings.catch_warnings(action="ignore"):
        theirs = program(f"{name}_before").train(4, device=str(device()))
    runs = [program(f"{name}_after").train(4, device=str(device()))]
    if name == "fsdp2":
        with fsdp2.install():
            runs.append(program("fsdp2_before").train(4, device=str(device())))
    for ours in runs:
        assert ours == pytest.approx(theirs, rel=1e-5 if str(device()) == "cpu" else 1e-2)  # else in bfloat16
        assert ours[-1] < ours[0]


@pytest.mark.parametrize("name", sampled(ZERO, {"stage 1", "stage 3, nvme"}.__contains__))
@on_world(4)
def test_each_stage_of_deepspeed_learns_the_same(mesh: DeviceMesh, tmp_path: Path, name: str) -> None:
    module = program("deepspeed_after")
    content = {**json.loads(Path(module.CONFIG).read_text()), "bf16": {"enabled": False}}
    offloads = {key: value for key, value in ZERO[name].items() if key.startswith("offload")}
    for section, place in offloads.items():
        offloads[section] = {**place, "nvme_path": str(tmp_path)} if place is NVME else place
    stages = [{"stage": 3}, ZERO[name] | offloads]
    whole, losses = (module.train(2, str(device()), config={**content, "zero_optimization": zero}) for zero in stages)
    assert losses == pytest.approx(whole, rel=1e-5)
    if offloads and ZERO[name]["stage"] == 3:
        assert losses == whole, "offload changes no bit"


@on_world(4)
def test_an_engine_goes_on_from_its_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A checkpoint of the engine contains its counts and the caller's state."""
    module = program("deepspeed_after")
    config = {**json.loads(Path(module.CONFIG).read_text()), "bf16": {"enabled": False}}  # slow on CPUs

    def made() -> Any:
        model, optimizer, _, scheduler = deepspeed.initialize(model=module.Model(), config=config)
        assert (model.optimizer, model.lr_scheduler) == (optimizer, scheduler)
        return model

    def steps(model: Any, count: int) -> list[float]:
        texts, losses = module.torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(2 * count):
            losses.append(model.backward(module.loss_of(model, texts, str(device()))).item())
            model.step()
        return losses

    first, again = made(), made()
    steps(first, 1)
    assert (first.global_steps, first.micro_steps) == (1, 2)
    assert again.load_checkpoint(tmp_path) == (None, {})
    first.save_checkpoint(tmp_path, client_state={"seen": 64})
    path, client = again.load_checkpoint(tmp_path)
    assert (Path(path).name, client) == ("global_step1", {"seen": 64})
    assert steps(again, 1) == steps(first, 1)
    assert (again.get_lr(), again.global_steps) == (first.get_lr(), 2)
    assert again.get_global_grad_norm() == first.get_global_grad_norm()


def over(mesh: DeviceMesh, name: str) -> Any:
    """Run the program on the ranks of `mesh`, which are only some of this test's ranks."""
    module = program(name)
    module.FSDP = functools.partial(module.FSDP, process_group=mesh.get_group())
    return module


@GPU
@pytest.mark.slow
@on_world(4)
def test_the_digits_program_learns_the_same(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings(action="ignore"):
        theirs = over(mesh, "fsdp1_digits_before").train()
        ours = over(mesh, "fsdp1_digits_after").train()
    assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    assert ours[0][1] < ours[0][0]
    assert ours[1] == pytest.approx(theirs[1], abs=0.02)
    assert ours[1] > 0.5


@GPU
@pytest.mark.slow
@on_world(4)
def test_the_transformer_program_learns_the_same_and_goes_on(mesh: DeviceMesh, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        theirs, before = program("fsdp1_transformer_before"), program("fsdp1_transformer_before").build()
        expected = theirs.train(*before, 10)
    ours = program("fsdp1_transformer_after")
    model, optimizer = ours.build()
    losses = ours.train(model, optimizer, 10)
    assert losses == pytest.approx(expected, abs=0.03)
    assert losses[-1] < losses[0] - 0.5
    assert ours.train(*ours.build(offload=True), 3) == losses[:3]  # torch's class offloads beside accelerators only
    ours.save_sharded(model, optimizer, tmp_path)
    again, its_optimizer = ours.build()
    ours.train(again, its_optimizer, 1)
    ours.load_sharded(again, its_optimizer, tmp_path)
    assert ours.train(again, its_optimizer, 3, first=10) == ours.train(model, optimizer, 3, first=10)
    weights, state = ours.full_state(again, its_optimizer)
    plain = ours.Model()
    if dist.get_rank() == 0:
        plain.load_state_dict(weights)
        assert list(state["state"]) == [name for name, _ in plain.named_parameters()]


# -- unedited programs: `fsdp2.install` and `accordion run`


@on_world(2)
def test_names_are_replaced_until_they_are_removed(mesh: Any) -> None:
    theirs = torch.distributed.fsdp.fully_shard
    early = types.ModuleType("imported_before")
    early.fully_shard = theirs  # type: ignore[attr-defined]
    sys.modules["imported_before"] = early
    installed = fsdp2.install()
    try:
        assert torch.distributed.fsdp.fully_shard is early.fully_shard is fsdp2.fully_shard  # type: ignore[attr-defined]
        assert program("fsdp2_before").fully_shard is fsdp2.fully_shard
        model = torch.distributed.fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)
        assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        fsdp2.install().remove()  # another one changes nothing
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
    finally:
        installed.remove()
        del sys.modules["imported_before"]
    assert torch.distributed.fsdp.fully_shard is early.fully_shard is theirs  # type: ignore[attr-defined]
    installed.remove()
    with fsdp2.install():
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
    assert torch.distributed.fsdp.fully_shard is theirs


def test_options_are_torchruns_and_the_rest_is_the_programs():
    def read(*words: str) -> tuple[Any, ...]:
        args = arguments(list(words))
        assert (args.module, args.training_script) == (True, "accordion.compat.fsdp2")
        return args.nproc_per_node, args.nnodes, args.standalone, args.training_script_args

    assert read("--nproc", "2", "p.py", "--nproc", "9") == ("2", "1:1", False, ["p.py", "--nproc", "9"])
    assert read("--standalone", "--nproc=2", "p.py", "-x") == ("2", "1:1", True, ["p.py", "-x"])
    assert read("--nnodes", "2", "-m", "a.b", "-m") == ("1", "2", False, ["-m", "a.b", "-m"])
    with pytest.raises(UsageError, match="no program is named"):
        read("--nproc", "2")
    with pytest.raises(UsageError, match="--nproces"):
        read("--nproces", "2", "p.py")


@pytest.mark.slow
def test_accordion_run(tmp_path):
    program = Path(tmp_path, "said.py")
    program.write_text(
        "import os, pathlib, sys, time\nfrom torch.distributed.fsdp import fully_shard\n"
        "print(fully_shard.__module__, sys.argv[1:], __name__, flush=True)\n"
        "printed = pathlib.Path(__file__).parent / 'printed'\nprinted.mkdir(exist_ok=True)\n"
        "(printed / os.environ['RANK']).touch()\n"
        "while len(os.listdir(printed)) < 2:\n    time.sleep(0.05)\n"  # torchrun ends the other rank after the first failure
        "raise SystemExit(3)\n"
    )
    command = [sys.executable, "-m", "accordion", "run", "--nproc", "2"]
    out = subprocess.run([*command, str(program), "--nproc", "3"], text=True, capture_output=True, timeout=120)
    assert out.stdout.count("accordion.compat.fsdp2 ['--nproc', '3'] __main__") == 2, out.stderr
    assert out.returncode == 1
    out = subprocess.run([*command, str(EXAMPLES / "fsdp2_before.py")], text=True, capture_output=True, timeout=120)
    assert out.returncode == 0, out.stderr
