"""Stop strings over streamed text: hold back what might become one, cut at the first that is complete.

One pass over the text whatever the strings are; refuses to know tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ParamError


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopChecker:
    """Watches one stream; the stop that ends first wins, and the longest of those that end together."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include` keeps the stop string in the text."""
        self._automaton = _Automaton(_checked(stops))
        self._include = include
        self._state = 0
        self._held = _Held()
        self._stop: str | None = None

    def add(self, delta: str) -> Emitted:
        """What may be shown after `delta`; after a stop nothing more comes."""
        if self._stop is not None:
            return Emitted("", self._stop)
        waiting = self._held.chars
        self._held.push(delta)
        for i, char in enumerate(delta, start=1):
            self._state = self._automaton.next(self._state, char)
            if stop := self._automaton.ends[self._state]:
                self._stop = stop
                return Emitted(self._held.take(waiting + i - (0 if self._include else len(stop))), stop)
        return Emitted(self._held.take(self._held.chars - self._automaton.depth[self._state]))

    def finish(self) -> str:
        """The text still held back when the stream ends without a stop."""
        self._state = 0  # nothing waits any more
        return "" if self._stop is not None else self._held.take(self._held.chars)


class _Held:
    """Text that waits, taken from its front; every character is copied a bounded number of times."""

    def __init__(self) -> None:
        self.chars = 0
        self._chunks: deque[str] = deque()
        self._taken = 0  # characters of the first chunk that are gone

    def push(self, text: str) -> None:
        if text:
            self._chunks.append(text)
            self.chars += len(text)

    def take(self, chars: int) -> str:
        self.chars -= chars
        parts = []
        while chars:
            part = self._chunks[0][self._taken : self._taken + chars]
            parts.append(part)
            chars -= len(part)
            self._taken += len(part)
            if self._taken == len(self._chunks[0]):
                self._chunks.popleft()
                self._taken = 0
        return "".join(parts)


def _checked(stops: Sequence[str]) -> list[str]:
    if isinstance(stops, str):
        raise ParamError("stop", "must be a list of strings; write ['...'] for one")
    for stop in stops:
        if not isinstance(stop, str):
            raise ParamError("stop", f"must hold strings, not {type(stop).__name__}")
        if not stop:
            raise ParamError("stop", "an empty string would stop before the first character; leave it out")
    return list(stops)


class _Automaton:
    """Aho and Corasick's: each state is the longest end of the text that begins some stop string."""

    def __init__(self, words: Sequence[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.ends = [""]  # the longest word that ends at this state
        self.back = [0]  # the next shorter end of the text that begins a word
        for word in words:
            self._insert(word)
        self._link()

    def next(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time."""
        edges = self.edges
        while state and char not in edges[state]:
            state = self.back[state]
        return edges[state].get(char, 0)

    def _insert(self, word: str) -> None:
        state = 0
        for char in word:
            following = self.edges[state].get(char)
            if following is None:
                following = len(self.edges)
                self.edges[state][char] = following
                self.edges.append({})
                self.depth.append(self.depth[state] + 1)
                self.ends.append("")
                self.back.append(0)
            state = following
        self.ends[state] = word

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.edges[state].items():
                self.back[following] = self.next(self.back[state], char)
                self.ends[following] = self.ends[following] or self.ends[self.back[following]]
                queue.append(following)
