"""Languages of patterns: their intersections and complements, decided by derivatives, written as a pattern again.

The grammar library has neither lookaround nor negation in a pattern. Refuses to know schemas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .pattern_source import Chain, Chars, Either, Node, Range, Repeat, complement

MAX_STATES = 600
MAX_WORK = 1_000_000  # parts of languages that are looked at
MAX_MERGED = 150  # states of an automaton that is made minimal
MAX_ATOMS = 8000  # characters of what is written
_LAST = 0x10FFFF
_SURROGATES: Range = (0xD800, 0xDFFF)


class Undecided(Exception):
    """The language has a character class without known ranges, or more states than are worth it."""


UNDECIDED = (Undecided, RecursionError)  # a pattern of thousands of parts in a row is nested as deep


@dataclass(frozen=True, slots=True)
class Letter:
    """One character of these ranges."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """One language after the other."""

    first: Language
    second: Language


@dataclass(frozen=True, slots=True)
class Union:
    """What is in any of them; with none, no text at all."""

    options: frozenset[Language]


@dataclass(frozen=True, slots=True)
class Intersection:
    """What is in all of them."""

    parts: frozenset[Language]


@dataclass(frozen=True, slots=True)
class Complement:
    """What is not in it."""

    inner: Language


@dataclass(frozen=True, slots=True)
class Loop:
    """A language several times; `most` is None where there is no limit."""

    inner: Language
    least: int
    most: int | None


Language = Letter | Concat | Union | Intersection | Complement | Loop
NOTHING = Union(frozenset())
ANY_TEXT = Complement(NOTHING)
EMPTY = Loop(NOTHING, 0, 0)  # the empty text alone


def concat(*parts: Language) -> Language:
    """Languages one after the other."""
    result: Language = EMPTY
    for part in reversed(parts):
        if NOTHING in (part, result):
            return NOTHING
        if part == EMPTY:
            continue
        if result == EMPTY:
            result = part
        elif isinstance(part, Concat):
            result = concat(part.first, concat(part.second, result))
        else:
            result = Concat(part, result)
    return result


def union(*options: Language) -> Language:
    """What is in any of them."""
    found: set[Language] = set()
    for option in options:
        found |= option.options if isinstance(option, Union) else {option}
    if ANY_TEXT in found:
        return ANY_TEXT
    return next(iter(found)) if len(found) == 1 else Union(frozenset(found))


def intersection(*parts: Language) -> Language:
    """What is in all of them."""
    found: set[Language] = set()
    for part in parts:
        found |= part.parts if isinstance(part, Intersection) else {part}
    found.discard(ANY_TEXT)
    if NOTHING in found:
        return NOTHING
    return next(iter(found)) if len(found) == 1 else Intersection(frozenset(found)) if found else ANY_TEXT


def other(inner: Language) -> Language:
    """What is not in it."""
    return inner.inner if isinstance(inner, Complement) else Complement(inner)


def loop(inner: Language, least: int, most: int | None) -> Language:
    """A language so many times."""
    if most == 0 or inner in (NOTHING, EMPTY):
        return NOTHING if least and inner == NOTHING else EMPTY
    return inner if (least, most) == (1, 1) else Loop(inner, least, most)


def language(node: Node) -> Language:
    """The language of a pattern without anchors and lookaround, from its first character to its last."""
    match node:
        case Chars(ranges, properties, negated, barred):
            if properties:
                raise Undecided
            own = complement(ranges) if negated else ranges
            return Letter(complement((*complement(own), *barred)))
        case Repeat(inner, least, most):
            return loop(language(inner), least, most)
        case Chain(parts):
            return concat(*map(language, parts))
        case Either(options):
            return union(*map(language, options))
        case _:
            raise Undecided


def as_node(wanted: Language, barred: Sequence[Range]) -> Node | None:
    """A pattern for a language over all characters but the barred; None where no text is in it."""
    found = _automaton(wanted, barred)
    return _written(_minimal(found) if len(found.steps) <= MAX_MERGED else found)


def contains(wanted: Language, text: str) -> bool:
    """Whether a text is in a language."""
    derivatives, left = Derivatives(), wanted
    for char in text:
        left = derivatives.of(left, ord(char))
    return _accepts_empty(left)


# By derivatives: the language of what may follow a character.


def _accepts_empty(node: Language) -> bool:
    match node:
        case Letter():
            return False
        case Concat(first, second):
            return _accepts_empty(first) and _accepts_empty(second)
        case Union(options):
            return any(map(_accepts_empty, options))
        case Intersection(parts):
            return all(map(_accepts_empty, parts))
        case Complement(inner):
            return not _accepts_empty(inner)
        case Loop(inner, least):
            return least == 0 or _accepts_empty(inner)


class Derivatives:
    """The languages of what may follow a character; the work is bounded."""

    def __init__(self) -> None:
        self._known: dict[tuple[Language, int], Language] = {}
        self._sizes: dict[int, tuple[Language, int]] = {}  # by id; the language is held so that no other gets the id
        self._left = MAX_WORK

    def of(self, node: Language, code: int) -> Language:
        """What may follow this character in a language."""
        self._left -= self._size(node)  # looking it up takes as long
        if self._left < 0:
            raise Undecided
        found = self._known.get((node, code))
        if found is None:
            found = self._known[node, code] = self._derive(node, code)
        return found

    def _size(self, node: Language) -> int:
        known = self._sizes.get(id(node))
        if known is None:
            inner = sum(map(self._size, _inner(node)))
            known = self._sizes[id(node)] = (node, 1 + inner)
        return known[1]

    def _derive(self, node: Language, code: int) -> Language:
        match node:
            case Letter(ranges):
                return EMPTY if any(low <= code <= high for low, high in ranges) else NOTHING
            case Concat(first, second):
                after = concat(self.of(first, code), second)
                return union(after, self.of(second, code)) if _accepts_empty(first) else after
            case Union(options):
                return union(*(self.of(option, code) for option in options))
            case Intersection(parts):
                return intersection(*(self.of(part, code) for part in parts))
            case Complement(inner):
                return other(self.of(inner, code))
            case Loop(inner, least, most):
                # An inner language with the empty text needs no least number: the others may all be empty.
                left = 0 if _accepts_empty(inner) else max(0, least - 1)
                return concat(self.of(inner, code), loop(inner, left, None if most is None else most - 1))


def _inner(node: Language) -> Iterable[Language]:
    match node:
        case Letter():
            return ()
        case Concat(first, second):
            return (first, second)
        case Union(parts) | Intersection(parts):
            return parts
        case Complement(inner) | Loop(inner):
            return (inner,)


def _letters(node: Language) -> set[tuple[Range, ...]]:
    return {node.ranges} if isinstance(node, Letter) else set().union(*map(_letters, _inner(node)))


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton that begins in state 0: for each state the ranges that lead to others."""

    steps: tuple[Mapping[int, tuple[Range, ...]], ...]
    accepting: frozenset[int]


