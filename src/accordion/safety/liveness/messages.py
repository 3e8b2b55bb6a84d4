"""The messages that ranks send each other over a hub, their own TCP connections: frozen dataclasses, one JSON line each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HubMessage:
    """Base of all messages. `rank`: the global rank that the message is about."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class HasEnded(HubMessage):
    """The program of `rank` ends. `text`: how, as the end of a sentence that begins with "rank R". `echo`: another rank is the
    cause. `closed`: the receiver made this message when the connection closed; `text` counts only if `rank` has sent no
    `HasEnded` itself."""

    text: str
    echo: bool = False
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class Post(HubMessage):
    """A `report` of `rank` about the model named `model`, in place of its last one; None: only withdraw that. Keys, each
    optional: `what` the rank does, the `ranks` it waits for, why it has `failed`, and facts for `wording.advice`."""

    model: str
    report: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class PositionQuestion(HubMessage):
    """`rank` asks all others what they do. `number`: counts the questions of `rank`; the answers repeat it."""

    number: int


@dataclass(frozen=True, kw_only=True)
class PositionAnswer(HubMessage):
    """The answer of `rank` to question `number` of rank `to`. `where`: text on what `rank` does."""

    number: int
    to: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Arrival(HubMessage):
    """`rank` joins the meeting `name` of `num` ranks. Texts are compared; if they differ, all ranks get them with the `facts`.
    `wakes`: ranks that wait in a collective join the meeting too. `quiet`: no `MeetingOver` follows if all texts are equal."""

    name: str
    num: int
    text: str
    facts: dict[str, Any] = field(default_factory=dict)
    wakes: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class MeetingCalled(HubMessage):
    """`rank` was the first to join the meeting `name`, which receivers that wait in a collective join too."""

    name: str


@dataclass(frozen=True, kw_only=True)
class MeetingOver(HubMessage):
    """All ranks have joined the meeting `name`. `reports`: (rank, text, facts) of each, or None if all texts are equal."""

    name: str
    reports: list[tuple[int, str, dict[str, Any]]] | None


@dataclass(frozen=True, kw_only=True)
class InputDigest(HubMessage):
    """The `digest` of the first inputs of the model named `model` on `rank`, sent to the first rank."""

    model: str
    digest: int


TYPES = {kind.__name__: kind for kind in HubMessage.__subclasses__()}


def encoded(message: HubMessage) -> bytes:
    """Return `message` as one line of JSON."""
    return json.dumps({"type": type(message).__name__, **vars(message)}).encode() + b"\n"


def decoded(line: bytes) -> HubMessage | None:
    """Return the message in `line`, which has no line break; None if `line` is no message, such as the output of a crash."""
    if not line.startswith(b'{"type"') or not line.endswith(b"}"):
        return None
    fields = json.loads(line)
    message: HubMessage = TYPES[fields.pop("type")](**fields)
    return message
