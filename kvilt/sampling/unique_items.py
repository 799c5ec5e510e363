"""Arrays whose items must all be different: kept by watching the text, since no grammar can say it.

`UniqueRules` tells of each place in a JSON text whether it is such an array, by walking the schema beside the text.
`UniqueWatch` follows one sample, and forbids the tokens that would repeat an item. Where a schema allows several forms
(anyOf) and one of them asks for different items, all of them get different items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .schema_place import IN_PLACE, Path
from .schema_source import SchemaDocument

Bits = npt.NDArray[np.int32]
Nodes = frozenset[Path]  # the schemas that speak of one value

_SPACE, _CLOSE = b" \t\r\n", b",]}"
# A token that ends an item and holds another one, so that it can repeat within itself.
_SEVERAL = re.compile(rb",\s*(?:\"[^\"]*\"|[\w.+-]+[\s,\]}]|[\[{].*[\]}])", re.DOTALL)
_VALUE, _STRING, _SCALAR, _AFTER, _KEY_NEXT, _KEY, _COLON = range(7)


class UniqueRules:
    """Which arrays of a document have different items; one for each grammar that has any."""

    @classmethod
    def of(cls, source: SchemaDocument) -> UniqueRules | None:
        """The rules of a document that was checked; None where no array has to have different items."""
        schemas = (place.schema for place in source.places.values())
        return cls(source) if any(isinstance(one, dict) and one.get("uniqueItems") is True for one in schemas) else None

    def __init__(self, source: SchemaDocument) -> None:
        self._places: Mapping[Path, Any] = {path: place.schema for path, place in source.places.items()}
        self._targets = dict(source.targets)  # of all references that matter: the document was checked
        self.root = self._closed([()])
        self.member = cache(self._member)
        self.item = cache(self._item)
        self.is_unique = cache(self._is_unique)
        self.values = cache(self._values)

    def _closed(self, paths: Iterable[Path]) -> Nodes:
        """These schemas, and those that speak of the same value."""
        found: set[Path] = set()
        stack = [path for path in paths if path in self._places]
        while stack:
            path = stack.pop()
            schema = self._places[path]
            if path in found or not isinstance(schema, dict):
                continue
            found.add(path)
            if path in self._targets:
                stack.append(self._targets[path])
            stack += [(*path, keyword, str(i)) for keyword in IN_PLACE for i in range(len(schema.get(keyword, ())))]
        return frozenset(found)

    def _member(self, nodes: Nodes, key: str) -> Nodes:
        inner: list[Path] = []
        for path in nodes:
            schema = self._places[path]
            inner += [(*path, "patternProperties", pattern) for pattern in schema.get("patternProperties", ())]
            known = key in schema.get("properties", ())
            inner.append((*path, "properties", key) if known else (*path, "additionalProperties"))
        return self._closed(inner)

    def _item(self, nodes: Nodes, index: int) -> Nodes:
        return self._closed(
            (*path, "prefixItems", str(index))
            if index < len(self._places[path].get("prefixItems", ()))
            else (*path, "items")
            for path in nodes
        )

    def _is_unique(self, nodes: Nodes) -> bool:
        return any(self._places[path].get("uniqueItems") is True for path in nodes)

    def _values(self, nodes: Nodes) -> frozenset[bytes] | None:
        """All items that an array may have, as they are written; None where they are not few."""
        for path in nodes if self._is_unique(nodes) else ():
            item = (*path, "items")
            while item in self._targets:
                item = self._targets[item]
            values = _listed(self._places.get(item))
            if values is not None and not self._places[path].get("prefixItems"):
                return frozenset(json.dumps(value, ensure_ascii=False).encode() for value in values)
        return None


@dataclass(frozen=True, slots=True)
class _Frame:
    """A container that is open."""

    is_array: bool
    nodes: Nodes
    unique: bool = False
    index: int = 0
    begin: int = -1  # where the current item begins
    seen: frozenset[str] = frozenset()  # items that are whole, each in one spelling
    raw: frozenset[bytes] = frozenset()  # the same as they are written


@dataclass(frozen=True, slots=True)
class TextState:
    """A place in a JSON text."""

    frames: tuple[_Frame, ...] = ()
    mode: int = _VALUE
    escaped: bool = False
    begin: int = 0  # where the current key begins
    length: int = 0  # of the text so far
    next: Nodes = field(default_factory=frozenset)  # what speaks of the value that is expected


class VocabularyBytes:
    """A vocabulary's tokens, and those of them that matter here."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.quoted = [i for i, token in enumerate(tokens) if b'"' in token]
        self.several = [i for i, token in enumerate(tokens) if _SEVERAL.search(token)]


