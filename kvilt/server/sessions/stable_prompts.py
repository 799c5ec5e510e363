"""System prompts of sessions: which of their lines change between requests, and prompts in which these stand late.

A line counts as volatile once it was seen to change: its neighbours stayed, and it kept its beginning or its end.
Refuses to know tokens and KV.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SESSIONS = 1024  # of all callers together; the least recently used are forgotten first
MAX_SHAPES = 16  # of a session
MAX_LINES = 2048  # of a system prompt that are compared
_LEAST = 4  # characters that a line must keep to be known again
_log = logging.getLogger(__name__)
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineShape:
    """What a volatile line keeps: its beginning and its end."""

    prefix: str
    suffix: str

    def fits(self, line: str) -> bool:
        long = len(line) >= len(self.prefix) + len(self.suffix)
        return long and line.startswith(self.prefix) and line.endswith(self.suffix)


@dataclass(slots=True)
class _SystemPrompt:
    """The system prompt of a session as it was last sent."""

    lines: list[str] = field(default_factory=list)
    shapes: dict[LineShape, str] = field(default_factory=dict)  # volatile lines, as they were last
    warned: bool = False


class StablePrompts:
    """The system prompts of all sessions. May be called from any thread."""

    def __init__(self, moves: bool = False) -> None:
        """With `moves`, volatile lines are moved behind the stable text; otherwise they are named only."""
        self._moves = moves
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], _SystemPrompt] = OrderedDict()

    def arranged(
        self,
        tenant: str,
        session: str,
        messages: list[Message],
        renders: Callable[[list[Message]], bool],
    ) -> list[Message]:
        """The messages of a request, perhaps with volatile lines of the system prompt behind the rest.

        `renders` says whether the template takes these messages.
        """
        if not messages or messages[0].get("role") != "system" or not isinstance(messages[0].get("content"), str):
            return messages
        lines = str(messages[0]["content"]).split("\n")
        shapes = self._noted(tenant, session, lines)
        if not self._moves or not shapes:
            return messages
        return _moved(messages, lines, shapes, renders)

    def volatile(self, tenant: str, session: str) -> list[str]:
        """The volatile lines of a session, as they were last."""
        with self._lock:
            known = self._known.get((tenant, session))
            return [] if known is None else list(known.shapes.values())

    def _noted(self, tenant: str, session: str, lines: list[str]) -> tuple[LineShape, ...]:
        """Compare with the last request of the session; what is volatile by now."""
        with self._lock:
            known = self._known.setdefault((tenant, session), _SystemPrompt())
            self._known.move_to_end((tenant, session))
            while len(self._known) > MAX_SESSIONS:
                self._known.popitem(last=False)
            for shape, line in changed_lines(known.lines, lines):
                if shape in known.shapes or len(known.shapes) < MAX_SHAPES:
                    known.shapes[shape] = line
            known.lines = lines[:MAX_LINES]
            if known.shapes and not known.warned:
                known.warned = True
                what = "are moved behind the rest" if self._moves else "cost the KV behind them; see --stable-prompts"
                _log.warning("%d lines of a session's system prompt change and %s", len(known.shapes), what)
            return tuple(known.shapes)


def changed_lines(old: Sequence[str], new: Sequence[str]) -> list[tuple[LineShape, str]]:
    """Lines that changed in place between two texts, with what they kept."""
    if not old or len(old) > MAX_LINES or len(new) > MAX_LINES or old == new:
        return []
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "replace" and b - a == d - c:
            pairs = zip(old[a:b], new[c:d], strict=True)
            found += [(shape, line) for was, line in pairs if (shape := _shape(was, line)) is not None]
    return found


def _shape(was: str, now: str) -> LineShape | None:
    prefix = was[: _common(was, now)]
    suffix = was[len(was) - _common(was[len(prefix) :][::-1], now[len(prefix) :][::-1]) :]
    return LineShape(prefix, suffix) if len(prefix) + len(suffix) >= _LEAST else None


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _moved(
    messages: list[Message], lines: list[str], shapes: Sequence[LineShape], renders: Callable[[list[Message]], bool]
) -> list[Message]:
    """Volatile lines as a system message before the last user's, else at the end of the system prompt."""
    late = [line for line in lines if any(shape.fits(line) for shape in shapes)]
    if not late:
        return messages
    stable = [line for line in lines if line not in late]
    first = {**messages[0], "content": "\n".join(stable)}
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if users and stable:
        last = users[-1]
        asked = [first, *messages[1:last], {"role": "system", "content": "\n".join(late)}, *messages[last:]]
        if renders(asked):
            return asked
    return [{**messages[0], "content": "\n".join([*stable, *late])}, *messages[1:]]
