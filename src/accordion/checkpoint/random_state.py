"""The random state of a process, to be kept in a checkpoint beside the model."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist


class RandomState:
    """Python's, numpy's and torch's generators of this process, and its accelerator's; pass it in `state` to save and load.

    Another rank's state is not taken: where the number of ranks changed, ranks that had none keep the one they have, so
    that no two of them draw the same.
    """

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
        found = {
            "rank": _rank(),
            "python": random.getstate(),
            "numpy": (str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
            "torch": torch.get_rng_state(),
        }
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            found["device"] = torch.get_device_module(device).get_rng_state()
        return found

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