class UniqueWatch:
    """Follows the text of one sample; every accepted token can be taken back."""

    __slots__ = ("_rules", "_states", "_text", "_vocabulary")

    def __init__(self, rules: UniqueRules, vocabulary: VocabularyBytes) -> None:
        self._rules = rules
        self._vocabulary = vocabulary
        self._text = bytearray()
        self._states = [TextState(next=rules.root)]

    def fork(self) -> UniqueWatch:
        """An independent one at the same place."""
        other = UniqueWatch(self._rules, self._vocabulary)
        other._text, other._states = self._text[:], self._states[:]
        return other

    def take(self, token: int) -> bool:
        """Follow a token; False, and nothing changes, if it repeats an item."""
        after = self._after(self._vocabulary.tokens[token])
        if after is None:
            return False
        self._text += self._vocabulary.tokens[token]
        self._states.append(after)
        return True

    def keep(self, count: int) -> None:
        """Forget all but the first tokens."""
        del self._states[count + 1 :]
        del self._text[self._states[-1].length :]

    def forbid(self, bits: Bits) -> None:
        """Clear the bits of tokens that would repeat an item, or could only go on to one."""
        for token in self._candidates(bits):
            word, bit = divmod(token, 32)
            if bits[word] >> bit & 1 and self._after(self._vocabulary.tokens[token]) is None:
                bits[word] &= np.array(~(1 << bit) & 0xFFFFFFFF, np.uint32).astype(np.int32)

    def _candidates(self, bits: Bits) -> Iterable[int]:
        state = self._states[-1]
        inside = [frame for frame in state.frames if frame.unique]
        if not inside:
            return self._vocabulary.several
        if self._rules.values(inside[-1].nodes) is None and state.mode == _STRING:
            return [*self._vocabulary.several, *self._endings(state)]
        if not any(frame.seen for frame in inside) and self._rules.values(inside[-1].nodes) is None:
            return self._vocabulary.several
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

    def _endings(self, state: TextState) -> Iterator[int]:
        """Tokens that make the string that is being written one that was there."""
        tokens, last = self._vocabulary.tokens, state.frames[-1]
        if not last.unique:
            # A string inside of an item: only what closes the item can repeat one, in the same token as its end.
            yield from (i for i in self._vocabulary.quoted if b"]" in tokens[i] or b"}" in tokens[i])
            return
        begun = bytes(self._text[last.begin :])
        rests = tuple(item[len(begun) :] for item in last.raw if item.startswith(begun))
        if rests:
            yield from (i for i in self._vocabulary.quoted if tokens[i].startswith(rests))

    def _after(self, chunk: bytes) -> TextState | None:
        """The place after some more text; None if an item is repeated, or nothing is left that could be written."""
        scan = _Scan(self._rules, self._states[-1], self._text, chunk)
        for at in range(len(chunk)):
            if not scan.step(at):
                return None
        return scan.state(len(chunk)) if scan.has_way_on(len(chunk)) else None


