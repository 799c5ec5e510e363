"""The content of an answer as blocks, and the events by which a stream tells of them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from ...text.parse import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning
from ..openai.message import call_arguments

Event = dict[str, Any]
_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"


class ContentBlocks:
    """Builds the blocks of one answer. Blocks do not overlap: each ends before the next begins."""

    def __init__(self, shows_thinking: bool = True) -> None:
        """Without `shows_thinking`, blocks of reasoning have no text."""
        self.content: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._open = ""  # the type of the block that is open, if one is
        self._arguments = ""  # of the tool_use block that is open
        self._blank = ""  # white space that may stand before text, or between calls, where it is left out

    @property
    def index_of_text(self) -> int | None:
        """The index of the block that more text belongs to; None where text begins a block."""
        return len(self.content) - 1 if self._open == _TEXT else None

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(block["type"] == _TOOL for block in self.content)

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Add pieces of the answer; the events of the blocks that begin, grow and end."""
        return [event for piece in pieces for event in self._add(piece)]

    def append_text(self, text: str) -> None:
        """Add text to the block of text that is open; its event is the caller's."""
        self.content[-1]["text"] += text

    def finish(self) -> list[Event]:
        """The events at the end of the answer."""
        rest = self._grow(_TEXT, self._blank) if self._blank and not self.has_calls else []
        return [*rest, *self._end()]

    def _add(self, piece: Piece) -> list[Event]:
        match piece:
            case Content(text):
                return self._add_text(text)
            case Reasoning(text):
                return self._grow(_THINKING, text if self._shows_thinking else "")
            case CallStart(_, name):
                block = {"type": _TOOL, "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
                return self._begin(block)
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnd():
                return self._end()

    def _add_text(self, text: str) -> list[Event]:
        if self._open != _TEXT:
            text = self._blank + text
            self._blank = "" if text.strip() else text
            if self._blank:
                return []
        return self._grow(_TEXT, text)

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == _THINKING else {})}
            events = self._begin(block)
        self.content[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})] if text else events

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._end()
        self._open, self._arguments, self._blank = block["type"], "", ""
        self.content.append(block)
        start = {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}
        return [*events, start]

    def _end(self) -> list[Event]:
        """The end of the block that is open, if one is."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        events, block = [], self.content[-1]
        if kind == _THINKING:
            block["signature"] = hashlib.sha256(block["thinking"].encode("utf-8", "surrogatepass")).hexdigest()
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        elif kind == _TOOL:
            block["input"] = call_arguments(self._arguments)
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
