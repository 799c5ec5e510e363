"""Builds the message of a chat answer from generated text: content, reasoning and tool calls, whole or as deltas."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...llm import Delta
from ...text.parse import AnswerReader, CallArguments, CallStart, Content, Parser, Piece, Reasoning


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How generated text is parsed into messages."""

    parser: Parser
    tools: Sequence[Mapping[str, Any]] = ()  # that may be called
    parallel: bool = True  # whether more than one call is passed on
    prompt: str | None = None  # as rendered; says whether reasoning is already open
    markers: Mapping[int, str] = field(default_factory=dict)  # special tokens that the parser must see, by id

    def builder(self) -> MessageBuilder:
        """A builder for one answer."""
        return MessageBuilder(self.parser.new(self.tools, self.prompt), self.parallel, self.markers)


class MessageBuilder:
    """Builds the message of one answer."""

    def __init__(self, reader: AnswerReader, parallel: bool, markers: Mapping[int, str]) -> None:
        self._reader = reader
        self._parallel = parallel
        self._markers = markers
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def add(self, delta: Delta) -> dict[str, Any]:
        """Add generated text; returns the delta of the message, empty while the parser needs more text."""
        return self._added(self.read(delta))

    def read(self, delta: Delta) -> list[Piece]:
        """The pieces of more generated text, without calls that must not be passed on."""
        mark = self._markers.get(delta.token, "") if delta.token is not None else ""
        pieces = self._reader.feed(mark + delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        return pieces if self._parallel else [piece for piece in pieces if getattr(piece, "index", 0) == 0]

    def is_content(self, delta: Delta) -> bool:
        """Whether a delta adds its text to the content and nothing else, so that it need not be parsed."""
        plain = self._reader.passes_text and delta.finish_reason is None and delta.reading is None
        return plain and delta.text != "" and delta.token not in self._markers

    @property
    def has_tool_calls(self) -> bool:
        """Whether a tool was called."""
        return bool(self._calls)

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = "".join(self._content)
        made: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content.strip() else content,
            "refusal": None,
        }
        if self._reasoning:
            made["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            made["tool_calls"] = [call.to_json() for call in self._calls.values()]
        return made

    def _added(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        added: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            match piece:
                case Content(text):
                    self._content.append(text)
                    added["content"] = added.get("content", "") + text
                case Reasoning(text):
                    self._reasoning.append(text)
                    added["reasoning_content"] = added.get("reasoning_content", "") + text
                case CallStart(index, name):
                    call = self._calls[index] = _Call(f"call_{secrets.token_hex(12)}", name)
                    calls[index] = {"index": index, **call.to_json()}
                case CallArguments(index, text):
                    self._calls[index].arguments += text
                    calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    calls[index]["function"]["arguments"] += text
        if calls:
            added["tool_calls"] = list(calls.values())
        return added


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that broke off, what there is of their text."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"partial_json": text}
