"""Documents in streams, through both facades, on a tiny model: the same tokens and counts as without a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from kvilt.blend.recipe import Recipe
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.executor import Executor
from kvilt.executor.load import load_executor
from kvilt.llm import LLM, AsyncLLM, Completion
from kvilt.text.tokenizer import Tokenizer, from_gguf

ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889. " * 3
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by two people. " * 3
ASKED = [{"role": "user", "content": "How tall is the Eiffel Tower?"}]
LOOSE = Recipe(0.2, min_gain=0.0)
GIVEN: dict[str, Any] = {"documents": [ONE, TWO], "recipe": LOOSE, "max_tokens": 6}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    made = load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    yield made
    made.close()


@pytest.fixture
def llm(executor: Executor, tokenizer: Tokenizer) -> Iterator[LLM]:
    made = LLM(executor, tokenizer)
    yield made
    made.documents.close()


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.usage.blended_reused == other.usage.blended_reused > 0
    assert one.usage.recipe == other.usage.recipe == LOOSE.name


def test_a_stream_of_documents(llm: LLM) -> None:
    expected = llm.generate("So", **GIVEN)
    stream = llm.stream("So", **GIVEN)
    assert "".join(stream) == expected.text
    same(stream.completion, expected)


def test_a_chat_of_documents_piece_by_piece(llm: LLM) -> None:
    expected = llm.chat(ASKED, **GIVEN)
    stream = llm.stream_chat(ASKED, **GIVEN)
    assert "".join(stream) == expected.text
    same(stream.completion, expected)


def test_a_stream_of_documents_continues_no_cache(llm: LLM) -> None:
    with llm.prefill("x") as kv:
        with pytest.raises(InputError, match="leave out kv"):
            llm.stream("So", kv=kv, **GIVEN)
        with pytest.raises(InputError, match="leave out kv"):
            llm.stream_chat(ASKED, kv=kv, **GIVEN)


def test_streams_for_event_loops(llm: LLM, executor: Executor, tokenizer: Tokenizer) -> None:
    expected = llm.generate("So", **GIVEN), llm.chat(ASKED, **GIVEN)

    async def ask() -> list[Completion]:
        many = AsyncLLM(executor, tokenizer)
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
