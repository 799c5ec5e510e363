"""The options of a request are one value: methods of both facades take each of them and refuse others by name."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from lora_files import write_lora
from tiny import write_tiny
from torch import Tensor

from kvilt import LLM, AsyncLLM, SamplingParams
from kvilt.batch import Base
from kvilt.blend import BlendRetriever, BlendRetrieverResult, BlendRetrieverTask, Recipe, SelectiveBlend
from kvilt.config import RunConfig
from kvilt.engine.request import Request
from kvilt.engine.sessions.session import SessionOptions
from kvilt.errors import InputError, ParamError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.llm.documents import DocumentInput
from kvilt.llm.options import CallFields, RequestFields, RequestOptions
from kvilt.models.spec import NoRope
from kvilt.sampling.constraint import SHORT_NAMES
from kvilt.sampling.fields import SamplingFields
from kvilt.text.tokenizer import Tokenizer, from_gguf

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
DOCUMENT = "Once upon a time there was a king who had three daughters, and all of them were beautiful."
GIVEN: dict[str, Any] = {
    "generate": "What now?",
    "stream": "What now?",
    "chat": [{"role": "user", "content": "What now?"}],
    "stream_chat": [{"role": "user", "content": "What now?"}],
    "blend": ["Read this.", DOCUMENT, "What now?"],
}
METHODS = list(GIVEN)
Call = Callable[..., tuple[list[int], Request]]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    made = load_executor(folder, RunConfig(kv_memory=1 << 21, backend="native", threads=1))
    made.load_lora(write_lora(tmp_path_factory.mktemp("lora") / "legal"))
    return made


@pytest.fixture(params=["LLM", "AsyncLLM"])
def call(request: pytest.FixtureRequest, executor: Executor, tokenizer: Tokenizer) -> Iterator[Call]:
    """Calls a method of a facade: the tokens of its answer, and the request that the engine got."""
    made: list[Request] = []

    def spied(llm: Any) -> None:
        honest = llm.engine.prepare
        llm.engine.prepare = lambda one, *more: (made.append(one), honest(one, *more))[1]

    if request.param == "LLM":
        llm = LLM(executor, tokenizer)
        spied(llm)
        yield lambda method, **fields: (tokens(llm, method, fields), made[-1])
    else:

        async def life(method: str, fields: dict[str, Any]) -> list[int]:
            many = AsyncLLM(executor, tokenizer)
            spied(many)
            try:
                return await async_tokens(many, method, fields)
            finally:
                many._driver.close()

        yield lambda method, **fields: (asyncio.run(life(method, fields)), made[-1])
    executor.prefixes.clear()


def tokens(llm: LLM, method: str, fields: dict[str, Any]) -> list[int]:
    found = getattr(llm, method)(GIVEN[method], SHORT, **fields)
    done = found.completion if method.startswith("stream") else found
    if done.kv is not None:
        done.kv.close()
    return list(done.token_ids)


async def async_tokens(llm: AsyncLLM, method: str, fields: dict[str, Any]) -> list[int]:
    done = await getattr(llm, method)(GIVEN[method], SHORT, **fields)
    if method.startswith("stream"):
        async with done as stream:
            async for _ in stream:
                pass
            done = stream.completion
    if done.kv is not None:
        done.kv.close()
    return list(done.token_ids)


class NothingFound(BlendRetriever, BlendRetrieverTask):
    """A retriever that has no KV."""

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> BlendRetrieverTask:
        self._tokens = sum(map(len, full_prompts))
        return self

    def result(self, layer_id: int) -> BlendRetrieverResult:
        nothing = torch.zeros(self._tokens, dtype=torch.int64)
        return BlendRetrieverResult(None, None, nothing, nothing)


def first_layer() -> SelectiveBlend:
    return SelectiveBlend([NoRope()] * 3, check_layer=0, selects_only=True)


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Request], bool]]] = {
    "id": ({"id": "mine"}, lambda request: request.id == "mine"),
    "priority": ({"priority": 3}, lambda request: request.priority == 3),
    "tenant": ({"tenant": "alice/one"}, lambda request: (request.tenant, request.owner) == ("alice/one", "alice")),
    "keep_kv": ({"keep_kv": True}, lambda request: request.keep_kv),
    "documents": ({"documents": [DOCUMENT]}, lambda request: len(request.documents) == 1),
    "recipe": ({"recipe": Recipe(ratio=0.5)}, lambda request: request.recipe.ratio == 0.5),
    "retriever": (
        {"retriever": NothingFound(), "discover": True},
        lambda request: isinstance(request.blend_plugins.retriever, NothingFound),
    ),
    "blend_executor": (
        {"blend_executor": first_layer, "discover": True},
        lambda request: request.blend_plugins.executor is first_layer,
    ),
    "discover": ({"discover": True}, lambda request: request.discover is True),
    "lora": ({"lora": "legal"}, lambda request: request.adapter != Base()),
    "lora_scale": ({"lora": "legal", "lora_scale": 0.5}, lambda request: getattr(request.adapter, "scale", 0) == 0.5),
    "session": ({"session": SessionOptions("mine", done=True)}, lambda request: request.session == "mine"),
    "prediction": ({"prediction": "What then?"}, lambda request: len(request.predicted) > 1),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_every_option(call: Call, method: str, option: str) -> None:
    fields, holds = OPTIONS[option]
    if (method, option) == ("blend", "documents"):
        with pytest.raises(ParamError, match="documents: are parts of the prompt here"):
            call(method, **fields)
        return
    answer, request = call(method, **fields)
    assert len(answer) == 2
    assert holds(request)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_cache(call: Call, executor: Executor, tokenizer: Tokenizer, method: str) -> None:
    with LLM(executor, tokenizer).prefill("Once upon a time") as kv:
        if method == "blend":
            with pytest.raises(InputError, match="leave out kv"):
                call(method, kv=kv)
            return
        answer, request = call(method, kv=kv)
        assert len(answer) == 2
        assert not request.reuse
        held = kv.num_entries
    assert (request.continued_tokens == held) == (method in ("generate", "stream"))


def test_no_option_is_left_out() -> None:
    assert {*OPTIONS, "kv"} == {field.name for field in dataclasses.fields(RequestOptions)}


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_option_is_refused_with_those_there_are(call: Call, method: str) -> None:
    with pytest.raises(ParamError) as caught:
        call(method, keep_vk=True)
    assert caught.value.field == "keep_vk"
    for kind in (RequestOptions, SamplingParams):
        for field in dataclasses.fields(kind):
            assert f" {field.name}" in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_ratio_and_strategy_are_for_blend_alone(call: Call, method: str) -> None:
    if method == "blend":
        _, request = call(method, ratio=0.3, strategy="head", recipe=Recipe(repair=0.5))
        assert request.recipe == Recipe(0.3, "head", repair=0.5)
        return
    with pytest.raises(ParamError, match="ratio"):
        call(method, ratio=0.3)


def test_a_handle_is_refused_by_name_where_there_are_none(executor: Executor, tokenizer: Tokenizer) -> None:
    llm = LLM(executor, tokenizer)
    for method in ("generate", "chat"):
        with pytest.raises(ParamError, match="kv: is a KVCache here; handles by id are for AsyncLLM"):
            tokens(llm, method, {"kv": "0" * 32})


def test_several_prompts_are_requests_with_ids_of_their_own(executor: Executor, tokenizer: Tokenizer) -> None:
    llm, made = LLM(executor, tokenizer), []
    honest = llm.engine.prepare
    llm.engine.prepare = lambda one, *more: (made.append(one.id), honest(one, *more))[1]  # type: ignore[method-assign]
    assert len(llm.generate(["One", "Two"], SHORT, id="mine")) == 2
    assert made == ["mine-0", "mine-1"]


def test_what_editors_see_is_what_is_taken() -> None:
    """The typed keywords are written beside the values; names and types must stay the same, but for documents, which
    callers may give with titles."""
    options, sampling = get_type_hints(RequestOptions), get_type_hints(SamplingParams)
    assert get_type_hints(RequestFields) == options | {"documents": Sequence[DocumentInput]}
    seen = get_type_hints(SamplingFields)
    assert {name: kind for name, kind in seen.items() if name not in SHORT_NAMES} == sampling
    assert set(seen) - set(sampling) == set(SHORT_NAMES)
    assert not set(options) & set(seen)
    assert set(get_type_hints(CallFields)) == {*options, *seen}
