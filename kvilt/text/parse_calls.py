"""Finds tool calls in an answer: text outside of them is content, and so is text that turns out not to be a call.

Refuses to know reasoning, and what stands inside a call's markers: bodies read that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .parse_dsml import INVOKE, DsmlBody
from .parse_formats import CallMarker, CallSyntax
from .parse_gemma import GemmaBody
from .parse_json import JsonBody, NamedBody, deepseek_name, kimi_name, line_name, mistral_name
from .parse_marks import HeldBlanks, partial_marker
from .parse_pieces import BodyStep, CallArguments, CallBody, CallEnd, CallSink, CallStart, Content, Piece
from .parse_python import PythonBody
from .parse_xml import JsonOrTags, TaggedBody


class CallReader:
    """One answer, character by character. It is the sink of the bodies it makes."""

    def __init__(self, openings: Sequence[CallMarker], tools: Mapping[str, Mapping[str, str]]) -> None:
        """Without openings everything is content."""
        self.work = 0
        self.passes_text = not openings
        self._tools = tools
        self._by_text = {opening.text: opening for opening in openings}
        self._marked = tuple(opening.text for opening in openings if not opening.bare)
        self._any = tuple(self._by_text)
        self._step = self._text
        self._out: list[Piece] = []
        self._fragments: list[str] = []
        self._blanks = HeldBlanks()
        self._marker = ""
        self._fresh = True  # calls without markers may begin: nothing was said yet, or a call ended just now
        self._calls = 0
        self._open = False
        self._body: CallBody | None = None
        self._raw: list[str] = []  # what a body took and has not turned into a call
        self._closes: tuple[str, ...] = ()
        self._before = 0  # calls that came before this body

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text."""
        if not self._by_text:
            return [Content(text)] if text else []
        for char in text:
            self._step(char)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The pieces that waited for text that will not come."""
        if self._body is not None:
            self._give_up()
        held = self._blanks.take() + self._marker
        self._marker = ""
        if not self._after_call() or held.strip(" \t\r\n,;"):
            self._say(held)
        return self._taken()

    def enter(self, body: CallBody, raw: str) -> None:
        """Read a body whose opening the caller has read; `raw` is that text, in case it is no call after all."""
        self._body, self._raw = body, [raw]
        self._closes, self._before = (), self._calls
        self._step = self._inside

    # What bodies call.

    def parameters(self, name: str) -> Mapping[str, str] | None:
        return self._tools.get(name)

    def start(self, name: str) -> None:
        self._piece(CallStart(self._calls, name))
        self._open = True
        self._raw.clear()

    def arguments(self, text: str) -> None:
        self._fragments.append(text)
        self._raw.clear()

    def end(self) -> None:
        self._end(whole=True)

    def settle(self) -> None:
        self._raw.clear()

    def _end(self, whole: bool) -> None:
        self._piece(CallEnd(self._calls, whole))
        self._calls += 1
        self._open = False
        self._raw.clear()

    # Outside of calls.

    def _text(self, char: str) -> None:
        self.work += 1
        if self._fresh and self._after_call() and not self._marker and char in ",;":
            self._blanks.hold(char)  # what separates calls without markers
            return
        text = self._marker + char
        marks = self._any if self._fresh else self._marked
        if (whole := self._by_text.get(self._marker)) is not None and not any(m.startswith(text) for m in marks):
            self._enter(whole)  # a longer marker did not come about
            self._step(char)
            return
        self._marker = partial_marker(text, marks)
        self._show(text[: len(text) - len(self._marker)])
        found = self._by_text.get(self._marker)
        if found is not None and (self._fresh or not found.bare) and not _grows(self._marker, marks):
            self._enter(found)

    def _show(self, text: str) -> None:
        """Pass content on, but for blanks at its end: they are layout if a call follows."""
        shown = self._blanks.before(text)
        if shown:
            self._say(shown.lstrip() if self._after_call() else shown)

    def _after_call(self) -> bool:
        """No content since a call: whitespace is layout."""
        return self._fresh and self._calls > 0

    def _say(self, text: str) -> None:
        if text:
            self._piece(Content(text))
            self._fresh = False

    def _enter(self, opening: CallMarker) -> None:
        self._raw = [self._blanks.take(), "" if opening.bare else self._marker]
        self._body = _body(opening, self)
        self._closes, self._before = opening.closes, self._calls
        first, self._marker = self._marker, ""
        self._step = self._inside
        if opening.bare:
            for char in first:
                self._inside(char)

    # Inside of them.

    def _inside(self, char: str) -> None:
        assert self._body is not None
        self.work += 1
        self._raw.append(char)  # until it is passed on
        match self._body.step(char):
            case BodyStep.DONE:
                self._leave()
            case BodyStep.BEFORE:
                self._leave()
                self._step(char)
            case BodyStep.FAILED:
                self._raw.pop()
                self._give_up()
                self._step(char)

    def _leave(self) -> None:
        self._body, self._raw, self._fresh = None, [], True
        self._step = self._closing if self._closes else self._text

    def _give_up(self) -> None:
        """Not a call after all: text that was held back becomes content."""
        raw, self._raw, self._body = "".join(self._raw), [], None
        if self._open:
            self._end(whole=False)
        self._step, self._fresh = self._text, self._fresh or self._calls > self._before
        self._show(raw)

    def _closing(self, char: str) -> None:
        """Blanks and closing markers in their order; models forget them, so anything else is just text."""
        self.work += 1
        text = self._marker + char
        if not self._marker and char.isspace():
            self._blanks.hold(char)
        elif text in self._closes:
            self._blanks.take()
            self._closes = self._closes[self._closes.index(text) + 1 :]
            self._marker, self._step = "", self._closing if self._closes else self._text
        elif any(close.startswith(text) for close in self._closes):
            self._marker = text
        else:
            self._marker, self._step = "", self._text
            for each in text:
                self._step(each)

    # Pieces.

    def _piece(self, piece: Piece) -> None:
        self._flush()
        self._out.append(piece)

    def _flush(self) -> None:
        if self._fragments:
            self._out.append(CallArguments(self._calls, "".join(self._fragments)))
            self._fragments.clear()

    def _taken(self) -> list[Piece]:
        self._flush()
        taken, self._out = self._out, []
        return taken


def _grows(marker: str, marks: Sequence[str]) -> bool:
    return any(mark != marker and mark.startswith(marker) for mark in marks)


def _body(opening: CallMarker, sink: CallSink) -> CallBody:
    match opening.inside:
        case CallSyntax.JSON:
            return JsonBody(sink, strict=opening.strict)
        case CallSyntax.JSON_OR_TAGS:
            return JsonOrTags(sink)
        case CallSyntax.MISTRAL:
            return NamedBody(sink, mistral_name)
        case CallSyntax.DEEPSEEK:
            return NamedBody(sink, deepseek_name)
        case CallSyntax.KIMI:
            return NamedBody(sink, kimi_name)
        case CallSyntax.GEMMA:
            return GemmaBody(sink)
        case CallSyntax.DSML:
            return DsmlBody(sink, begun=opening.text == INVOKE)
        case CallSyntax.NAME_LINE:
            return NamedBody(sink, line_name)
        case CallSyntax.TAGS:
            return TaggedBody(sink)
        case CallSyntax.JSON_OR_KEYS:
            return JsonOrTags(sink, keyed=True)
        case CallSyntax.PYTHON:
            return PythonBody(sink, listed=False)
        case CallSyntax.PYTHON_LIST:
            return PythonBody(sink, listed=True)
        case CallSyntax.LIST:
            return _ListBody(sink, strict=opening.strict)


class _ListBody:
    """A list whose first item tells whether it is JSON or Python."""

    def __init__(self, sink: CallSink, strict: bool) -> None:
        self._sink = sink
        self._strict = strict
        self._held: list[str] = []
        self._body: CallBody | None = None

    def step(self, char: str) -> BodyStep:
        if self._body is not None:
            return self._body.step(char)
        if char.isspace() or (char == "[" and not "".join(self._held).strip()):
            self._held.append(char)
            return BodyStep.MORE
        self._body = JsonBody(self._sink, self._strict) if char == "{" else PythonBody(self._sink, listed=True)
        for each in self._held:
            if self._body.step(each) is BodyStep.FAILED:
                return BodyStep.FAILED
        return self._body.step(char)
