"""Answers of a chat in Python and in the terminal: reasoning, content and calls apart, as the server parses them."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.cli.answer_writer import AnswerWriter
from kvilt.engine.event import Ended, TokenEvent
from kvilt.llm import AsyncLLM, ParsedToolCall
from kvilt.llm.answer import Answer, AnswerConfig
from kvilt.llm.chat_parsing import ChatParsing
from kvilt.llm.conversation import Conversation
from kvilt.text.parse import parser_named
from kvilt.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
SAID = "<think>\nIt is Berlin.\n</think>\n\nBerlin."
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="64M", max_context=512) as model:
        model._parser = parser_named("qwen3")
        yield model
        assert model.executor.pool.usage().used == 0


def test_the_reasoning_of_a_chat_stands_beside_its_text(llm: LLM) -> None:
    done = llm.chat(QUESTION, max_tokens=60, choice=[SAID], n=2)
    for one in (done, *done.alternatives):
        assert (one.reasoning, one.text, one.tool_calls) == ("It is Berlin.", "Berlin.", ())
    assert "<think>" in llm.tokenizer.decode(done.token_ids)


def test_a_stream_says_which_pieces_are_reasoning(llm: LLM) -> None:
    stream = llm.stream_chat(QUESTION, max_tokens=60, choice=[SAID])
    pieces = list(stream)
    assert "".join(piece for piece in pieces if piece.reasoning) == "It is Berlin."
    assert "".join(piece for piece in pieces if not piece.reasoning) == "Berlin."
    assert (stream.completion.reasoning, stream.completion.text) == ("It is Berlin.", "Berlin.")


def test_an_answer_that_breaks_off_while_it_reasons_has_no_text(llm: LLM) -> None:
    stream = llm.stream_chat(QUESTION, max_tokens=5, choice=[SAID])
    assert all(piece.reasoning for piece in stream)
    assert stream.completion.text == ""
    assert "It is Berlin.".startswith(stream.completion.reasoning)


def test_a_prompt_without_a_template_is_not_parsed(llm: LLM) -> None:
    assert llm.generate("Say it:", max_tokens=60, choice=[SAID]).text == SAID


def test_the_tools_of_a_chat_are_called(llm: LLM) -> None:
    said = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    done = llm.chat(QUESTION, max_tokens=60, choice=[said], tools=[CLOCK])
    assert (done.text, done.tool_calls) == ("", (ParsedToolCall("clock", "{}"),))
    assert llm.chat(QUESTION, max_tokens=60, choice=[said]).text == said  # there is no tool to call


def test_an_async_chat_is_parsed_too(smollm2_path: Path) -> None:
    async def ask() -> Any:
        async with kvilt.load_async(str(smollm2_path), kv_memory="64M", max_context=512) as model:
            assert isinstance(model, AsyncLLM)
            model._parser = parser_named("qwen3")
            return await model.chat(QUESTION, max_tokens=60, choice=[SAID])

    done = asyncio.run(ask())
    assert (done.reasoning, done.text) == ("It is Berlin.", "Berlin.")


def test_a_conversation_keeps_the_content_and_every_token(llm: LLM) -> None:
    with Conversation(llm) as chat:
        pieces = list(chat.say("Where?", SamplingParams.of(max_tokens=60, choice=[SAID])))
        assert {piece.reasoning for piece in pieces} == {True, False}
        assert chat.turns[0].assistant == "Berlin."
        assert "It is Berlin." in llm.tokenizer.decode(chat.turns[0].ids)


HARMONY = [
    *("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>"),
    *("final", "<|message|>", "Berlin", ".", "<|return|>"),
]
CALLING = ["<|channel|>", "commentary to=functions.clock", "<|message|>", "<|call|>"]


def harmony(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with its special tokens under the names of harmony's."""
    marks = parser_named("harmony").markers
    special = dict(zip((mark for mark in marks if mark.count("<|") == 1), range(3, 17), strict=False))
    return dataclasses.replace(tokenizer, special=special, _special_text={i: text for text, i in special.items()})


@pytest.mark.parametrize(
    ("said", "reasoning", "content", "calls"),
    [(HARMONY, "Hm.", "Berlin.", ()), (CALLING, "", "", (ParsedToolCall("clock", "{}"),))],
)
def test_the_channels_of_harmony_are_special_tokens(
    llm: LLM, said: list[str], reasoning: str, content: str, calls: tuple[ParsedToolCall, ...]
) -> None:
    tokenizer, parser = harmony(llm.tokenizer), parser_named("harmony")
    ends = frozenset(tokenizer.special[mark] for mark in ("<|return|>", "<|call|>"))
    parsing = ChatParsing(parser, parser.special_markers(tokenizer.special), [CLOCK], "<|start|>assistant")
    answer = Answer(AnswerConfig(tokenizer, SamplingParams(), ends, 1, parsing=parsing))
    pieces = []
    for text in said:
        mark = tokenizer.special.get(text)
        for token in [mark] if mark is not None else tokenizer.encode(text, add_special=False):
            answer.on_event(TokenEvent(0, token))
            pieces += answer.samples[0].pieces()
    answer.on_event(Ended(0, "stop"))
    pieces += answer.samples[0].pieces()
    done = answer.completion()
    assert (done.reasoning, done.text, done.tool_calls) == (reasoning, content, calls)
    assert "".join(piece for piece in pieces if piece.reasoning) == reasoning
    assert "".join(piece for piece in pieces if not piece.reasoning) == content


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_dims_reasoning_and_a_program_gets_it_apart(monkeypatch: Any, terminal: bool) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    writer = AnswerWriter()
    for text, reasoning in (("It is", True), (" Berlin.", True), ("Berlin.", False)):
        writer.piece(text, reasoning=reasoning)
    writer.end_line()
    if terminal:
        assert out.getvalue() == "\x1b[2mIt is\x1b[22m\x1b[2m Berlin.\x1b[22m\n\nBerlin.\n"
    else:
        assert (out.getvalue(), err.getvalue()) == ("Berlin.\n", "It is Berlin.\n\n")
