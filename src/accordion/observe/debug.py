"""A page of torch's debug server that shows where each rank is: its unit, phase, collective, and stack."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from accordion import _torch
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.unit import Unit
from accordion.errors import UsageError
from accordion.safety.divergence import monitor_of
from accordion.safety.liveness.hub import Position
from accordion.state import sharded_engine

NAME = "accordion"  # of the page, and of the request to each rank
_frontend = _torch.debug_frontend()
_observers = weakref.WeakSet["PlaceObserver"]()  # of this process's models


class RanksHandler(object if _frontend is None else _frontend.DebugHandler):  # type: ignore[misc]
    """Handler for `torch.distributed.debug.start_debug_server(handlers=[...])`: adds the page `/accordion` with the unit, phase,
    collective and stack of each rank, and the seconds since its unit changed.

    Create one on every rank: from then on, this process observes the sharded `model`. Nothing listens before torch's server is
    started. Raises `UsageError` before torch 2.13, without jinja2, or if `model` is not sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        if _frontend is None:
            raise UsageError(f"RanksHandler needs torch 2.13 or newer, and jinja2; this is torch {torch.__version__}.")
        engine = sharded_engine(model, "RanksHandler")
        observer = PlaceObserver(monitor_of(engine.context).position)
        engine.observers.attach(observer, first=True)  # others wait for ranks when a unit is entered
        _observers.add(observer)
        with suppress(ValueError):  # the name is taken, by the handler of another model
            _torch.answer_debug_server(NAME, place_of_rank)

    def routes(self) -> list[Any]:
        return [_frontend.Route(f"/{NAME}", self._page)]

    def nav_links(self) -> list[Any]:
        return [_frontend.NavLink(f"/{NAME}", "Units of ranks (Accordion)")]

    def _page(self, request: Any) -> Any:
        addrs, resps = _frontend.fetch_all(NAME, timeout=self.fetch_timeout)
        return request.frontend.render_template("json_resp.html", title="Units of ranks", addrs=addrs, resps=resps)


class PlaceObserver(Observer):
    """Observer that keeps the units whose forward this rank is in, or the unit that a backward reached last, and since when.
    `position`: phase and collective of this rank, which other code updates."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._moves()

    def _moves(self, *units: Unit) -> None:
        self._units, self._since_s = units, time.monotonic()  # the innermost unit last

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._moves()

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        self._moves(*self._units, unit)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        self._moves(*self._units[:-1])
        return out

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        self._moves(unit)

    def backward_ended(self, reduced: bool) -> None:
        self._moves()

    def as_values(self) -> dict[str, Any]:
        """Return JSON data: "unit": ["3 (layers.3)"], index and name of the innermost unit, or [] outside of all units;
        "phase": text; "collective": text, or None outside of collectives; "for_s": seconds since the unit changed."""
        return {
            "unit": [f"{unit.index} ({unit.name or 'root'})" for unit in self._units[-1:]],
            "phase": self._position.phase,
            "collective": self._position.doing,
            "for_s": round(time.monotonic() - self._since_s, 1),
        }


def place_of_rank() -> str:
    """Return JSON text: under "models" a list of dicts, `PlaceObserver.as_values`, with unit, phase and collective of each
    observed model; under "stack" a list of the frames, as text, of this rank's main thread, the outermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # torch's template escapes nothing, and a browser would take `<module>` for a tag.
    stack = [
        f"{f.filename}:{f.lineno} {f.name}".replace("<", "(").replace(">", ")") for f in traceback.extract_stack(frame)
    ]
    return json.dumps({"models": [observer.as_values() for observer in list(_observers)], "stack": stack})
