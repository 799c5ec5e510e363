"""Documents in streams, through both facades, on a tiny model: the same tokens and counts as without a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvilt.blend.recipe import Recipe
from kvilt.errors import InputError
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM, AsyncLLM, Completion
from kvilt.text.tokenizer import Tokenizer

ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889. " * 3
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by two people. " * 3
ASKED = [{"role": "user", "content": "How tall is the Eiffel Tower?"}]
LOOSE = Recipe(0.2, min_gain=0.0)
GIVEN: dict[str, Any] = {"documents": [ONE, TWO], "recipe": LOOSE, "max_tokens": 6}


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.usage.blended_reused == other.usage.blended_reused > 0
    assert one.usage.recipe == other.usage.recipe == LOOSE.name


def test_a_stream_of_documents(tiny_llm: LLM) -> None:
    expected = tiny_llm.generate("So", **GIVEN)
    stream = tiny_llm.stream("So", **GIVEN)
    assert "".join(stream) == expected.text
    same(stream.completion, expected)


def test_a_chat_of_documents_piece_by_piece(tiny_llm: LLM) -> None:
    expected = tiny_llm.chat(ASKED, **GIVEN)
    stream = tiny_llm.stream_chat(ASKED, **GIVEN)
    assert "".join(stream) == expected.text
    same(stream.completion, expected)


def test_a_stream_of_documents_continues_no_cache(tiny_llm: LLM) -> None:
    with tiny_llm.prefill("x") as kv:
        with pytest.raises(InputError, match="leave out kv"):
            tiny_llm.stream("So", kv=kv, **GIVEN)
        with pytest.raises(InputError, match="leave out kv"):
            tiny_llm.stream_chat(ASKED, kv=kv, **GIVEN)


def test_streams_for_event_loops(tiny_llm: LLM, tiny_executor: Executor, tokenizer: Tokenizer) -> None:
    expected = tiny_llm.generate("So", **GIVEN), tiny_llm.chat(ASKED, **GIVEN)

    async def ask() -> list[Completion]:
        many = AsyncLLM(tiny_executor, tokenizer)
        try:
            streams = [await many.stream("So", **GIVEN), await many.stream_chat(ASKED, **GIVEN)]
            for stream in streams:
                assert "".join([delta.text async for delta in stream])
            return [stream.completion for stream in streams]
        finally:
            await asyncio.to_thread(many._driver.close)
            many.documents.close()

    for one, other in zip(asyncio.run(ask()), expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("wrong", ["one text", b"bytes", {"text": "one"}, 5, iter(["a", "b"])])
def test_documents_are_a_list(tiny_llm: LLM, wrong: Any) -> None:
    """A text is a sequence of texts, too: each letter would be a document."""
    with pytest.raises(InputError, match="documents is a list"):
        tiny_llm.generate("So", documents=wrong)
    with pytest.raises(InputError, match="documents is a list"):
        tiny_llm.chat([{"role": "user", "content": "So"}], documents=wrong)
    with pytest.raises(InputError, match="documents is a list"):
        tiny_llm.stream_chat([{"role": "user", "content": "So"}], documents=wrong)
    with pytest.raises(InputError, match="at least two parts"):
        tiny_llm.blend(wrong)
