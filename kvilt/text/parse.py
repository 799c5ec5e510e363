"""Streaming parser of a model's answer: content, reasoning and tool calls, in the format of its family.

One pass, constant work a character, and no character lost: what turns out not to be a call is content. Refuses to know
servers and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ParamError
from .parse_calls import CallReader
from .parse_channels import ChannelReader
from .parse_formats import NAMED, CallFormat, Thinking, calls_in, thinking_in
from .parse_grammar import grammar_of
from .parse_pieces import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning, merged
from .parse_thinking import ThinkingReader
from .parse_tools import argument_schemas, parameter_types

__all__ = [
    "AnswerReader",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Parser",
    "Piece",
    "Reasoning",
    "argument_schemas",
    "merged",
    "parser_for",
    "parser_named",
    "parser_names",
]

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Parser:
    """How one model writes tool calls and reasoning, and how that was detected."""

    name: str
    reason: str
    calls: CallFormat
    thinking: Thinking | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the reader even where they are special tokens."""
        around = [self.thinking.open, self.thinking.close] if self.thinking else []
        return tuple(dict.fromkeys((*self.calls.markers, *around)))

    def special_markers(self, special: Mapping[str, int]) -> dict[int, str]:
        """The markers that are special tokens, by id: text without special tokens lacks them."""
        return {special[mark]: mark for mark in self.markers if mark in special}

    def new(self, tools: Tools = (), prompt: str | None = None) -> AnswerReader:
        """A reader of one answer. `tools` are those that may be called; `prompt` is the rendered prompt, or its end,
        which tells whether reasoning is open already."""
        types = parameter_types(tools)
        calls = CallReader(self.calls.openings_for(types) if types else (), types)
        if self.calls.channels:
            return ChannelReader(calls, prompt)
        return MarkedReader(ThinkingReader(self.thinking, self.opens_thinking(prompt)), calls)

    def opens_thinking(self, prompt: str | None) -> bool:
        """Whether the answer to a prompt begins inside reasoning."""
        if self.thinking is None or prompt is None:
            return self.thinking is not None and self.thinking.opened
        return prompt.rstrip().endswith(self.thinking.open.rstrip())

    def tool_grammar(
        self, tools: Tools, names: Sequence[str] | None, parallel: bool, prompt: str | None = None
    ) -> str | None:
        """A Lark grammar of answers that call one of `names` (None: of all tools), and more than one if `parallel`.

        None where no tool can be called. Schemas stand in it as they are: compiling it refuses bad ones.
        """
        # Channels are opened by special tokens, which a grammar cannot write: a forced call stands without one.
        thinking = None if self.calls.channels else self.thinking
        return grammar_of(self.calls, thinking, self.opens_thinking(prompt), tools, names, parallel)


class AnswerReader(Protocol):
    """Parses one answer of one stream."""

    @property
    def work(self) -> int:
        """Characters processed so far, counting repeats."""

    @property
    def passes_text(self) -> bool:
        """Whether all text from here on is content as it is: reasoning is over, and no tool can be called."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after more text; an empty list while the parser needs more to decide."""

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the answer."""


class MarkedReader:
    """Reads answers in which markers stand around reasoning and calls: an `AnswerReader`."""

    def __init__(self, thinking: ThinkingReader, calls: CallReader) -> None:
        self._thinking = thinking
        self._calls = calls

    @property
    def work(self) -> int:
        return self._thinking.work + self._calls.work

    @property
    def passes_text(self) -> bool:
        return self._thinking.passed and self._calls.passes_text

    def feed(self, text: str) -> list[Piece]:
        reasoning, answer = self._thinking.feed(text)
        return merged([*_reasoning(reasoning), *self._calls.feed(answer)])

    def finish(self) -> list[Piece]:
        reasoning, answer = self._thinking.finish()
        return merged([*_reasoning(reasoning), *self._calls.feed(answer), *self._calls.finish()])


def parser_for(template: str | None, family: str | None = None) -> Parser:
    """The parser of a model with this chat template; `family` decides where the template shows no calls."""
    calls, why_calls = calls_in(template, family)
    thinking, why_thinking = thinking_in(template, calls)
    return Parser(calls.name, f"{why_calls}; {why_thinking}", calls, thinking)


def parser_named(name: str) -> Parser:
    """A parser by its name; ParamError lists the names there are."""
    found = NAMED.get(name)
    if found is None:
        raise ParamError("parser", f"there is none called {name[:40]!r}; choose one of {', '.join(parser_names())}")
    return Parser(name, f"{name} was asked for", *found)


def parser_names() -> tuple[str, ...]:
    """Every name that `parser_named` takes."""
    return tuple(NAMED)


def _reasoning(text: str) -> list[Piece]:
    return [Reasoning(text)] if text else []
