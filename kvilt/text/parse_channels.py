"""Answers in harmony, the format of gpt-oss: messages with a header each, which names a channel and a recipient.

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are content, and a message to a tool
(`to=functions.f`) is its call. Refuses to know other formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from .parse_calls import CallReader
from .parse_json import ArgumentsBody
from .parse_marks import HeldBlanks, partial_marker
from .parse_pieces import Content, Piece, Reasoning, merged

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_OPENINGS = (_START, _CHANNEL)
_RECIPIENT_FIRST = " to=functions."  # the prompt ends with the role, and a recipient may stand before the channel
_LONGEST_HEADER = 512
_TO = r"(?: to=(?P<{}>[^\s<]+))?"
_HEADER = re.compile(  # the recipient stands before the channel, or after it
    r"(?:<\|start\|>assistant)?"
    + _TO.format("first")
    + r"(?:<\|channel\|>(?P<channel>analysis|commentary|final)"
    + _TO.format("second")
    + r")?\s*(?:<\|constrain\|>)?[ A-Za-z0-9_./+-]*<\|message\|>"
)


class _Kind(Enum):
    """What a message is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    UNKNOWN = auto()  # to a tool that is not there, or on another channel: its text is content, with its header


class ChannelReader:
    """Reads one answer. Text outside of messages is content, or a call in JSON where the answer begins with one."""

    def __init__(self, calls: CallReader, prompt: str | None) -> None:
        """`calls` reads calls in text outside of messages. `prompt` tells whether a message is open already."""
        self._calls = calls
        self._steps = 0
        self._step: Callable[[str], None] = self._outside
        self._kind = _Kind.CONTENT
        self._marker = ""
        self._header: list[str] = []
        self._blanks = HeldBlanks()
        self._fresh = True  # nothing was read yet
        self._messages = False  # one has begun
        self._call: ArgumentsBody | None = None
        self._out: list[Piece] = []
        if prompt is not None:
            self._continue(prompt)

    @property
    def work(self) -> int:
        """Characters processed so far, counting repeats."""
        return self._steps + self._calls.work

    @property
    def passes_text(self) -> bool:
        """Never: a message may end at any character."""
        return False

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text."""
        for char in text:
            self._steps += 1
            self._step(char)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the answer."""
        if self._step == self._in_header:
            self._give_header_back()
        rest, self._marker = self._marker, ""
        self._say(rest)
        if not self._messages:
            self._out += self._calls.feed(self._blanks.take())
        self._out += self._calls.finish()
        return self._taken()

    def _taken(self) -> list[Piece]:
        taken, self._out = self._out, []
        return merged(taken)

    def _continue(self, prompt: str) -> None:
        """Begin inside the message that the prompt has opened, if it has."""
        header, message, body = prompt.rpartition(_START)[2].partition(_MESSAGE)
        if message and not any(end in body for end in _ENDS):
            self._enter(_START + header + message)

    # Outside of messages.

    def _outside(self, char: str) -> None:
        openings = (*_OPENINGS, _RECIPIENT_FIRST) if self._fresh else _OPENINGS
        text = self._marker + char
        self._marker = partial_marker(text, openings)
        plain = text[: len(text) - len(self._marker)]
        if plain:
            self._fresh = False
            self._say(plain)
            self._marker = partial_marker(self._marker, _OPENINGS)  # what only a beginning may open is text now
            self._say(text[len(plain) : len(text) - len(self._marker)])
        if self._marker in openings:
            self._header, self._marker, self._fresh, self._step = [self._marker], "", False, self._in_header

    # In a header.

    def _in_header(self, char: str) -> None:
        self._header.append(char)
        if char == ">":
            self._look_at_header()
        elif len(self._header) > _LONGEST_HEADER:
            self._give_header_back()

    def _look_at_header(self) -> None:
        end = "".join(self._header[-len(_MESSAGE) :])
        if end.endswith(_MESSAGE):
            self._enter("".join(self._header))
        elif end.endswith(_ENDS):
            self._give_header_back()

    def _give_header_back(self) -> None:
        raw, self._header, self._step = "".join(self._header), [], self._outside
        self._kind = _Kind.CONTENT
        self._say(raw)

    def _enter(self, header: str) -> None:
        """Begin the message of a header."""
        self._header, self._step = [], self._inside
        self._fresh, self._messages = False, True
        self._kind, name = self._meaning(header)
        self._call = None
        if self._kind is _Kind.CALL:
            self._call = ArgumentsBody(self._calls, name)
            self._out += self._calls.finish()
            self._calls.enter(self._call, self._blanks.take() + header)
        elif self._kind is _Kind.UNKNOWN:
            self._say(header)
        else:
            self._blanks.take()

    def _meaning(self, header: str) -> tuple[_Kind, str]:
        """What a header says, and the tool that its message calls."""
        found = _HEADER.fullmatch(header)
        if found is None:
            return _Kind.UNKNOWN, ""
        if (to := found["first"] or found["second"]) is not None:
            name = to.removeprefix("functions.")
            known = name != to and self._calls.parameters(name) is not None
            return (_Kind.CALL if known else _Kind.UNKNOWN), name
        return (_Kind.REASONING if found["channel"] == "analysis" else _Kind.CONTENT), ""

    # In a message.

    def _inside(self, char: str) -> None:
        marks = (*_ENDS, *_OPENINGS)
        text = self._marker + char
        self._marker = partial_marker(text, marks)
        self._say(text[: len(text) - len(self._marker)])
        if self._marker in marks:
            self._leave(self._marker)

    def _leave(self, marker: str) -> None:
        """End the message at a marker; one that opens the next message ends this one too."""
        self._marker = ""
        if self._call is not None:
            if not self._call.begun and marker == "<|call|>":
                self._out += self._calls.feed("{}")  # a tool without parameters may be called with nothing
            self._out += self._calls.finish()
            self._call = None
        elif self._kind is _Kind.UNKNOWN and marker in _ENDS:
            self._say(marker)
        self._kind, self._step = _Kind.CONTENT, self._outside
        if marker in _OPENINGS:
            self._header, self._step = [marker], self._in_header

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._step == self._inside and self._kind is not _Kind.UNKNOWN:
            self._say_inside(text)
        elif shown := self._blanks.before(text):  # blanks before the next header are layout
            self._out += self._calls.feed(shown)

    def _say_inside(self, text: str) -> None:
        if self._kind is _Kind.CALL:
            self._out += self._calls.feed(text)
            return
        self._out += self._calls.finish()
        self._out.append(Reasoning(text) if self._kind is _Kind.REASONING else Content(text))
