"""The pieces of a parsed answer: content, reasoning and tool calls.

Also the protocol between the bodies of calls and their reader. Refuses to know formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a known tool begins; indices count the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: the fragments of an index join to the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over; not `whole` where its arguments broke off or went wrong after they had begun."""

    index: int
    whole: bool = True


Piece = Content | Reasoning | CallStart | CallArguments | CallEnd


class BodyStep(Enum):
    """The result of feeding one character to a call body."""

    MORE = "took it and wants more"
    DONE = "took it and is complete"
    BEFORE = "was complete before it and did not take it"
    FAILED = "is no call, or no longer one, and did not take it"


class CallSink(Protocol):
    """Receives the calls of a body; text since the last accepted call is given back if the body fails."""

    def parameters(self, name: str) -> Mapping[str, str] | None:
        """A tool's parameters in order, with the types they are declared to have; None if there is no such tool."""

    def start(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...

    def settle(self) -> None:
        """Drop the text since the last call: it was layout, so it is never given back as content."""


class CallBody(Protocol):
    """Reads what stands inside a call's markers, one character at a time."""

    def step(self, char: str) -> BodyStep: ...


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind (and one call) joined."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _joins(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_joined(run) for run in runs]


def _joins(left: Piece, right: Piece) -> bool:
    match left, right:
        case (Content(), Content()) | (Reasoning(), Reasoning()):
            return True
        case CallArguments(a, _), CallArguments(b, _):
            return a == b
        case _:
            return False


def _joined(run: list[Piece]) -> Piece:
    text = "".join(piece.text for piece in run if isinstance(piece, Content | Reasoning | CallArguments))
    match run[0]:
        case Content():
            return Content(text)
        case Reasoning():
            return Reasoning(text)
        case CallArguments(index, _):
            return CallArguments(index, text)
        case other:
            return other
