"""Every Python block of the README and of docs/ runs on one rank, with the names of `PAGES` for what a page does not define."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import accordion as acc
from accordion.models.llama import PUBLISHED, llama_config
from accordion.plan.trace.setup import Subject
from tests.support import forked, language_folders

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]


def blocks_of(path: Path) -> list[tuple[int, str]]:
    """Return the Python blocks of a page, each with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in blocks]


# -- what pages call by names that they do not define


class Output(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    """Returns the loss of a batch, as a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> Output:
        for block in self.blocks:
            rows = block(rows)
        return Output(rows.square().mean())


def plain() -> Names:
    """Return a model that is not sharded, with data."""
    rows = torch.randn(32, 16)
    return {"acc": acc, "torch": torch, "nn": nn, "model": Model(), "dataset": rows, "batches": [*rows.split(8)]}


def trained() -> Names:
    """Return a sharded model with an optimizer that has stepped, and gradients of the next step."""
    names = plain()
    model = acc.shard(names["model"])
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    for step in range(2):
        model(names["batches"][0]).loss.backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {**names, "model": model, "optimizer": optimizer, "evaluate": lambda model: model(names["batches"][0])}


def checkpoint(block: int) -> Names:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    names = trained()
    optimizer = names["optimizer"]
    if block == 1:
        weights, moments = get_state_dict(names["model"], optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="dcp")
        return {
            **names,
            "dcp": dcp,
            "folder": "dcp",
            "get_state_dict": get_state_dict,
            "set_state_dict": set_state_dict,
        }
    acc.save("ckpt/step-1", names["model"], optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {**names, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu"), "loader": scheduler}


def compat(block: int) -> Names:
    Path("ds_config.json").write_text(
        '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, '
        '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}}}'
    )
    return {**plain(), "world_size": 1}


def errors(block: int) -> Names:
    server = pytest.importorskip("torch.distributed.debug")
    server.start_debug_server = lambda handlers: None  # would open a port
    return trained()


def llama(block: int = 0) -> Names:
    """Return a folder with a Llama, its configuration, and what makes models of them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    if not Path("llama").exists():
        language_folders.llama(Path("llama"))
    config = AutoConfig.from_pretrained("llama")
    return {
        **plain(), "folder": "llama", "base_folder": "llama", "config": config, "LoraConfig": LoraConfig,
        "AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM, "get_peft_model": get_peft_model,
    }  # fmt: skip


def guide(block: int) -> Names:
    names = trained() if block == 3 else plain()
    model = names["model"]
    if block == 1:
        return {**names, "mesh": dist.init_device_mesh("cpu", (1,))}
    if block == 4:
        return {**names, "torchao": pytest.importorskip("torchao")}
    if block == 5:
        acc.shard(model)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        return {**names, "matrices": matrices, "others": [p for p in model.parameters() if p.ndim == 1]}
    return names


def inference(block: int) -> Names:
    """Return an inference engine that receives weights, and prompts for it."""
    weights: dict[str, torch.Tensor] = {}

    def generate(prompts: list[str]) -> list[str]:
        assert weights
        return prompts

    engine = SimpleNamespace(update_weight=weights.__setitem__, generate=generate)
    return {**trained(), "engine": engine, "prompts": ["a"]}


def integrations(block: int) -> Names:
    import trl
    from transformers import TrainingArguments

    names = llama()
    folder, model = Path("llama"), names["AutoModelForCausalLM"].from_pretrained("llama")
    if not Path("llama-3-8b").exists():
        Path("llama-3-8b").symlink_to(folder)
    args = TrainingArguments("out", use_cpu=True, report_to=[])
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 320, (4, 16))]
    return {**names, "model": model, "args": args, "data": data, "trl": trl}


def long_context(block: int) -> Names:
    names = {**integrations(0), "DataLoader": DataLoader, "DistributedSampler": DistributedSampler}
    names["init_device_mesh"] = dist.init_device_mesh
    logits = torch.randn(1, 16, 320, requires_grad=True)
    return {**names, "F": nn.functional, "logits": logits, "shift_labels": torch.ones(1, 16, dtype=torch.long),
            "num_items_in_batch": 16}  # fmt: skip


def arithmetic(block: int) -> Names:
    names = {"acc": acc, "torch": torch}
    if block == 2:
        from transformers import AutoModelForCausalLM

        names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "config": llama_config(PUBLISHED["llama3-8b"], 4096)}
    return names


def plan(block: int) -> Names:
    """`acc.plan` only looks at its arguments, since its search over models of 8 B takes a minute."""

    def planned(*args: Any, **fields: Any) -> Any:
        inspect.signature(acc.plan).bind(*args, **fields)
        return SimpleNamespace(fits=True, chosen=SimpleNamespace(choice=None), as_dict=dict)

    package = SimpleNamespace(**{name: getattr(acc, name) for name in acc.__all__})
    package.plan = planned
    batch = torch.randn(8, 16)
    subject = Subject(make=Model, loss=lambda model, rows: model(rows).loss, batch=lambda: batch)
    return {**plain(), "acc": package, "loss": subject.loss, "batch": batch, "subject": subject}


