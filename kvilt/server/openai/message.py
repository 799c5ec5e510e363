"""One answer of a chat as it is spoken: text in, the parts of a message out, whole or as deltas."""

from __future__ import annotations

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
    """How the answers of a model are read."""

    parser: Parser
    tools: Sequence[Mapping[str, Any]] = ()  # those that may be called
    parallel: bool = True  # whether more than one call is let through
    prompt: str | None = None  # as rendered; tells whether reasoning is open already
    markers: Mapping[int, str] = field(default_factory=dict)  # special tokens that the parser must see, by id

    def builder(self) -> MessageBuilder:
        """For one answer."""
        return MessageBuilder(self.parser.new(self.tools, self.prompt), self.parallel, self.markers)


class MessageBuilder:
    """Reads one answer."""

    def __init__(self, reader: AnswerReader, parallel: bool, markers: Mapping[int, str]) -> None:
        self._reader = reader
        self._parallel = parallel
        self._markers = markers
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def add(self, delta: Delta) -> dict[str, Any]:
        """What a delta adds to the message, in the form of a stream; empty if nothing is certain yet."""
        mark = self._markers.get(delta.token, "") if delta.token is not None else ""
        pieces = self._reader.feed(mark + delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        return self._added(pieces)

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
                case CallStart(index, name) if index == 0 or self._parallel:
                    call = self._calls[index] = _Call(f"call_{secrets.token_hex(12)}", name)
                    calls[index] = {"index": index, **call.to_json()}
                case CallArguments(index, text) if index in self._calls:
                    self._calls[index].arguments += text
                    calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    calls[index]["function"]["arguments"] += text
        if calls:
            added["tool_calls"] = list(calls.values())
        return added


def special_markers(parser: Parser, special: Mapping[str, int]) -> dict[int, str]:
    """The parser's markers that are special tokens in a vocabulary: their text never appears, so it is put back."""
    return {special[mark]: mark for mark in parser.markers if mark in special}
