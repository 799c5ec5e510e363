"""Calls of DeepSeek V3.2 and V4: `<｜DSML｜invoke name="f">` with a `<｜DSML｜parameter name="a" string="true">` each.

A parameter says itself whether its text is a string; others are JSON. Refuses to know the markers around calls.
"""

from __future__ import annotations

import json
import re

from .parse_marks import partial_marker
from .parse_pieces import BodyStep, CallSink
from .parse_scan import BLANKS, value_text

INVOKE, _PARAMETER = "<｜DSML｜invoke", "<｜DSML｜parameter"
_END_VALUE, _END = "</｜DSML｜parameter>", "</｜DSML｜invoke>"
_LONGEST_TAG = 512
_NAMED = re.compile(r'\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*>')


class DsmlBody:
    """One call; each argument is passed on when it is complete."""

    def __init__(self, sink: CallSink, begun: bool = False) -> None:
        """`begun`: the opening marker was the beginning of the first tag."""
        self._sink = sink
        self._step = self._tag
        self._wanted: tuple[str, ...] = (INVOKE,)
        self._text = INVOKE if begun else ""  # of a tag, or what may be one
        self._function = ""
        self._key = ""
        self._is_string: bool | None = None
        self._value: list[str] = []
        self._seen: set[str] = set()

    def step(self, char: str) -> BodyStep:
        return self._step(char)

    def _tag(self, char: str) -> BodyStep:
        """Blanks, and then one of the tags that may stand here, up to its end."""
        if not self._text and char in BLANKS:
            return BodyStep.MORE
        self._text += char
        begins = any(tag.startswith(self._text) or self._text.startswith(tag) for tag in self._wanted)
        if not begins or len(self._text) > _LONGEST_TAG:
            return BodyStep.FAILED
        return self._read() if char == ">" else BodyStep.MORE

    def _read(self) -> BodyStep:
        text, self._text = self._text, ""
        if text == _END:
            self._sink.arguments("}" if self._seen else self._opened("{}"))
            self._sink.end()
            return BodyStep.DONE
        found = _NAMED.fullmatch(text.removeprefix(INVOKE if not self._function else _PARAMETER))
        if found is None:
            return BodyStep.FAILED
        name = found[1]
        if self._function:
            self._key, self._step = name, self._valued
            self._is_string = None if found[2] is None else found[2] == "true"
            return BodyStep.FAILED if name in self._seen else BodyStep.MORE
        self._function, self._wanted = name, (_PARAMETER, _END)
        return BodyStep.MORE if self._sink.parameters(name) is not None else BodyStep.FAILED

    def _valued(self, char: str) -> BodyStep:
        text = self._text + char
        self._text = partial_marker(text, (_END_VALUE,))
        self._value.append(text[: len(text) - len(self._text)])
        if self._text == _END_VALUE:
            self._argue("".join(self._value))
            self._value.clear()
            self._text, self._step = "", self._tag
        return BodyStep.MORE

    def _argue(self, text: str) -> None:
        declared = (self._sink.parameters(self._function) or {}).get(self._key)
        plain = declared == "string" if self._is_string is None else self._is_string
        found = None if plain else value_text(text.strip(BLANKS))
        value = json.dumps(text, ensure_ascii=False) if found is None else found
        head = ", " if self._seen else self._opened("{")
        self._seen.add(self._key)
        self._sink.arguments(f"{head}{json.dumps(self._key, ensure_ascii=False)}: {value}")

    def _opened(self, text: str) -> str:
        self._sink.start(self._function)
        return text
