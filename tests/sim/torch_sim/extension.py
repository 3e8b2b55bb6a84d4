"""Builds the extension from its C++ source with this machine's compiler; the folder's name is a hash of the contents."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "csrc"
KEPT = HERE.parents[2] / "build" / "sim"  # git ignores it
COMPILERS = ("g++", "clang++")
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


class NotBuiltError(ImportError):
    """Raised if the simulator cannot be built here; the text names what is missing."""


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def why_not() -> str | None:
    """Return the reason why the simulator cannot be built on this machine, as a sentence; None if it can, or was built."""
    if built().exists():
        return None
    if compiler() is None:
        return f"the simulated accelerator needs a C++ compiler and found none of {', '.join(COMPILERS)}: install g++"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated accelerator needs Python's headers and found no Python.h: install python3-dev"
    return None


def built() -> Path:
    """Return the path of the extension for this source, torch, Python and compiler flags; it may not exist yet."""
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return KEPT / digest.hexdigest()[:16] / "sim_C.so"


def build() -> Path:
    """Return the path of the extension. Compiles it if that was not done before, which takes a minute and 3 GB of memory.

    Raises `NotBuiltError` if there is no compiler or it refuses the source. Processes that ask together wait for one.
    """
    path = built()
    if path.exists():
        return path
    if reason := why_not():
        raise NotBuiltError(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print("building the simulated accelerator (a minute, once)", file=sys.stderr, flush=True)
            _compile(path)
            for other in KEPT.iterdir():  # of sources that have changed since
                if other.is_dir() and other != path.parent:
                    shutil.rmtree(other, ignore_errors=True)
    return path


def _compile(path: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    headers = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder, path.name)
        command = [str(compiler()), *FLAGS, "-DTORCH_EXTENSION_NAME=sim_C", str(SOURCE / "sim.cpp"), "-o", str(fresh)]
        command += [f"-isystem{header}" for header in headers]
        command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotBuiltError(f"{command[0]} does not compile {SOURCE / 'sim.cpp'}:\n{done.stderr[-4000:]}")
        os.replace(fresh, path)
