"""Patterns for module names, as PEFT's configurations hold them, matched in time that grows with name times pattern.

A subset of regular expressions: characters, `.`, escaped signs, `\\d`, `\\w`, classes such as `[a-z0-9]`, groups, `|`,
and `*`, `+` and `?` after any of them; `^` at the beginning and `$` at the end. Within it a pattern means what `re`
takes it for. Anything else is refused by name. No pattern backtracks: all its ways are followed at once.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import Unsupported

MAX_PATTERN_CHARS = 256
MAX_VISITS = 100_000  # of states, for one name

_PLAIN = frozenset(string.ascii_letters + string.digits + "_-/:@=,")
_MEMBERS = frozenset(string.ascii_letters + string.digits + "_.")
_SIGNS = frozenset(string.punctuation)
_REPEATS = frozenset("*+?")
Test = Callable[[str], bool]


@dataclass(slots=True)
class _State:
    """A place in a pattern: one character that passes the test leads on; without a test all `following` are reached."""

    test: Test | None = None
    following: list[int] = field(default_factory=list)
    begins: bool = False  # only the beginning of a name is such a place


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a pattern, between two of its states."""

    start: int
    end: int


class ModulePattern:
    """One pattern, compiled. It matches a name where `re.match(rf"(.*\\.)?({pattern})$", name)` does."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise Unsupported(f"a pattern of {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are supported")
        parser = _Parser(pattern)
        self._whole = parser.parse()
        self._states = parser.states

    def matches(self, name: str, visits: MatchBudget | None = None) -> bool:
        """Whether a name, or its end after a dot, fits the pattern."""
        visits = visits or MatchBudget()
        states = self._states
        first_line, _, _ = name.partition("\n")  # what stands before the pattern lies in it
        active: set[int] = set()
        for at in range(len(name) + 1):
            if not at or (at <= len(first_line) and name[at - 1] == "."):
                self._enter(active, [self._whole.start], at, visits)
            if self._whole.end in active and name[at:] in ("", "\n"):
                return True
            if at == len(name):
                break
            passed = [states[i].following for i in active if (test := states[i].test) is not None and test(name[at])]
            active = set()
            self._enter(active, [i for following in passed for i in following], at + 1, visits)
        return False

    def _enter(self, active: set[int], waiting: list[int], at: int, visits: MatchBudget) -> None:
        """Add states, and those that are reached from them without a character."""
        while waiting:
            index = waiting.pop()
            state = self._states[index]
            if index in active or (state.begins and at):
                continue
            visits.take()
            active.add(index)
            if state.test is None:
                waiting += state.following


class MatchBudget:
    """The visits of states that the patterns of an adapter may take for one name."""

    __slots__ = ("left",)

    def __init__(self, left: int = MAX_VISITS) -> None:
        self.left = left

    def take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unsupported(f"patterns that take more than {MAX_VISITS} steps for the name of one module")


class _Parser:
    """Reads a pattern from left to right into states."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self.states: list[_State] = []

    def parse(self) -> _Part:
        whole = self._alternation()
        if self._at < len(self._pattern):
            self._refuse()
        return whole

    def _refuse(self) -> NoReturn:
        where = self._pattern[self._at : self._at + 8]
        found = f"{where!r} at character {self._at}" if where else "an end that is missing"
        raise Unsupported(f"the pattern {self._pattern[:64]!r} holds {found}, which kvilt does not match")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _state(self, test: Test | None = None, following: Iterable[int] = (), *, begins: bool = False) -> int:
        self.states.append(_State(test, list(following), begins))
        return len(self.states) - 1

    def _alternation(self) -> _Part:
        ways = [self._sequence()]
        while self._take("|"):
            ways.append(self._sequence())
        if len(ways) == 1:
            return ways[0]
        end = self._state()
        for way in ways:
            self.states[way.end].following.append(end)
        return _Part(self._state(following=[way.start for way in ways]), end)

    def _sequence(self) -> _Part:
        start = end = self._state(begins=self._at == 0 and self._take("^"))
        while self._peek() not in ("", "|", ")"):
            if self._pattern[self._at :] == "$":
                self._at += 1  # the end of the name is asked for anyway
                break
            part = self._repeated(self._atom())
            self.states[end].following.append(part.start)
            end = part.end
        return _Part(start, end)

    def _repeated(self, part: _Part) -> _Part:
        sign = self._peek()
        if sign not in _REPEATS:
            return part
        self._at += 1
        if self._peek() in _REPEATS:
            self._refuse()  # lazy and possessive
        end = self._state()
        self.states[part.end].following += [end, part.start] if sign in "*+" else [end]
        return _Part(self._state(following=[part.start] if sign == "+" else [part.start, end]), end)

    def _atom(self) -> _Part:
        if self._take("("):
            self._take("?:")
            inner = self._alternation()
            if not self._take(")"):
                self._refuse()
            return inner
        test = self._class() if self._peek() == "[" else self._single()
        end = self._state()
        return _Part(self._state(test, [end]), end)

    def _single(self) -> Test:
        char = self._peek()
        if char == "\\":
            return self._escaped()
        if char != "." and char not in _PLAIN:
            self._refuse()
        self._at += 1
        return (lambda one: one != "\n") if char == "." else char.__eq__

    def _escaped(self) -> Test:
        char = self._pattern[self._at + 1 : self._at + 2]
        if char not in ("d", "w") and (not char or char not in _SIGNS):
            self._refuse()
        self._at += 2
        if char == "d":
            return str.isdecimal
        return (lambda one: one.isalnum() or one == "_") if char == "w" else char.__eq__

    def _class(self) -> Test:
        self._at += 1
        negated = self._take("^")
        tests = [self._member()]
        while not self._take("]"):
            tests.append(self._member())
        return lambda one: any(test(one) for test in tests) != negated

    def _member(self) -> Test:
        first = self._peek()
        if first == "\\":
            return self._escaped()
        if not first or first not in _MEMBERS:
            self._refuse()
        if self._pattern[self._at + 1 : self._at + 2] != "-":
            self._at += 1
            return first.__eq__
        last = self._pattern[self._at + 2 : self._at + 3]
        if not (first.isalnum() and last.isalnum() and last in _MEMBERS and first <= last):
            self._refuse()
        self._at += 3
        return lambda one: first <= one <= last
