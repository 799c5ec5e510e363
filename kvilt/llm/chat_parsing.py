"""A chat answer as reasoning, content and tool calls, parsed as the server parses it. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..text.parse import AnswerReader, CallArguments, CallStart, Content, Parser, Piece, Reasoning
from .completion import ParsedToolCall, TextPiece


@dataclass(frozen=True, slots=True)
class ChatParsing:
    """How the text of a chat answer is parsed."""

    parser: Parser
    markers: Mapping[int, str]  # special tokens that the parser must see
    tools: Sequence[Mapping[str, Any]] = ()  # that may be called
    prompt: str | None = None  # the end of the prompt; says whether reasoning is already open

    def reader(self) -> AnswerReader:
        return self.parser.new(self.tools, self.prompt)

    def parsed(self, text: str) -> ParsedAnswer:
        """A whole answer; `text` has the markers in it."""
        reader, answer = self.reader(), ParsedAnswer()
        answer.add([*reader.feed(text), *reader.finish()])
        return answer


@dataclass(slots=True)
class ParsedAnswer:
    """What an answer consists of."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name):
                    self.tool_calls.append(ParsedToolCall(name, ""))
                case CallArguments(index, text):
                    call = self.tool_calls[index]
                    self.tool_calls[index] = ParsedToolCall(call.name, call.arguments + text)


def text_pieces(pieces: Iterable[Piece], drafted: bool = False) -> list[TextPiece]:
    """Reasoning and content as a stream shows them; calls are in its completion."""
    return [
        TextPiece(piece.text, drafted, isinstance(piece, Reasoning))
        for piece in pieces
        if isinstance(piece, Content | Reasoning) and piece.text
    ]
