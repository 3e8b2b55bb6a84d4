"""Code in a process of its own, and how much memory it took."""

import os
import subprocess
import sys
from pathlib import Path

import accordion


def run_bounded(code, *words, seconds=300):
    """Run `code` in another process that may map 1 GiB more; its output, and the growth of its resident memory in MiB."""
    head = (
        "import sys, resource, warnings, torch\nwarnings.simplefilter('ignore')\n"
        "from accordion.checkpoint.convert import convert\nfrom accordion.errors import CheckpointError, UsageError\n"
        "import torch.distributed.checkpoint\n"
        "kib = lambda key: int([l for l in open('/proc/self/status') if l.startswith(key)][0].split()[1])\n"
        "before = kib('VmHWM')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (kib('VmSize') * 1024 + 2**30,) * 2)\n"
    )
    tail = "\nprint(); print((kib('VmHWM') - before) // 1024)\n"
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(Path(accordion.__file__).parents[1]), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", head + code + tail, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, mib = done.stdout.strip().splitlines()
    return "\n".join(lines), int(mib)
