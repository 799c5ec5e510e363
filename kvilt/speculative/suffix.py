"""Where the end of a growing text stood before: a suffix automaton that takes one token at a time.

Constant time a token on average, linear memory. Refuses to know what the tokens are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

_NONE = -1


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The last `length` tokens of a text also end at place `end`, and no more of them end anywhere earlier."""

    length: int
    end: int


class SuffixIndex:
    """A text, and of its end the longest part that it had before.

    States are numbers into flat arrays. Nearly all have one way on, which stands inline; dicts are for the few that
    branch.
    """

    __slots__ = ("_ends", "_last", "_lengths", "_links", "_more", "_nexts", "_tokens", "match", "text")

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.match = SuffixMatch(0, _NONE)
        self._lengths = array("i", [0])  # the longest string of each state
        self._links = array("i", [_NONE])  # the state of the longest suffix that also ends elsewhere
        self._ends = array("i", [_NONE])  # a place where the state's strings end, not that of the text itself
        self._tokens = array("i", [_NONE])  # the first way on: by this token
        self._nexts = array("i", [_NONE])  # to this state
        self._more: dict[int, dict[int, int]] = {}  # further ways
        self._last = 0
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        """One more token; `match` then tells of the new end."""
        links, place = self._links, len(self.text)
        self.text.append(token)
        new, at = self._state(self._lengths[self._last] + 1, place), self._last
        while at != _NONE and (found := self._next(at, token)) == _NONE:
            self._set(at, token, new)
            at = links[at]
        if at == _NONE:
            links[new] = 0
        elif self._lengths[at] + 1 == self._lengths[found]:
            links[new] = found
        else:
            links[new] = self._split(at, token, found)
        self._last = new
        self._note(links[new], place)

    def _note(self, state: int, place: int) -> None:
        """The longest suffix that was there before: where it stood last, as far as that is known."""
        self.match = SuffixMatch(self._lengths[state], self._ends[state])
        if state:
            self._ends[state] = place

    def _split(self, at: int, token: int, found: int) -> int:
        """The shorter strings of a state become one of their own, since they end in a place where the longer do not."""
        short = self._state(self._lengths[at] + 1, self._ends[found])
        self._tokens[short], self._nexts[short] = self._tokens[found], self._nexts[found]
        if (ways := self._more.get(found)) is not None:
            self._more[short] = dict(ways)
        self._links[short] = self._links[found]
        self._links[found] = short
        while at != _NONE and self._next(at, token) == found:
            self._set(at, token, short)
            at = self._links[at]
        return short

    def _state(self, length: int, end: int) -> int:
        self._lengths.append(length)
        self._ends.append(end)
        self._links.append(_NONE)
        self._tokens.append(_NONE)
        self._nexts.append(_NONE)
        return len(self._lengths) - 1

    def _next(self, state: int, token: int) -> int:
        if self._tokens[state] == token:
            return self._nexts[state]
        ways = self._more.get(state)
        return _NONE if ways is None else ways.get(token, _NONE)

    def _set(self, state: int, token: int, to: int) -> None:
        if self._tokens[state] in (_NONE, token):
            self._tokens[state], self._nexts[state] = token, to
        else:
            self._more.setdefault(state, {})[token] = to

    def continuation(self, count: int) -> list[int]:
        """What followed the match, `count` tokens of it; where the text ends, what was taken goes on itself."""
        text, start = self.text, self.match.end + 1
        if start + count <= len(text):
            return text[start : start + count]
        period = len(text) - start
        return [text[start + i % period] for i in range(count)]
