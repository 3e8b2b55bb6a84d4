from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a cache that the tests of a file share; their ranks come from the fork server."""
    folder = tmp_path_factory.mktemp("place")
    with forked.commands_in(folder):
        yield folder
