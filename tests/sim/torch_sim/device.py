"""The device's Python interface: the module `torch.sim`, like `torch.cuda`, and the process groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def index_of(device: Any = None) -> int:
    """Return the index of `device`, which is a device, a string or a number; None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device("sim", index_of(device)), priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Record an event as CUDA does, also of this device's own class, which torch's method refuses."""
        if event is None:
            return super().record_event()
        event.record(self)
        return event


class Event(torch.Event):
    def __new__(
        cls, device: Any = None, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        place = torch.device("sim", index_of(device))
        return super().__new__(cls, place, enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context manager that makes a stream the current one; None changes nothing."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def as_current(device: Any) -> torch.accelerator.device_index:
    """Return a context manager that makes a device the current one; None and negative numbers change nothing."""
    index = -1 if device is None else index_of(device)
    return torch.accelerator.device_index(index if index >= 0 else None)


def module(extension: Any) -> ModuleType:
    """Return `torch.sim`: the names of `torch.cuda` that libraries use, and those that only a simulator has."""
    sim = ModuleType("torch.sim")
    for part in (_devices(extension), _streams(), _random(extension), _memory(extension), _simulator(extension)):
        vars(sim).update(part)
    sim.memory = sim  # type: ignore[attr-defined]
    return sim


def _devices(extension: Any) -> dict[str, Any]:
    acc = torch.accelerator
    properties = {"name": "sim", "major": 9, "minor": 0, "multi_processor_count": 1}
    return {
        "is_available": lambda: extension.device_count() > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_initialized": True,  # else torch.utils.checkpoint keeps no state of its random numbers
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: extension.device_count(),
        "current_device": acc.current_device_index,
        "set_device": lambda device: acc.set_device_index(index_of(device)),
        "device": as_current,
        "get_device_name": lambda device=None: "sim",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            total_memory=acc.get_memory_info(index_of(device))[1], **properties
        ),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }


def _streams() -> dict[str, Any]:
    acc = torch.accelerator
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "StreamContext": on_stream,
        "set_stream": acc.set_stream,
        "current_stream": lambda device=None: acc.current_stream(index_of(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=index_of(device), device_type=20),
        "synchronize": lambda device=None: acc.synchronize(index_of(device)),
    }


def _random(extension: Any) -> dict[str, Any]:
    everywhere = tuple(extension.default_generator(i) for i in range(extension.device_count()))

    def generator(device: Any = None) -> torch.Generator:
        return everywhere[index_of(device)]

    def manual_seed_all(seed: int) -> None:
        for one in everywhere:
            one.manual_seed(int(seed))

    return {
        "get_rng_state": lambda device="sim": generator(device).get_state(),
        "set_rng_state": lambda state, device="sim": generator(device).set_state(state),
        "manual_seed": lambda seed: generator().manual_seed(int(seed)),
        "manual_seed_all": manual_seed_all,
        "default_generators": everywhere,
    }


def _memory(extension: Any) -> dict[str, Any]:
    memory = torch.accelerator.memory

    def stat(key: str) -> Callable[[Any], int]:
        return lambda device=None: memory.memory_stats(index_of(device)).get(key, 0)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(index_of(device))

    runtime = SimpleNamespace(  # the used part of `torch.cuda.cudart()`
        cudaHostRegister=lambda at, size, flags=0: extension.pin(at, size),
        cudaHostUnregister=lambda at: extension.unpin(at),
        cudaGetErrorString=lambda code: f"sim error {code}",
        cudaMemGetInfo=mem_get_info,
    )
    return {
        "memory_allocated": stat("allocated_bytes.all.current"),
        "max_memory_allocated": stat("allocated_bytes.all.peak"),
        "memory_reserved": stat("reserved_bytes.all.current"),
        "max_memory_reserved": stat("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak_memory_stats(index_of(device)),
        "memory_stats": lambda device=None: memory.memory_stats(index_of(device)),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: extension.empty_cache(),
        "cudart": lambda: runtime,
    }


def _simulator(extension: Any) -> dict[str, Any]:
    """Return the functions that no other device has, which README.md lists."""
    return {
        "_sleep": lambda cycles: extension.sleep(int(cycles) // 1000),  # at 1 GHz, as `torch.cuda._sleep`
        "num_waits": lambda: extension.num_waits(),
        "tell_waits": lambda listener: extension.tell_waits(listener),
        "trace": lambda on: extension.trace(on),
        "clear_error": lambda: extension.clear_error(),
    }


def process_group(extension: Any) -> Callable[..., Any]:
    """Return the function that creates the group of `init_process_group("cpu:gloo,sim:simccl")`: gloo on device streams."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        from torch.distributed import ProcessGroupGloo

        gloo = ProcessGroupGloo(store, rank, size, timeout=timeout)
        name = os.environ.get("SIM_CCL_NAME", "nccl")  # libraries look for it, and treat the group as NCCL's
        return extension.Ccl(gloo, name, rank, size, int(timeout.total_seconds() * 1000))

    return make