def _automaton(wanted: Language, barred: Sequence[Range]) -> Automaton:
    pieces = _pieces(wanted, (*barred, _SURROGATES))
    derivatives, states = Derivatives(), {wanted: 0}
    steps: list[dict[int, tuple[Range, ...]]] = []
    for state in (pending := [wanted]):
        found: dict[int, tuple[Range, ...]] = {}
        for low, high in pieces:
            following = derivatives.of(state, low)
            if following not in states:
                if len(states) >= MAX_STATES:
                    raise Undecided
                states[following] = len(states)
                pending.append(following)
            found[states[following]] = _joined(found.get(states[following], ()), (low, high))
        steps.append(found)
    return Automaton(tuple(steps), frozenset(i for node, i in states.items() if _accepts_empty(node)))


def _pieces(wanted: Language, barred: Sequence[Range]) -> list[Range]:
    """Ranges of characters that no part of the language tells apart."""
    cuts = {0, _LAST + 1}
    for ranges in (*_letters(wanted), tuple(barred)):
        for low, high in ranges:
            cuts |= {low, high + 1}
    ordered = sorted(cuts)
    pieces = [(low, high - 1) for low, high in itertools.pairwise(ordered)]
    return [(low, high) for low, high in pieces if not any(first <= low <= last for first, last in barred)]


def _joined(ranges: tuple[Range, ...], more: Range) -> tuple[Range, ...]:
    if ranges and ranges[-1][1] + 1 == more[0]:
        return (*ranges[:-1], (ranges[-1][0], more[1]))
    return (*ranges, more)


