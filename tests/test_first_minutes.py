"""`init`, `describe`, `log_norms` and `even`, which a first program calls, and the programs of the README and the guide."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from accordion.devices import Devices
from accordion.train import init as init_module
from tests.devices import device
from tests.support import forked, models
from tests.support.ranked import on_strategy, on_world
from tests.support.reference import adamw, assert_close, grads_of, params_of

ROOT = Path(__file__).parents[1]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
TORCHRUN |= {"MASTER_PORT": "29500"}

# -- init

ALONE = """
import atexit, torch, torch.distributed as dist, accordion as acc
device = acc.init()
model = acc.shard(torch.nn.Linear(4, 4).to(device))
model(torch.ones(2, 4, device=device)).sum().backward()
print("ranks:", dist.get_world_size(), "again:", acc.init() == device)
print(acc.describe(model))
atexit._run_exitfuncs()  # the end of a program, which a forked process lacks
print("group at exit:", dist.is_initialized())
"""


@pytest.mark.cpu("a program of its own")
def test_without_a_launcher_a_program_is_one_rank_and_leaves_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    with forked.Job(forked.script, [str(tmp_path / "alone.py")], tmp_path / "out", tmp_path / "err") as job:
        assert job.wait() == 0
    assert (tmp_path / "err").read_text() == ""
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:2] == ["ranks: 1 again: True", "full_shard over 1 rank, this one on cpu: bytes on each rank"]
    assert lines[-1] == "group at exit: False"


@pytest.mark.cpu("a program of its own")
def test_under_torchrun_its_ranks_are_the_group(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks.py").write_text(
        "import accordion as acc, torch.distributed as dist\n"
        "device = acc.init('cpu')\n"
        "print(device, dist.get_rank(), dist.get_world_size(), acc.init(), dist.get_backend(), flush=True)\n"
    )
    assert forked.script_under_torchrun(tmp_path / "ranks.py", 2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["cpu 0 2 cpu gloo", "cpu 1 2 cpu gloo"]


@pytest.mark.parametrize(
    ("environ", "kind", "message"),
    [
        ({"RANK": "1"}, "cpu", "only RANK is set"),
        ({"WORLD_SIZE": "2"}, "cpu", "only WORLD_SIZE is set; start with torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "cpu", "they are invalid.*'many'"),
        (TORCHRUN, "auto", "2 ranks run on this machine, which has 1 device of type 'cuda'"),
        ({}, "tpu", "the device of init is 'tpu' and this machine has 1 device"),
    ],
)
def test_init_says_what_is_wrong(
    environ: dict[str, str], kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(init_module, "devices_here", lambda: Devices("cuda", 1))
    with pytest.raises(acc.UsageError, match=message):
        acc.init(kind)
    assert not torch.distributed.is_initialized()


# -- norms


def sharded(model: nn.Module, mesh: Any, strategy: str = "full_shard", **options: Any) -> nn.Module:
    return acc.shard(copy.deepcopy(model), mesh, strategy=STRATEGIES[strategy], units={models.Block}, **options)


def norm(tensors: list[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors))


NORMS = [("full_shard", False), ("shard_optim", False), ("hybrid_shard_optim", False), ("full_shard", True)]


@pytest.mark.parametrize(("strategy", "offloads"), NORMS)
@on_strategy
def test_norms_are_those_of_the_unsharded_model(mesh, strategy: str, offloads: bool) -> None:
    """One block is frozen, and two parameters of each block have no gradient on any rank."""
    alone = models.spare()
    alone.blocks[0].requires_grad_(False)
    offload = acc.Offload(params="host", optimizer="host") if offloads else None
    model = sharded(alone, mesh, strategy, offload=offload)
    tokens = [models.batch(0, 0, rank, vocab=48)[0] for rank in range(mesh.size())]
    alone(torch.cat(tokens)).square().mean().backward()
    model(tokens[torch.distributed.get_rank()]).square().mean().backward()

    norms = acc.log_norms(model)
    total = acc.clip_grad_norm_(model, 1e9)
    assert norms["grad_norm"] == float(total), "bit for bit"
    trained = [p for p in alone.parameters() if p.requires_grad]
    wanted = {"grad_norm": norm([p.grad for p in trained if p.grad is not None]), "weight_norm": norm(trained)}
    root = nn.ModuleList([alone.embed, alone.norm, alone.head])
    for name, module in {"blocks.1": alone.blocks[1], "blocks.2": alone.blocks[2], "(root)": root}.items():
        wanted[f"weight_norm/{name}"] = norm(list(module.parameters()))
        wanted[f"grad_norm/{name}"] = norm([p.grad for p in module.parameters() if p.grad is not None])
    assert norms == pytest.approx(wanted, rel=1e-5)

    by_parameter = acc.log_norms(model, by="parameter")
    assert by_parameter["grad_norm"] == norms["grad_norm"]
    assert by_parameter["grad_norm/head.weight"] == pytest.approx(norm([alone.head.weight.grad]), rel=1e-5)
    of_weights = {name.partition("/")[2] for name in by_parameter if name.startswith("weight_norm/")}
    assert of_weights == {name for name, p in alone.named_parameters() if p.requires_grad}
    assert not any("never" in name or "sometimes" in name for name in by_parameter if name.startswith("grad_norm"))
    with pytest.raises(acc.UsageError, match="not 'layer'"):
        acc.log_norms(model, by="layer")  # type: ignore[arg-type]


# -- even


def batches(rank: int, num: int) -> list[tuple[Tensor, bool]]:
    """Tokens, and True if `Block.sometimes` is used: in the last step of the first rank alone."""
    return [(models.batch(i, 0, rank, vocab=48)[0], rank == 0 and i == num - 1) for i in range(num)]


def loss_of(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
    tokens, use_sometimes = batch
    return model(tokens, use_sometimes=use_sometimes).square().mean()


def alone_on(model: nn.Module, counts: list[int], accumulate: int = 1) -> list[dict[str, Tensor | None]]:
    """Train `model` as one process: the loss of a micro-batch is the mean over the ranks that have one. Return the gradients of
    each step."""
    optimizer, data, grads = adamw(model.parameters()), [batches(r, n) for r, n in enumerate(counts)], []
    for i in range(max(counts)):
        having = [each[i] for each in data if len(each) > i]
        sum(loss_of(model, batch) / len(having) for batch in having).backward()
        if (i + 1) % accumulate == 0:
            grads.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim"])
@pytest.mark.parametrize("counts", [[5, 2], [2, 5]])
@on_strategy
def test_unequal_ranks_train_as_one_process_on_what_each_has(mesh, strategy: str, counts: list[int]) -> None:
    alone, rank = models.spare(), torch.distributed.get_rank()
    model = sharded(alone, mesh, strategy)
    optimizer = acc.wrap_optimizer(adamw(model.parameters()))
    wanted, weights = iter(alone_on(alone, counts)), []
    data = acc.even(iter(batches(rank, counts[rank])), model)  # an iterator has no length
    for batch in data:
        loss_of(model, batch).backward()
        assert_close(grads_of(model), next(wanted))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(data.weight)
    assert next(wanted, None) is None
    assert [*weights, data.weight] == [1.0] * 2 + [2.0 if counts[rank] == 5 else 0.0] * 3 + [1.0]
    assert_close(params_of(model), dict(alone.named_parameters()), 1e-5)


@on_world(3)
def test_micro_batches_under_no_sync_are_averaged_one_by_one(mesh) -> None:
    counts = [4, 3, 1]
    alone, rank = models.spare(), mesh.get_rank()
    model = sharded(alone, mesh)
    optimizer = acc.wrap_optimizer(adamw(model.parameters()))
    alone_on(alone, counts, accumulate=2)
    for i, batch in enumerate(acc.even(batches(rank, counts[rank]), model)):
        if i % 2 == 0:
            with acc.no_sync(model):
                loss_of(model, batch).backward()
        else:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(params_of(model), dict(alone.named_parameters()), 1e-5)


@on_world(2)
def test_an_early_end_a_rank_without_data_and_summed_gradients(mesh) -> None:
    rank, counts = mesh.get_rank(), [2, 1]
    model, alone = sharded(models.spare(), mesh, reduce_op="sum"), models.spare()
    data = acc.even(batches(rank, counts[rank]), model)
    assert [data.weight for _ in data] == [1.0, 1.0 - rank], "a sum is not divided by the number of ranks"
    for i, _ in enumerate(data):
        if i == 1:  # the step in which the second rank has weight 0.0
            break
    loss_of(model, batches(rank, counts[rank])[-1]).backward()
    sum(loss_of(alone, batches(r, n)[-1]) for r, n in enumerate(counts)).backward()
    assert_close(grads_of(model), grads_of(alone))
    assert list(acc.even([], model)) == []
    with pytest.raises(acc.UsageError, match="1 of 2 ranks have no batch at all"):
        list(acc.even([1] * rank, model))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return acc.linear_cross_entropy(self.words(tokens), self.head, tokens, head_rows=True)


@on_world(2)
def test_the_rows_of_a_head_are_averaged_too(mesh) -> None:
    torch.manual_seed(0)
    model = acc.shard(Words().to(device()), mesh, units={nn.Linear})
    tokens = torch.arange(12, device=device())
    for i, batch in enumerate(acc.even([tokens, 63 - tokens][: 2 - mesh.get_rank()], model)):
        model.zero_grad()
        model(batch).backward()
        if i == 1:
            weighed = grads_of(model)
    model.zero_grad()
    model(63 - tokens).backward()
    assert_close(weighed, grads_of(model))


# -- programs of the documents


def programs(page: str, heading: str) -> list[str]:
    """Return the Python blocks of a section."""
    text = (ROOT / page).read_text(encoding="utf-8").split(f"\n{heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


MODEL = """
from types import SimpleNamespace
import torch
class Model(torch.nn.Sequential):
    def forward(self, x):
        return SimpleNamespace(loss=super().forward(x).square().mean())
torch.manual_seed(0)
model, dataset = Model(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), list(torch.randn(64, 8))
"""


@pytest.mark.cpu("programs of their own")
@pytest.mark.parametrize(
    ("page", "heading", "shows"),
    [("README.md", "## In your program", ""), ("docs/guide.md", "## The first minutes", "full_shard over 2 ranks")],
)
def test_programs_run_as_they_are_printed(
    page: str,
    heading: str,
    shows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for program in programs(page, heading):
        (tmp_path / "program.py").write_text(MODEL + program)
        assert forked.script_under_torchrun(tmp_path / "program.py", 2) == 0
        assert shows in capfd.readouterr().out
