"""Chat through the real openai client; the library's own chat is the oracle."""

from __future__ import annotations

import asyncio

import openai
import pytest
from running import QUESTION, Running

from kvilt import LLM
from kvilt.executor.executor import Executor
from kvilt.text.tokenizer import Tokenizer

SHORT = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


def test_an_answer_is_what_the_library_says(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8)
    done = server.openai().chat.completions.create(**SHORT)
    (choice,) = done.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert done.object == "chat.completion"
    assert done.model == "tiny"
    assert done.usage is not None
    assert done.usage.prompt_tokens == expected.usage.prompt_tokens
    assert done.usage.completion_tokens == len(expected.token_ids)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_a_stream_joins_to_the_answer(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8)
    chunks = list(server.openai().chat.completions.create(**SHORT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_gets_the_same(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, max_tokens=8).text

    async def scene() -> None:
        async with server.async_openai() as client:
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**SHORT), client.chat.completions.create(**SHORT, stream=True)
            )
            assert whole.choices[0].message.content == expected
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == expected

    asyncio.run(scene())


def test_models_and_health(server: Running) -> None:
    (model,) = server.openai().models.list()
    assert model.id == "tiny"
    assert server.openai().models.retrieve("tiny").owned_by == "kvilt"
    with pytest.raises(openai.NotFoundError):
        server.openai().models.retrieve("other")
    with server.http() as http:
        assert http.get("/health").json() == http.get("/ready").json() == {"status": "ok"}