class _Scan:
    """Reads a chunk of JSON text, which the grammar allows, from a place."""

    def __init__(self, rules: UniqueRules, state: TextState, text: bytearray, chunk: bytes) -> None:
        self.rules, self.chunk, self.base, self.text = rules, chunk, state.length, text
        self.frames, self.mode, self.escaped = list(state.frames), state.mode, state.escaped
        self.begin, self.next = state.begin, state.next

    def state(self, length: int) -> TextState:
        return TextState(tuple(self.frames), self.mode, self.escaped, self.begin, self.base + length, self.next)

    def step(self, at: int) -> bool:
        """Read one byte; False if an item is repeated."""
        byte = self.chunk[at]
        if self.mode in (_STRING, _KEY):
            return self._in_string(byte, at)
        if self.mode == _SCALAR:
            if byte not in _SPACE and byte not in _CLOSE:
                return True
            if not self._complete(at):
                return False
        if byte in _SPACE:
            return True
        match self.mode:
            case 0:  # _VALUE
                return self._open(byte, at)
            case 4:  # _KEY_NEXT
                if byte == ord("}"):
                    return self._close(at)
                self.mode, self.begin = _KEY, self.base + at
            case 6:  # _COLON
                self.mode = _VALUE
            case 3:  # _AFTER
                return self._separate(byte, at)
        return True

    def has_way_on(self, length: int) -> bool:
        """Whether an item that has begun can become one that was not there."""
        top = self.frames[-1] if self.frames else None
        values = None if top is None or not top.unique else self.rules.values(top.nodes)
        if top is None or values is None:
            return True
        left = values - top.raw
        if self.mode == _VALUE:
            return bool(left) or not top.index
        begun = self._text_between(top.begin, self.base + length)
        return self.mode == _AFTER or any(value.startswith(begun) for value in left)

    def _in_string(self, byte: int, at: int) -> bool:
        if self.escaped:
            self.escaped = False
        elif byte == ord("\\"):
            self.escaped = True
        elif byte == ord('"'):
            if self.mode == _STRING:
                return self._complete(at + 1)
            key = json.loads(self._text_between(self.begin, self.base + at + 1))
            self.next = self.rules.member(self.frames[-1].nodes, key)
            self.mode = _COLON
        return True

    def _open(self, byte: int, at: int) -> bool:
        top = self.frames[-1] if self.frames else None
        if byte == ord("]"):  # of an empty array
            return self._close(at)
        if top is not None and top.unique:
            self.frames[-1] = replace(top, begin=self.base + at)
        if byte in b"[{":
            array = byte == ord("[")
            nodes = self.next
            self.frames.append(_Frame(array, nodes, array and self.rules.is_unique(nodes)))
            self.next = self.rules.item(nodes, 0) if array else frozenset()
            self.mode = _VALUE if array else _KEY_NEXT
        else:
            self.mode = _STRING if byte == ord('"') else _SCALAR
        return True

    def _separate(self, byte: int, at: int) -> bool:
        if byte != ord(","):
            return self._close(at)
        top = self.frames[-1]
        if top.is_array:
            self.frames[-1] = replace(top, index=top.index + 1)
            self.next = self.rules.item(top.nodes, top.index + 1)
        self.mode = _VALUE if top.is_array else _KEY_NEXT
        return True

    def _close(self, at: int) -> bool:
        self.frames.pop()
        return self._complete(at + 1)

    def _complete(self, at: int) -> bool:
        """A value has ended before this place in the chunk."""
        self.mode = _AFTER
        top = self.frames[-1] if self.frames else None
        if top is None or not top.unique:
            return True
        raw = self._text_between(top.begin, self.base + at)
        spelling = _one_spelling(raw)
        if spelling in top.seen:
            return False
        self.frames[-1] = replace(top, seen=top.seen | {spelling}, raw=top.raw | {raw})
        return True

    def _text_between(self, begin: int, end: int) -> bytes:
        if begin >= self.base:
            return self.chunk[begin - self.base : end - self.base]
        return bytes(self.text[begin:]) + self.chunk[: end - self.base]


def _listed(schema: Any) -> list[Any] | None:
    """The values of a schema that has few, all of which have one spelling."""
    match schema:
        case {"enum": list(values)}:
            found = values
        case {"const": value}:
            found = [value]
        case {"type": "boolean"}:
            found = [True, False]
        case {"type": "null"}:
            found = [None]
        case _:
            return None
    return found if all(value is None or isinstance(value, str | int) for value in found) else None


def _one_spelling(raw: bytes) -> str:
    """An item in the spelling that all equal items share."""
    return json.dumps(_plain(json.loads(raw)), sort_keys=True)


def _plain(value: Any) -> Any:
    """Equal numbers as equal values, and 1 apart from true."""
    match value:
        case list():
            return [_plain(each) for each in value]
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
