"""The handler for torch's debug server: torch's own server shows the place of each rank while ranks wait."""

from __future__ import annotations

import json
import multiprocessing
import re
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist

import accordion as acc
from accordion import _torch
from accordion.errors import UsageError
from accordion.observe import debug
from tests.support import models
from tests.support.ranked import on_world

has_server = pytest.mark.skipif(_torch.debug_frontend() is None, reason="torch 2.13 and newer have the server")


@has_server
@pytest.mark.cpu("on a device the host goes on and waits elsewhere")
@on_world(2)
def test_a_rank_that_hangs_is_shown_with_its_place_and_the_others_with_their_unit(mesh: Any) -> None:
    import torch.distributed.debug as torch_debug

    ranks, rank = mesh.mesh.tolist(), mesh.get_local_rank()
    model = acc.shard(models.seeded(), mesh=mesh)
    group = mesh.get_group()
    ports: list[Any] = [None, None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.create_server(("::", 0), family=socket.AF_INET6) as free:
            ports = [store.port, free.getsockname()[1]]
    dist.broadcast_object_list(ports, src=ranks[0], group=group)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", ports[0])):
            patch.setenv(name, str(value))
        patch.setattr(socket, "gethostname", lambda: "localhost")
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)  # type: ignore[attr-defined]  # may have children
        patch.setitem(sys.modules, "tabulate", stub := ModuleType("tabulate"))  # for pages of torch's own handlers
        stub.tabulate = str  # type: ignore[attr-defined]
        torch_debug.start_debug_server(port=ports[1], start_method="fork", handlers=[debug.RanksHandler(model)])
        try:
            optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):  # ranks meet in the first ones, before they gather
                tokens, targets = models.batch(step, 0, rank, vocab=48)
                models.loss_of(model(tokens), targets).backward()
                optimizer.step()
            if rank == 0:
                page(ports[1])  # the server has started
            dist.barrier(group)
            pages: list[str] = []
            reader = threading.Thread(target=lambda: pages.append(page(ports[1])))
            if rank == 1:
                time.sleep(3.0)  # planted: this rank does not come
            else:
                threading.Timer(1.0, reader.start).start()
            model(tokens)
            if rank == 0:
                reader.join()
            dist.barrier(group)
        finally:
            if rank == 0:
                torch_debug.stop_debug_server()
            else:  # torch's function asks for the page's process, which is on rank 0 alone
                torch_debug._WORKER_SERVER.shutdown()
                torch_debug._WORKER_SERVER = None
    if rank == 0:
        places = [json.loads(text) for text in re.findall(r"<pre>(\{.*?\n\})</pre>", pages[0], re.DOTALL)]
        waits, hangs = (place["models"][-1] for place in places)
        assert waits["unit"] == ["0 (root)"]
        assert waits["collective"] == "gathers unit 0 (root)"
        assert waits["phase"] == "in the forward of step 4"
        assert 0.5 < waits["for_s"] < 3.0
        assert (hangs["unit"], hangs["collective"], hangs["phase"]) == ([], None, "after the backward of step 3")
        assert any("test_debug.py" in line for line in places[1]["stack"])


def page(port: int) -> str:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            with urlopen(f"http://localhost:{port}/{debug.NAME}", timeout=10) as response:
                return str(response.read().decode())
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@has_server
@on_world(2)
def test_the_unit_is_followed_through_a_step(mesh: Any) -> None:
    model = acc.shard(models.seeded(), mesh=mesh)
    before = set(debug._observers)
    debug.RanksHandler(model)
    (observer,) = set(debug._observers) - before
    tokens, targets = models.batch(0, 0, mesh.get_local_rank(), vocab=48)
    seen: list[Any] = []
    for block in model.modules():
        block.register_forward_hook(lambda *_: seen.append(tuple(observer.as_values()["unit"])))
    loss = models.loss_of(model(tokens), targets)
    assert len({unit for unit in seen if unit}) > 1
    assert observer.as_values()["unit"] == []
    loss.backward()
    assert observer.as_values()["unit"] == []


def test_without_the_server_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_frontend", None)
    with pytest.raises(UsageError, match=r"needs torch 2\.13 or newer"):
        debug.RanksHandler(torch.nn.Linear(2, 2))
    monkeypatch.undo()
    if _torch.debug_frontend() is not None:
        with pytest.raises(UsageError, match="is not sharded"):
            debug.RanksHandler(torch.nn.Linear(2, 2))