def tasks(block: int) -> Names:
    Path("run.yaml").write_text(
        "launch: {device: cpu}\ntrain: {micro_batch: 8, eval_every: 0}\nlog: {tensorboard: false}\n"
    )

    def net(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))

    def digits(split: str) -> list[tuple[torch.Tensor, int]]:
        return [(image, i % 10) for i, image in enumerate(torch.randn(64, 16))]

    return {**plain(), "Net": net, "Digits": digits, "model": net(128)}


def result_of_the_guide(names: Names) -> None:
    """Call the method of the block about large vocabularies, as one of a model with its parts."""
    parts = SimpleNamespace(embed=nn.Embedding(32, 16), layers=nn.Linear(16, 16), head=nn.Linear(16, 32))
    tokens = torch.randint(0, 32, (2, 8))
    assert names["forward"](parts, tokens, tokens).ndim == 0


def result_of_the_arithmetic(names: Names) -> None:
    """Compare each number of the page's tables with its formula, the plan and the estimates."""
    page, gib = (ROOT / "docs/arithmetic.md").read_text(encoding="utf-8"), 2**30
    memory = names["memory"]
    planned = [
        memory["parameters"],
        memory["optimizer"],
        memory["gathered"],
        memory["activations"] + memory["other"],
        0,
    ]
    assert memory["gradients"] / gib < 0.005
    rows = re.findall(r"^\| [^|]+ \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    computed = [eval(formula, names) for formula, *_ in rows]
    assert [row[1:] for row in rows] == [
        (f"{a / gib:.2f}", f"{b / gib:.2f}") for a, b in zip(computed, planned, strict=True)
    ]
    assert f"| sum | | {sum(computed) / gib:.2f} | {sum(planned) / gib:.2f} |" in page
    for estimate in names["estimates"]:
        shown = (estimate.device, estimate.arena, estimate.host_states)
        assert " | ".join(f"{num / gib:.2f}" for num in shown) in page
    between = names["estimates"]
    P, n, head = names["P"], names["n"], names["head"]
    assert [e.device for e in between[:2]] == pytest.approx([16 * P / n, 2 * P / n], rel=1e-3)
    assert between[1].arena == pytest.approx(10 * P / n + 4 * head / n, rel=1e-3)


# Page -> the names for one of its blocks.
PAGES: Mapping[str, Callable[[int], Names]] = {
    "README.md": lambda block: plain(),
    "docs/arithmetic.md": arithmetic,
    "docs/checkpoint.md": checkpoint,
    "docs/clusters.md": lambda block: {},
    "docs/compat.md": compat,
    "docs/errors.md": errors,
    "docs/first-run.md": lambda block: {},
    "docs/four_bits.md": llama,
    "docs/guide.md": guide,
    "docs/inference.md": inference,
    "docs/integrations.md": integrations,
    "docs/long-context.md": long_context,
    "docs/memory.md": lambda block: plain(),
    "docs/observe.md": lambda block: trained(),
    "docs/plan.md": plan,
    "docs/tasks.md": tasks,
}
UNGROUPED = {
    "README.md",
    "docs/arithmetic.md",
    "docs/first-run.md",
    "docs/plan.md",
    "docs/tasks.md",
}  # or they make the group
RESULTS = {"docs/arithmetic.md": result_of_the_arithmetic, "docs/guide.md": result_of_the_guide}
# Run by tests/test_first_minutes.py, tests/shard/test_own_meshes.py (experts) and tests/e2e/test_ray.py.
ELSEWHERE = {("docs/guide.md", 0), ("docs/guide.md", 6), ("docs/clusters.md", 0)}
# What does not fit on one CPU rank -> what does.
SMALLER = {
    '"cuda"': '"cpu"',
    "(2, 4)": "(1, 1)",
    "sequence=4": "sequence=1",
    "disk:/scratch": "disk:.",
    '"train.steps": 500': '"train.steps": 2',
}


def run_page(words: list[str]) -> None:
    (page,) = words
    names = Names()
    warnings.simplefilter("ignore", FutureWarning)  # those of PEFT about transformers
    if page not in UNGROUPED:
        dist.init_process_group("gloo")
    for number, (line, code) in enumerate(blocks_of(ROOT / page)):
        if (page, number) not in ELSEWHERE:
            for large, small in SMALLER.items():
                code = code.replace(large, small)
            names |= PAGES[page](number)
            exec(compile("\n" * line + code, page, "exec", dont_inherit=True), names)
    if page in RESULTS:
        RESULTS[page](names)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_page_with_python_has_names_to_run_with() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert sorted(str(page.relative_to(ROOT)) for page in pages if blocks_of(page)) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first_run = page == "docs/first-run.md"
    code = forked.under_torchrun([page], 2 if first_run else 1, run_page)
    output = capfd.readouterr()
    assert code == 0, output.err
    if first_run:
        one, two = re.findall(r"^full_shard[^`]+?step 31.*\n", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert two in output.out
        assert one.splitlines()[-4:] == two.splitlines()[-4:]
