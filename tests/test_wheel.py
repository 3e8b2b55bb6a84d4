"""The sdist and the wheel made of it, installed alone next to this environment's torch; `make wheel` also tests each extra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from email import message_from_string
from pathlib import Path

import pytest

from tests import installed

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
INSTALLED = """
import accordion
from importlib.metadata import entry_points
print(accordion.__file__, len([getattr(accordion, name) for name in accordion.__all__]))
(command,) = entry_points(group="console_scripts", name="accordion")
command.load()(["--version"])
"""


@pytest.mark.cpu("a package")
def test_the_wheel_of_the_sdist_works_alone(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    source, dist, site = tmp_path / "source", tmp_path / "dist", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(installed.ROOT / name, source)
    package = "src/accordion"
    shutil.copytree(installed.ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def python(*words: str | Path, cwd: Path = tmp_path, **more: str) -> str:
        run = subprocess.run([sys.executable, *words], cwd=cwd, env={**env, **more}, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    python("-c", BUILD, "build_sdist", dist, cwd=source)
    (sdist,) = dist.glob("accordion_fsdp-*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    python("-c", BUILD, "build_wheel", dist, cwd=tmp_path / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = dist.glob("*.whl")
    installed.check_contents(wheel)
    python("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet", "--target", site, wheel)

    (info,) = site.glob("*.dist-info")
    metadata = message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13)} <= {*metadata.get_all("Classifier", [])}
    assert (site / "accordion/py.typed").is_file()
    path, *_ = python("-c", INSTALLED, PYTHONPATH=str(site)).split()
    assert Path(path) == site / "accordion/__init__.py"
