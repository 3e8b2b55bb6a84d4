"""Save and restore the random state of a process in a checkpoint."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist


class RandomState:
    """Object for `state=` of `save` and `load`: the random states of Python, numpy, torch and accelerator in this process.

    `load_state_dict` does nothing with the state of another rank, so that no two ranks draw the same numbers. If the number of
    ranks has changed, `load` passes the state of rank 0 to all, so only rank 0 restores it and the others keep theirs.
    """

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        state = {
            "rank": _rank(),
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
            "torch": torch.get_rng_state(),
        }
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            state["device"] = torch.get_device_module(device).get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        if state["rank"] != _rank():
            return
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None and "device" in state:
            torch.get_device_module(device).set_rng_state(state["device"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
