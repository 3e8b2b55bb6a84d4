"""Test a built wheel in empty environments, one with torch alone and one for each extra: `make wheel`.

Each feature of FEATURES must work in the environment of the extra that it names. In all others it must work too, or end with one
sentence that names that extra. Runs under the Python to test, with the standard library alone.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TINY = (
    f"train --model.preset llama-tiny --data.path {Path(asyncio.__file__).parent} --data.seq_len 32 --launch.device cpu"
)
TINY += " --train.steps 2"
SHARD = (
    "import accordion as acc, torch, torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, "
    "world_size=1); m = acc.shard(torch.nn.Linear(3, 2)); acc.save('{at}', m); acc.load('{at}', m)"
)
MODEL = (
    "from transformers import AutoModelForCausalLM as Model, LlamaConfig; Model.from_config(LlamaConfig(vocab_size=8, "
    "hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained('hf')"
)
MODULE = "import accordion.integrations.{}"
FIT = (
    "import accordion\ntry: accordion.fit(None)\nexcept Exception as error:\n  if isinstance(error, ImportError): raise"
)
PREPARED = {
    "checkpoint": SHARD.format(at="with-xxhash"),
    "export": MODEL,
}  # extra -> code that runs first, and only there
# (the extra that the feature needs, and others that it may name; arguments of `accordion`, or Python code). Later ones read what
# earlier ones wrote.
FEATURES: list[tuple[str, str | list[str]]] = [
    ("checkpoint", "checkpoint verify with-xxhash"),
    ("", "--version"),
    ("", "doctor --device cpu"),
    ("", f"run --nproc 2 {EXAMPLES}/train_tiny.py"),
    ("", [SHARD.format(at="core")]),
    ("", "export core core.safetensors"),
    ("remote", [SHARD.format(at="memory://somewhere")]),
    (
        "plan",
        "plan --model llama3-8b --gpu h100 --gpus 8 --strategy full_shard --micro-batch 1 --seq 2048 --offload none",
    ),
    ("plan", "bench --model gpt-tiny --against fsdp2 --rounds 1 --device cpu"),
    ("train", f"{TINY} --run.dir runs/of-train"),
    ("train checkpoint", "generate runs/of-train --prompt a --max-new-tokens 2"),
    ("train", [FIT]),
    ("log train", f"{TINY} --run.dir runs/of-log --log.mlflow x"),
    ("export", "export hf exported --format onnx"),
    ("integrations", [MODULE.format("transformers")]),
    ("integrations", [MODULE.format("accelerate")]),
    ("integrations", [MODULE.format("lightning")]),
]
EXTRAS = ("checkpoint", "train", "", "remote", "plan", "log", "export", "integrations")


def check_contents(wheel: Path) -> None:
    """Fail if `wheel` lacks a file of the package, or has any other file, such as a test."""
    files = {path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    names = {p.relative_to(ROOT / "src").as_posix() for p in files if p.parts[len(ROOT.parts) + 1] == "accordion"}
    expected = {name for name in names if not name.endswith("README.md")}
    with zipfile.ZipFile(wheel) as packed:
        packed_names = {name for name in packed.namelist() if ".dist-info/" not in name}
        metadata = {name.partition(".dist-info/")[2] for name in packed.namelist()} - {""}
    assert packed_names == expected, f"missing or unexpected in {wheel.name}: {sorted(packed_names ^ expected)}"
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= metadata, metadata


def environment(at: Path, base: Path | None, *packages: str) -> Path:
    """Create a virtual environment with `packages`, which also sees those of `base`, and return its Python."""
    venv.create(at, with_pip=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(at)}))
    if base is not None:
        (site / "base.pth").write_text(sysconfig.get_path("purelib", "venv", {"base": str(base)}))
    python = at / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *packages], check=True)
    return python


def outcome(python: Path, extra: str, needed: str, command: str | list[str], folder: Path) -> str:
    """Run one feature in the environment of `extra` and return "works" or "refused"; or else its output, which is an error."""
    words = ["-c", *command] if isinstance(command, list) else ["-m", "accordion", *command.split()]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"MLFLOW_TRACKING_URI": "mlruns"}
    run = subprocess.run([python, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=900)
    last = ["", *(run.stdout + run.stderr).strip().splitlines()][-1]
    if run.returncode == 0:
        return "works"
    is_named = any(f"; pip install 'accordion-fsdp[{name}]'." in last for name in needed.split())
    is_brief = isinstance(command, list) or "Traceback" not in run.stderr
    return "refused" if extra != needed.partition(" ")[0] and is_named and is_brief else run.stdout + run.stderr


def main(wheel: Path) -> int:
    check_contents(wheel)
    failed = 0
    with TemporaryDirectory() as name:
        place = Path(name)
        environment(place / "base", None, "torch", "numpy", "safetensors")
        for extra in EXTRAS:
            packages = f"{wheel}[{extra}]" if extra else str(wheel)
            python = environment(place / f"of-{extra}", place / "base", packages)
            for code in [PREPARED[extra]] if extra in PREPARED else []:
                subprocess.run([python, "-c", code], cwd=place, check=True)
            for needed, command in FEATURES:
                if extra and not needed:
                    continue  # works without extras, which is tested where there is none
                result = outcome(python, extra, needed, command, place)
                failed += result not in ("works", "refused")
                print(f"[{extra or 'no extra'}] {command!s:.90}: {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
