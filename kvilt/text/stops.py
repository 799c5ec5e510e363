"""Stop strings in streamed text: holds back what could become one, and cuts at the first complete one.

One pass over the text whatever the strings are; refuses to know tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

from ..errors import ParamError

_NONE = -1


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopStrings:
    """The stop strings of a request, compiled once: a trie with back links (Aho and Corasick) in flat arrays.

    Immutable, so every prompt and sample of a request shares it. A state is the longest end of the text that begins
    some stop string. It takes 16 bytes for each character of the strings.
    """

    __slots__ = ("__weakref__", "_back", "_branches", "_end", "_label", "depth", "words")

    def __init__(self, stops: Sequence[str]) -> None:
        self.words = tuple(_checked(stops))
        self._label = array("i", [_NONE])  # leads here from the state before, if that is its parent
        self._branches: dict[tuple[int, str], int] = {}  # every other edge: at most one for each word
        self.depth = array("i", [0])
        self._back = array("i", [0])  # the next shorter end of the text that begins a word
        self._end = array("i", [_NONE])  # the longest word that ends at this state
        for index, word in enumerate(self.words):
            self._insert(index, word)
        self._link()

    def next(self, state: int, char: str) -> int:
        """The state after one more character; amortised constant time."""
        while True:
            following = self._child(state, char)
            if following or not state:
                return following
            state = self._back[state]

    def ended(self, state: int) -> str | None:
        """The longest stop string that is complete at this state."""
        word = self._end[state]
        return None if word == _NONE else self.words[word]

    def _child(self, state: int, char: str) -> int:
        """The state one character deeper, or 0."""
        following = state + 1
        if following < len(self._label) and self._label[following] == ord(char):
            return following
        return self._branches.get((state, char), 0)

    def _insert(self, index: int, word: str) -> None:
        state = 0
        for char in word:
            state = self._child(state, char) or self._grow(state, char)
        self._end[state] = index

    def _grow(self, state: int, char: str) -> int:
        following = len(self._label)
        self._label.append(ord(char) if following == state + 1 else _NONE)
        if following != state + 1:
            self._branches[state, char] = following
        self.depth.append(self.depth[state] + 1)
        self._back.append(0)
        self._end.append(_NONE)
        return following

    def _link(self) -> None:
        """Find every state's back link, shallow states first."""
        parents = array("i", range(-1, len(self._label) - 1))
        chars = array("i", self._label)
        for (state, char), following in self._branches.items():
            parents[following], chars[following] = state, ord(char)
        for state in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            parent = parents[state]
            if parent:
                self._back[state] = self.next(self._back[parent], chr(chars[state]))
            if self._end[state] == _NONE:
                self._end[state] = self._end[self._back[state]]


class StopChecker:
    """Watches one stream; the stop that ends first wins, and the longest of those that end together."""

    __slots__ = ("_held", "_include", "_state", "_stop", "_stops")

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        """`include` keeps the stop string in the text."""
        self._stops = stops
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
            self._state = self._stops.next(self._state, char)
            if stop := self._stops.ended(self._state):
                self._stop = stop
                return Emitted(self._held.take(waiting + i - (0 if self._include else len(stop))), stop)
        return Emitted(self._held.take(self._held.chars - self._stops.depth[self._state]))

    def finish(self) -> str:
        """The text still held back when the stream ends without a stop."""
        self._state = 0  # nothing waits any more
        return "" if self._stop is not None else self._held.take(self._held.chars)


class StopCache:
    """Compiled stop strings that are in use, so that the prompts of one request find the same ones."""

    def __init__(self) -> None:
        self._compiled: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()
        self._lock = Lock()

    def of(self, stops: Sequence[str]) -> StopStrings | None:
        """These stop strings, compiled; None where there are none."""
        if not stops:
            return None
        key = tuple(stops)
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                found = self._compiled[key] = StopStrings(key)
            return found


class _Held:
    """Text that waits, taken from its front; every character is copied a bounded number of times."""

    __slots__ = ("_chunks", "_taken", "chars")

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