def _minimal(automaton: Automaton) -> Automaton:
    """The same language with the fewest states: those that differ in nothing are one."""
    steps, blocks = automaton.steps, [int(i in automaton.accepting) for i in range(len(automaton.steps))]
    while True:
        looks = [(blocks[i], tuple(sorted(_by_block(step, blocks).items()))) for i, step in enumerate(steps)]
        numbers: dict[object, int] = {}
        refined = [numbers.setdefault(look, len(numbers)) for look in looks]
        if len(set(refined)) == len(set(blocks)):
            break
        blocks = refined
    firsts = {block: i for i, block in reversed(list(enumerate(refined)))}
    merged = tuple(_by_block(steps[firsts[block]], refined) for block in range(len(firsts)))
    return Automaton(merged, frozenset(refined[i] for i in automaton.accepting))


def _by_block(step: Mapping[int, tuple[Range, ...]], blocks: Sequence[int]) -> dict[int, tuple[Range, ...]]:
    found: dict[int, list[Range]] = {}
    for target, ranges in step.items():
        found.setdefault(blocks[target], []).extend(ranges)
    return {block: functools.reduce(_joined, sorted(ranges), ()) for block, ranges in found.items()}


# A pattern again, state by state: what leads through a state is written on the edges around it.


@dataclass(slots=True)
class _Edges:
    """The patterns between states, with their lengths, from each state and to each state."""

    out: dict[int, dict[int, tuple[Node, int]]] = field(default_factory=dict)
    into: dict[int, dict[int, tuple[Node, int]]] = field(default_factory=dict)
    atoms: int = 0

    def put(self, first: int, last: int, node: Node) -> None:
        """Add a way from a state to another."""
        known = self.out.setdefault(first, {}).get(last)
        edge = (node, _atoms(node)) if known is None else (_either(known[0], node), known[1] + _atoms(node))
        self.atoms += edge[1] - (0 if known is None else known[1])
        self.out[first][last] = self.into.setdefault(last, {})[first] = edge

    def weight(self, state: int) -> int:
        """How long the ways through a state become without it."""
        into, out = self.into.get(state, {}), self.out.get(state, {})
        own = out[state][1] if state in out else 0
        before = sum(size for first, (_, size) in into.items() if first != state)
        after = sum(size for last, (_, size) in out.items() if last != state)
        ways = (len(into) - (state in into)) * (len(out) - (state in out))
        return before * len(out) + after * len(into) + own * ways

    def remove(self, state: int) -> None:
        """Write what leads through a state on the edges around it."""
        into, out = self.into.pop(state, {}), self.out.pop(state, {})
        own = out.pop(state, None)
        into.pop(state, None)
        for first, (_, size) in into.items():
            del self.out[first][state]
            self.atoms -= size
        for last, (_, size) in out.items():
            del self.into[last][state]
            self.atoms -= size
        self.atoms -= 0 if own is None else own[1]
        around: tuple[Node, ...] = () if own is None else (Repeat(own[0], 0, None),)
        for first, (before, _) in into.items():
            for last, (after, _) in out.items():
                self.put(first, last, _chain(before, *around, after))


def _written(automaton: Automaton) -> Node | None:
    begin, end = -1, -2
    edges = _Edges()
    edges.put(begin, 0, Chain(()))
    for state, step in enumerate(automaton.steps):
        for target, ranges in step.items():
            edges.put(state, target, Chars(ranges))
        if state in automaton.accepting:
            edges.put(state, end, Chain(()))
    weights = {state: edges.weight(state) for state in range(len(automaton.steps))}
    while weights:
        state = min(weights, key=lambda one: (weights[one], one))
        around = {*edges.into.get(state, ()), *edges.out.get(state, ())} & weights.keys() - {state}
        del weights[state]
        edges.remove(state)
        weights |= {one: edges.weight(one) for one in around}
        if edges.atoms > MAX_ATOMS:
            raise Undecided
    found = edges.out.get(begin, {}).get(end)
    return None if found is None else found[0]


def _chain(*parts: Node) -> Node:
    flat = [each for part in parts for each in (part.parts if isinstance(part, Chain) else (part,))]
    return flat[0] if len(flat) == 1 else Chain(tuple(flat))


def _either(*options: Node) -> Node:
    flat = [each for option in options for each in (option.options if isinstance(option, Either) else (option,))]
    return Either(tuple(dict.fromkeys(flat)))


def _atoms(node: Node) -> int:
    match node:
        case Chain(parts) | Either(parts):
            return sum(map(_atoms, parts))
        case Repeat(inner):
            return _atoms(inner)
        case _:
            return 1
