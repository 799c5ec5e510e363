"""Calls written as JSON, read one character at a time: an object or a list of objects with a name and arguments.

Constant work a character and no recursion, whatever a model writes. Refuses to know markers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from .parse_pieces import BodyStep, CallBody, CallSink
from .parse_scan import BLANKS, JsonScanner, ScanState, object_text

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
# Keys that stand beside a name in a call; another one in a text without markers means that it is no call.
_BESIDE = (*_NAMES, *_ARGUMENTS, "type", "id", "tool_call_id")
_LONGEST_HEAD = 256  # characters between a marker and arguments before it is clear that no call comes


class _Collects(Enum):
    """What the value that is open at depth 1 is for."""

    NOTHING = auto()
    NAME = auto()
    STREAM = auto()  # arguments of a tool that is known already
    ARGUMENTS = auto()  # arguments that wait for the name
    QUOTED = auto()  # arguments written as a string of JSON


class CallObject:
    """One object with a name and arguments; arguments are passed on as they come once the name is known."""

    def __init__(self, sink: CallSink, strict: bool) -> None:
        """`strict` is for texts without markers: only keys of calls, and arguments must be there."""
        self._sink = sink
        self._strict = strict
        self._scanner = JsonScanner()
        self._collects = _Collects.NOTHING
        self._taken: list[str] = []
        self._key = ""
        self._seen: set[str] = set()
        self._name = ""
        self._waiting: str | None = None  # arguments that came before the name
        self._called = False

    def step(self, char: str) -> BodyStep:
        scanner = self._scanner
        key = scanner.depth == 1 and scanner.in_string and scanner.in_key
        value = scanner.depth > 1 or self._in_value()
        expected = scanner.at is ScanState.VALUE and scanner.depth == 1 and char not in BLANKS
        written = scanner.take(char)
        if not written:
            return BodyStep.FAILED
        if key:
            return self._key_char(written)
        if expected:
            return self._value_begins(char)
        if value:
            return self._value_char(written)
        if scanner.at is ScanState.END:
            return self._object_ends()
        return BodyStep.MORE

    def _in_value(self) -> bool:
        scanner = self._scanner
        in_string = scanner.in_string and not scanner.in_key
        return scanner.depth == 1 and (in_string or scanner.at in (ScanState.LITERAL, ScanState.NUMBER))

    def _key_char(self, written: str) -> BodyStep:
        if self._scanner.at is not ScanState.COLON:
            self._taken.append(written)
            return BodyStep.MORE
        self._key = json.loads(f'"{self._take()}"')
        alias = next((each[0] for each in (_NAMES, _ARGUMENTS) if self._key in each), self._key)
        twice = alias in self._seen and alias in (_NAMES[0], _ARGUMENTS[0])
        if twice or (self._strict and self._key not in _BESIDE):
            return BodyStep.FAILED
        self._seen.add(alias)
        return BodyStep.MORE

    def _value_begins(self, char: str) -> BodyStep:
        if self._key in _NAMES:
            self._collects = _Collects.NAME
            return BodyStep.MORE if char == '"' else BodyStep.FAILED
        if self._key not in _ARGUMENTS:
            self._collects = _Collects.NOTHING
            return BodyStep.MORE
        if char == "{" and self._name:
            self._collects = _Collects.STREAM
            self._sink.start(self._name)
            self._called = True
            self._sink.arguments(char)
            return BodyStep.MORE
        self._collects = _Collects.QUOTED if char == '"' else _Collects.ARGUMENTS
        self._taken.append(char)
        return BodyStep.MORE if char in '{"n' else BodyStep.FAILED

    def _value_char(self, written: str) -> BodyStep:
        ended = self._scanner.depth == 1 and self._scanner.at is ScanState.COMMA
        match self._collects:
            case _Collects.STREAM:
                self._sink.arguments(written)
                if ended:
                    self._sink.end()
                return BodyStep.MORE
            case _Collects.NAME if ended:
                return self._named(json.loads(f'"{self._take()}"'))
            case _Collects.ARGUMENTS | _Collects.QUOTED if ended:
                self._taken.append(written)
                return self._argued(self._take())
            case _Collects.NOTHING:
                # A number ends at the character after it, which may end the object, too.
                return self._object_ends() if self._scanner.at is ScanState.END else BodyStep.MORE
        self._taken.append(written)
        return BodyStep.MORE

    def _take(self) -> str:
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def _named(self, name: str) -> BodyStep:
        if self._sink.parameters(name) is None:
            return BodyStep.FAILED
        self._name = name
        if self._waiting is not None:
            self._call(self._waiting)
        return BodyStep.MORE

    def _argued(self, text: str) -> BodyStep:
        given = json.loads(text) if self._collects is _Collects.QUOTED else text
        arguments = object_text("{}" if given in ("null", "") else given)
        if arguments is None:
            return BodyStep.FAILED
        if self._name:
            self._call(arguments)
        else:
            self._waiting = arguments
        return BodyStep.MORE

    def _call(self, arguments: str) -> None:
        self._sink.start(self._name)
        self._sink.arguments(arguments)
        self._sink.end()
        self._called = True

    def _object_ends(self) -> BodyStep:
        if not self._called:
            if not self._name or self._strict:
                return BodyStep.FAILED
            self._call("{}")
        self._sink.settle()
        return BodyStep.DONE


class JsonBody:
    """One call, or a list of them."""

    def __init__(self, sink: CallSink, strict: bool) -> None:
        self._sink = sink
        self._strict = strict
        self._call: CallObject | None = None
        self._listed = False
        self._wants_call = True

    def step(self, char: str) -> BodyStep:
        if self._call is not None:
            return self._inside(self._call, char)
        if char in BLANKS:
            return BodyStep.MORE
        if char == "{" and self._wants_call:
            self._call = CallObject(self._sink, self._strict)
            return self._call.step(char)
        if char == "[" and not self._listed:
            self._listed = True
            return BodyStep.MORE
        if self._listed and not self._wants_call and char in ",]":
            self._sink.settle()
            self._wants_call = char == ","
            return BodyStep.MORE if char == "," else BodyStep.DONE
        return BodyStep.FAILED

    def _inside(self, call: CallObject, char: str) -> BodyStep:
        step = call.step(char)
        if step is BodyStep.DONE:
            self._call, self._wants_call = None, False
            return BodyStep.MORE if self._listed else BodyStep.DONE
        return step


class ArgumentsBody:
    """The arguments of a call whose tool is known: one object."""

    def __init__(self, sink: CallSink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._scanner: JsonScanner | None = None

    @property
    def begun(self) -> bool:
        """Whether the object has begun."""
        return self._scanner is not None

    def step(self, char: str) -> BodyStep:
        if self._scanner is None:
            return self._begin(char)
        written = self._scanner.take(char)
        if not written:
            return BodyStep.FAILED
        self._sink.arguments(written)
        if self._scanner.at is not ScanState.END:
            return BodyStep.MORE
        self._sink.end()
        return BodyStep.DONE

    def _begin(self, char: str) -> BodyStep:
        if char in BLANKS:
            return BodyStep.MORE
        if char != "{" or self._sink.parameters(self._name) is None:
            return BodyStep.FAILED
        self._scanner = JsonScanner()
        self._sink.start(self._name)
        self._sink.arguments(self._scanner.take(char))
        return BodyStep.MORE


class NamedBody:
    """A head with the tool's name, and the arguments; or JSON with names inside."""

    def __init__(self, sink: CallSink, name_of: Callable[[str], str]) -> None:
        """`name_of` finds the name in all that stands before the arguments."""
        self._sink = sink
        self._name_of = name_of
        self._inside: CallBody | None = None
        self._head: list[str] = []

    def step(self, char: str) -> BodyStep:
        if self._inside is not None:
            return self._inside.step(char)
        if not self._head and char in BLANKS:
            return BodyStep.MORE
        if not self._head and char in "[{":
            self._inside = JsonBody(self._sink, strict=False)
            return self._inside.step(char)
        if char == "{":
            self._inside = ArgumentsBody(self._sink, self._name_of("".join(self._head)))
            return self._inside.step(char)
        self._head.append(char)
        return BodyStep.MORE if len(self._head) <= _LONGEST_HEAD and not self._is_text(char) else BodyStep.FAILED

    def _is_text(self, char: str) -> bool:
        """Whether something else than arguments stands on the line behind a name."""
        return self._name_of is line_name and "\n" in self._head and char not in BLANKS


def mistral_name(head: str) -> str:
    """Of `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`; empty if it is none of them."""
    name, bracket, rest = head.rstrip(BLANKS).partition("[")
    return name if not bracket or rest.endswith("ARGS]") else ""


def line_name(head: str) -> str:
    """Of a line of its own."""
    return head.strip(BLANKS)


def deepseek_name(head: str) -> str:
    """Of `name<sep>`, or `function<sep>name` with a fence after it."""
    before, separator, after = head.partition("<｜tool▁sep｜>")
    if before.strip(BLANKS) == "function" and after:
        return after.rstrip(BLANKS).removesuffix("```json").strip(BLANKS)
    return before.strip(BLANKS) if separator and not after.strip(BLANKS) else ""


def kimi_name(head: str) -> str:
    """Of `functions.name:0<|tool_call_argument_begin|>`."""
    before, separator, after = head.partition("<|tool_call_argument_begin|>")
    name = before.strip(BLANKS).removeprefix("functions.").rpartition(":")[0]
    return name if separator and not after.strip(BLANKS) else ""
