"""A stand-in for an inference engine: a process of its own that reads tensors from shared memory and answers their digests."""

from __future__ import annotations

import hashlib
import json
import mmap
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Receiver:
    """Context manager with the process; `receive` hands it a tensor. `names`: those received. `num_bytes`: of shared memory."""

    def __init__(self, num_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        path = Path(self._folder.name, "weights")
        path.write_bytes(bytes(num_bytes))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        words = [sys.executable, __file__, str(path)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: Any = self._process.stdout
        self.names: list[str] = []

    def receive(self, name: str, tensor: Any) -> None:
        """Copy `tensor` to the shared memory; raise `RuntimeError` unless the process reads the same bytes there."""
        import torch  # not by the process, which starts fast without it

        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        self._memory[: len(data)] = data
        print(json.dumps([name, len(data)]), file=self._process.stdin, flush=True)
        if json.loads(self._answers.readline()) != [name, hashlib.sha256(data).hexdigest()]:
            raise RuntimeError(f"the receiver has other bytes of {name}")
        self.names.append(name)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, at which it ends
        self._folder.cleanup()


def main(path: str) -> None:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    for line in sys.stdin:
        name, num_bytes = json.loads(line)
        print(json.dumps([name, hashlib.sha256(memory[:num_bytes]).hexdigest()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
