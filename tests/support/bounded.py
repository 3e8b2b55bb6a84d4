"""Code in a process of its own, and how much memory it took."""

from tests.support.processes import run_python


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
    done = run_python("-c", head + code + tail, *map(str, words), timeout_s=seconds)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, mib = done.stdout.strip().splitlines()
    return "\n".join(lines), int(mib)
