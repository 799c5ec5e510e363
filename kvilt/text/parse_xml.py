"""Calls written with tags: `<function=f><parameter=a>1</parameter></function>` by Qwen3-Coder, and by GLM-4.5
`f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`.

Values are plain text; one that the schema does not declare a string is read as JSON if it parses. Refuses to know the
markers around calls.
"""

from __future__ import annotations

import json

from .parse_json import JsonBody
from .parse_marks import partial_marker
from .parse_pieces import BodyStep, CallBody, CallSink
from .parse_scan import BLANKS, value_text

_FUNCTION, _PARAMETER, _END_VALUE, _END = "<function=", "<parameter=", "</parameter>", "</function>"
_KEY, _END_KEY, _ARG, _END_ARG, _END_CALL = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"
_LONGEST_NAME = 256
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class TaggedBody:
    """One call in tags; each argument is passed on when it is complete."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._step = self._tag
        self._wanted: tuple[str, ...] = (_FUNCTION,)
        self._marker = ""  # how much of a tag was read
        self._name: list[str] = []
        self._function = ""
        self._key = ""
        self._value: list[str] = []
        self._seen: set[str] = set()

    def step(self, char: str) -> BodyStep:
        return self._step(char)

    def _tag(self, char: str) -> BodyStep:
        """Blanks, and then one of the tags that may stand here."""
        if not self._marker and char in BLANKS:
            return BodyStep.MORE
        text = self._marker + char
        if not any(tag.startswith(text) for tag in self._wanted):
            return BodyStep.FAILED
        self._marker = text
        if text not in self._wanted:
            return BodyStep.MORE
        self._marker = ""
        if text == _END:
            self._sink.arguments("}" if self._seen else self._opened("{}"))
            self._sink.end()
            return BodyStep.DONE
        self._step = self._naming
        return BodyStep.MORE

    def _naming(self, char: str) -> BodyStep:
        if char != ">":
            self._name.append(char)
            return BodyStep.MORE if len(self._name) <= _LONGEST_NAME and char not in "<\n" else BodyStep.FAILED
        name = "".join(self._name).strip(BLANKS)
        self._name.clear()
        if self._function:
            self._key, self._step = name, self._valued
            return BodyStep.FAILED if name in self._seen or not name else BodyStep.MORE
        if self._sink.parameters(name) is None:
            return BodyStep.FAILED
        self._function, self._step, self._wanted = name, self._tag, (_PARAMETER, _END)
        return BodyStep.MORE

    def _valued(self, char: str) -> BodyStep:
        text = self._marker + char
        self._marker = partial_marker(text, (_END_VALUE,))
        self._value.append(text[: len(text) - len(self._marker)])
        if self._marker == _END_VALUE:
            self._argue("".join(self._value))
            self._value.clear()
            self._marker, self._step = "", self._tag
        return BodyStep.MORE

    def _argue(self, text: str) -> None:
        """Pass an argument on; the line ends next to its tags belong to them."""
        key = json.dumps(self._key, ensure_ascii=False)
        value = self._written(text.removeprefix("\n").removesuffix("\n"))
        head = ", " if self._seen else self._opened("{")
        self._seen.add(self._key)
        self._sink.arguments(f"{head}{key}: {value}")

    def _opened(self, text: str) -> str:
        self._sink.start(self._function)
        return text

    def _written(self, text: str) -> str:
        return _value((self._sink.parameters(self._function) or {}).get(self._key), text)


class KeyedBody:
    """One call with a pair of tags for each key and each value; each argument is passed on when it is complete."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._expects: tuple[str, ...] = (_KEY, _END_CALL)  # the tags that may end the text that is read now
        self._marker = ""  # how much of a tag was read
        self._text: list[str] = []
        self._name = ""
        self._key = ""
        self._seen: set[str] = set()

    def step(self, char: str) -> BodyStep:
        text = self._marker + char
        self._marker = partial_marker(text, self._expects)
        self._text.append(text[: len(text) - len(self._marker)])
        if self._marker not in self._expects:
            short = self._expects[0] == _END_ARG or len(self._text) <= _LONGEST_NAME
            return BodyStep.MORE if short else BodyStep.FAILED
        found, tag = "".join(self._text), self._marker
        self._text.clear()
        self._marker = ""
        return self._read(found, tag)

    def _read(self, text: str, tag: str) -> BodyStep:
        """The text before a tag, whose meaning the tag tells."""
        plain = text.strip(BLANKS)
        if tag in (_KEY, _END_CALL):
            if not self._name:
                self._name = plain
                if self._sink.parameters(plain) is None:
                    return BodyStep.FAILED
            elif plain:
                return BodyStep.FAILED
            self._expects = (_END_KEY,)
            return BodyStep.MORE if tag == _KEY else self._end()
        if tag == _END_KEY:
            self._key, self._expects = plain, (_ARG,)
            return BodyStep.FAILED if plain in self._seen or not plain else BodyStep.MORE
        if tag == _ARG:
            self._expects = (_END_ARG,)
            return BodyStep.FAILED if plain else BodyStep.MORE
        self._argue(text)
        self._expects = (_KEY, _END_CALL)
        return BodyStep.MORE

    def _argue(self, text: str) -> None:
        value = _value((self._sink.parameters(self._name) or {}).get(self._key), text)
        if not self._seen:
            self._sink.start(self._name)
        self._sink.arguments(f"{', ' if self._seen else '{'}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._seen.add(self._key)

    def _end(self) -> BodyStep:
        if not self._seen:
            self._sink.start(self._name)
        self._sink.arguments("}" if self._seen else "{}")
        self._sink.end()
        return BodyStep.DONE


def _value(declared: str | None, text: str) -> str:
    """An argument as JSON: text where its declared type says so, else JSON if it parses."""
    plain = text.strip(BLANKS)
    found = None if declared == "string" else value_text(_PYTHON.get(plain, plain))
    return json.dumps(text, ensure_ascii=False) if found is None else found


class JsonOrTags:
    """What stands in `<tool_call>`: JSON in most families, tags in some."""

    def __init__(self, sink: CallSink, keyed: bool = False) -> None:
        """`keyed` is for the tags of GLM, which begin with the name itself."""
        self._sink = sink
        self._keyed = keyed
        self._body: CallBody | None = None

    def step(self, char: str) -> BodyStep:
        if self._body is None:
            if char in BLANKS:
                return BodyStep.MORE
            self._body = self._chosen(char)
        return self._body.step(char)

    def _chosen(self, char: str) -> CallBody:
        if char in "{[":
            return JsonBody(self._sink, strict=False)
        if self._keyed:
            return KeyedBody(self._sink)
        return TaggedBody(self._sink) if char == "<" else JsonBody(self._sink, strict=False)
