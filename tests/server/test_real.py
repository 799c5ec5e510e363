"""SmolLM2 behind the server: what people will do with it first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running, running

from kvilt import LLM
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
OPTIONS = {"include_usage": True}


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Iterator[Executor]:
    executor = load_executor(smollm2_path, RunConfig(kv_memory=1 << 28))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def smol(real: Executor, tokenizer: Tokenizer) -> Iterator[Running]:
    closes, real.close = real.close, lambda: None  # type: ignore[method-assign]
    with running(real, tokenizer, names=("smollm2",)) as server:
        yield server
    real.close = closes  # type: ignore[method-assign]


def test_a_conversation(smol: Running, real: Executor, tokenizer: Tokenizer) -> None:
    client = smol.openai()
    first = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=24, temperature=0)
    said = first.choices[0].message
    assert "Berlin" in (said.content or "")
    assert said.content == LLM(real, tokenizer).chat(QUESTION, max_tokens=24).text
    more = [*QUESTION, said, {"role": "user", "content": "And of Italy?"}]
    chunks = client.chat.completions.create(
        model="smollm2",
        messages=more,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    given = [*QUESTION, {"role": "assistant", "content": said.content}, more[-1]]
    assert text == LLM(real, tokenizer).chat(given, max_tokens=24).text
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 32, "the beginning was there"


def test_a_schema_and_a_forced_call(smol: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    fields = {"model": "smollm2", "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    done = smol.openai().chat.completions.create(**fields, response_format=given)
    assert set(json.loads(done.choices[0].message.content or "")) == {"city", "is_capital"}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    called = smol.openai().chat.completions.create(
        **fields, tools=[tool], tool_choice={"type": "function", "function": {"name": "look_up"}}
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) == {"city", "is_capital"}
    assert called.choices[0].finish_reason == "tool_calls"


def test_perplexity_by_echo(smol: Running) -> None:
    """Text that makes sense is likelier than the same words in disorder."""

    def loss(text: str) -> float:
        fields = {"model": "smollm2", "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = smol.openai().completions.create(**fields).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        return -sum(logprobs.token_logprobs[1:]) / (len(logprobs.token_logprobs) - 1)

    assert loss("The capital of France is Paris.") < 3 < loss("Paris capital. is France The of")
