"""Swap files: data that is written is read back, and each failure of a disk is named in an error and leaves no file."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accordion.engine.streams import SideStream
from accordion.errors import OffloadError, UsageError
from accordion.offload import swap_file
from accordion.offload.arena import Arena, aligned_buffer
from accordion.offload.host_shards import Resources
from accordion.offload.step import chunks
from accordion.offload.step.optimizer_copy import Entry
from accordion.offload.step.pipelines import NUM_BUFFERS, NUM_DEVICE_BUFFERS, DevicePipeline, HostPipeline
from accordion.offload.swap_file import FileRange, SwapFile, check_folder
from tests.support.disks import fill, mounted

PAGE = swap_file.ALIGN_BYTES


def filled(num_bytes: int, seed: int) -> Tensor:
    buffer = aligned_buffer(num_bytes)
    return buffer.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(seed)))


def read(file: SwapFile, offset: int, num_bytes: int) -> Tensor:
    buffer = aligned_buffer(num_bytes)
    file.read(offset, buffer)
    return buffer


@pytest.mark.parametrize("direct", [swap_file.DIRECT, 0])
def test_written_data_is_read_back_and_seen_in_mapped_tensors(tmp_path, monkeypatch, direct):
    monkeypatch.setattr(swap_file, "DIRECT", direct)
    file = SwapFile(tmp_path, 5 * PAGE)
    assert (file._fast != file._plain) == (bool(direct) and reads_past_the_cache(tmp_path))
    one, two = filled(2 * PAGE, 1), filled(3 * PAGE, 2)
    file.write(0, one)
    file.write(2 * PAGE, two)
    shown = file.mapped(0, 5 * PAGE, torch.uint8)
    assert torch.equal(shown, torch.cat([one, two]))
    assert torch.equal(read(file, 2 * PAGE, 3 * PAGE), two)
    assert file.traffic == {"read": 3 * PAGE, "written": 5 * PAGE}
    file.mapped(2 * PAGE, 3 * PAGE, torch.uint8).copy_(two + 1)
    file.flush()
    assert torch.equal(read(file, 2 * PAGE, 3 * PAGE), two + 1), "what the outside writes counts"
    file.write(0, two[:PAGE])
    assert torch.equal(shown[:PAGE], two[:PAGE]), "and what is written, the outside sees"


def reads_past_the_cache(folder: Path) -> bool:
    (folder / "probe").write_bytes(bytes(PAGE))
    try:
        handle = os.open(folder / "probe", os.O_RDWR | os.O_DIRECT)
        return os.preadv(handle, [aligned_buffer(PAGE).numpy().data], 0) == PAGE
    except (OSError, AttributeError):  # of another system
        return False


def test_a_file_system_without_direct_access_is_read_and_written_plainly(tmp_path, monkeypatch):
    real = os.preadv

    def preadv(handle: int, *rest: Any) -> int:
        if os.get_blocking(handle) and swap_file.DIRECT & fcntl.fcntl(handle, fcntl.F_GETFL):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    file = SwapFile(tmp_path, PAGE)
    assert file._fast == file._plain
    file.write(0, filled(PAGE, 3))
    assert torch.equal(read(file, 0, PAGE), filled(PAGE, 3))


def test_partial_reads_and_writes_are_completed(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda handle, views, at: real(handle, [views[0][:PAGE]], at))
    file = SwapFile(tmp_path, 4 * PAGE)
    file.write(0, filled(4 * PAGE, 5))
    assert torch.equal(read(file, 0, 4 * PAGE), filled(4 * PAGE, 5))


def test_no_room_and_no_folder_are_named_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"cannot create a file for offloaded state in .*file: Not a directory"):
        check_folder(tmp_path / "file")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=rf"has no room for {PAGE} bytes of what is offloaded \(No space left"):
        SwapFile(tmp_path, PAGE)
    assert os.listdir(tmp_path) == ["file"]


def test_several_requests_are_in_flight(tmp_path, monkeypatch):
    """As many reads as there are buffers wait for each other, which would never end if they ran one after the other."""
    todo, parts = made_chunks(tmp_path, NUM_BUFFERS)
    real, together = os.preadv, threading.Barrier(NUM_BUFFERS)

    def preadv(*given: Any) -> int:
        together.wait(60)
        return real(*given)

    monkeypatch.setattr(os, "preadv", preadv)
    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        over_device(parts, pool).run(add_one)
        assert bool((todo.place.shown["a"] == 1).all())
        pipeline = HostPipeline(pool, buffers())
        for future in [pipeline.start(part, add_one) for part in parts]:
            future.result(60)
    assert bool((todo.place.shown["a"] == 2).all())


def test_chunks_are_read_while_one_is_stepped_and_one_is_stepped_at_a_time(tmp_path):
    """The first step waits until other chunks are read; no two chunks are stepped at a time; all are written once."""
    todo, parts = made_chunks(tmp_path, 3 * NUM_BUFFERS)
    file, begun, stepping = todo.place.block.runs["a"].file, threading.Event(), threading.Semaphore(1)

    def step(chunk: chunks.Chunk, views: list[Tensor]) -> None:
        assert stepping.acquire(blocking=False), "two are stepped at a time"
        if not begun.is_set():
            while file.traffic["read"] < NUM_BUFFERS * 4 * PAGE:
                threading.Event().wait(0.001)
            begun.set()
        add_one(chunk, views)
        stepping.release()

    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        pipeline = HostPipeline(pool, buffers())
        for future in [pipeline.start(part, step) for part in parts]:
            future.result(60)
        pipeline.drain()
        assert bool((todo.place.shown["a"] == 1).all())
        assert file.traffic == {"read": file.num_bytes, "written": file.num_bytes}


def test_states_are_created_on_the_calling_thread_and_stepped_on_others_later(tmp_path):
    """The allocator of each thread would keep the memory in which it created states."""
    _, parts = made_chunks(tmp_path, NUM_BUFFERS)
    first, later = set[int](), set[int]()
    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        pipeline = HostPipeline(pool, buffers())
        for part in parts:
            new = replace(part, spans=[replace(span, reads=False) for span in part.spans])
            pipeline.start(new, lambda chunk, views: first.add(threading.get_ident())).result(60)
            pipeline.start(part, lambda chunk, views: later.add(threading.get_ident())).result(60)
    assert first == {threading.get_ident()}
    assert threading.get_ident() not in later
    assert later


def test_a_chunk_that_fails_frees_its_buffer(tmp_path):
    _, parts = made_chunks(tmp_path, 2 * NUM_BUFFERS)

    def fails(chunk: chunks.Chunk, views: list[Tensor]) -> None:
        raise ValueError("planted")

    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        pipeline = HostPipeline(pool, buffers())
        for future in [pipeline.start(part, fails) for part in parts]:
            with pytest.raises(ValueError, match="planted"):
                future.result(60)
        pipeline.drain()
    for _ in range(NUM_BUFFERS + 1):  # more than there are buffers
        with pytest.raises(RuntimeError, match="cannot schedule"):
            pipeline.start(parts[0], add_one)


def test_an_error_is_raised_when_no_read_is_under_way(tmp_path, monkeypatch):
    """The first of several reads fails at once; its error is raised when the others have ended."""
    _, parts = made_chunks(tmp_path, NUM_BUFFERS)
    real, failed, ended = os.preadv, threading.Event(), []

    def preadv(handle: int, views: Any, at: int) -> int:
        if at == 0:
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert failed.wait(60)
        threading.Event().wait(0.2)
        ended.append(at)
        return real(handle, views, at)

    monkeypatch.setattr(os, "preadv", preadv)
    with ThreadPoolExecutor(NUM_BUFFERS) as pool:
        with pytest.raises(OffloadError, match="could not be read"):
            over_device(parts, pool).run(add_one)
        assert len(ended) == NUM_BUFFERS - 1


def made_chunks(path: Path, num: int) -> tuple[chunks.ParamStep, list[chunks.Chunk]]:
    """Return the step of a parameter with a state of zeros in a file, and its chunks of four pages."""
    numel = num * PAGE
    run = FileRange(SwapFile(path, 4 * numel), 0, numel, torch.float32)
    block, own = chunks.StateBlock({"a": run}, numel, itemsize=4, max_numel=PAGE), torch.zeros(numel)
    place = chunks.StatePlace(own, block, 0, {"a": run.mapped()})
    todo = chunks.ParamStep(Entry(0, own, own, own, dict(place.shown)), place)
    parts = list(chunks.chunks_of([todo]))
    assert len(parts) == num
    return todo, parts


def buffers(num: int = NUM_BUFFERS, num_tensors: int = 1) -> list[Tensor]:
    return [aligned_buffer(4 * PAGE * num_tensors) for _ in range(num)]


def over_device(parts: list[chunks.Chunk], pool: ThreadPoolExecutor) -> DevicePipeline:
    """Return a pipeline whose device is the CPU, which copies the state, the parameter and its gradient."""
    return DevicePipeline(parts, cpu_resources(pool), buffers(), buffers(NUM_DEVICE_BUFFERS, num_tensors=3))


def cpu_resources(pool: ThreadPoolExecutor | None = None) -> Resources:
    device = torch.device("cpu")
    streams = {name: SideStream(device, None) for name in ("fetch_stream", "store_stream")}
    return Resources(device=device, pool=lambda: pool, make_arena=Arena, **streams)


def add_one(chunk: chunks.Chunk, views: list[Tensor]) -> None:
    views[0].add_(1)


def test_an_arena_is_one_allocation_and_never_grows():
    arena = Arena(3 * PAGE, torch.device("cpu"))
    first, second = arena.take(PAGE // 4 + 1, torch.float32), arena.take(7, torch.float32)
    assert second.data_ptr() - first.data_ptr() == 2 * PAGE
    with pytest.raises(AssertionError, match="sized for all that is taken"):
        arena.take(1, torch.float32)
    with pytest.raises(UsageError, match=rf"offloading needs {2**60} bytes of host memory .* could not be allocated"):
        Arena(2**60, torch.device("cpu"))


@pytest.mark.parametrize(("total", "wanted"), [(10, 2**16), (10**7, 10**5), (10**9, 2**21)])
def test_chunks_are_a_hundredth_of_a_step_within_limits(total, wanted):
    for itemsize in (2, 4):
        step = PAGE // itemsize
        numel = chunks.chunk_numel(itemsize, total)
        assert numel % step == 0
        assert wanted - step < numel <= wanted


def test_a_disk_that_is_full_and_one_that_is_read_only_are_named(tmp_path):
    with mounted(tmp_path / "full", "size=256k") as full:
        with pytest.raises(OffloadError, match=r"has no room for 1048576 bytes .* \(No space left on device\)"):
            SwapFile(full, 2**20)
        assert os.listdir(full) == []
        first = SwapFile(full, 2**17)
        first.write(0, filled(2**17, 1))
        with pytest.raises(OffloadError, match="has no room for 196608 bytes"):
            SwapFile(full, 3 * 2**16)  # another job has taken what was there
        filler = fill(full)
        assert torch.equal(read(first, 0, 2**17), filled(2**17, 1)), "which it keeps"
        first.write(0, filled(2**17, 2))  # and writes: its space is its own
        del first
        filler.unlink()
        SwapFile(full, 3 * 2**16)
        assert os.listdir(full) == []
    with (
        mounted(tmp_path / "fixed", "ro") as fixed,
        pytest.raises(OffloadError, match=r"cannot create a file for offloaded state in .*: Read-only file"),
    ):
        check_folder(fixed)
