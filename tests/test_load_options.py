"""The options of loading are one value: `load` and `load_async` take each of them, and refuse others by name."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tiny import write_tiny_of_bytes

import kvilt
from kvilt import LLM, AsyncLLM
from kvilt.config import EngineConfig, GateConfig, RunConfig
from kvilt.errors import ParamError
from kvilt.llm.load_options import LoadFields, LoadOptions, RunFields
from kvilt.store.store import Store

Facade = LLM | AsyncLLM
STORE = Store()
CALLS: list[object] = []
OPTIONS: dict[str, tuple[dict[str, Any], Callable[[Facade], object]]] = {
    "device": ({"device": "cpu"}, lambda llm: True),
    "threads": ({"threads": 1}, lambda llm: True),
    "kv_memory": ({"kv_memory": "2M"}, lambda llm: llm.executor.pool.usage().free < 1 << 14),
    "max_context": ({"max_context": 128}, lambda llm: llm.executor.max_context == 128),
    "kv_dtype": ({"kv_dtype": "float32"}, lambda llm: "float32" in str(llm.executor.layout)),
    "backend": ({"backend": "reference"}, lambda llm: "reference" in llm.executor.pool.identity().numerics),
    "lora_memory": ({"lora_memory": "1M"}, lambda llm: True),
    "gpu_memory": ({"gpu_memory": 0.5}, lambda llm: True),
    "state_every": ({"state_every": 100}, lambda llm: llm.executor.pool.layout.recurrent is None),
    "numa": ({"numa": False}, lambda llm: True),
    "tensor_parallel": ({"tensor_parallel": 2, "device": "cpu"}, lambda llm: llm.executor.ranks == 2),
    "parallel_timeout_s": ({"parallel_timeout_s": 5.0}, lambda llm: llm.executor.ranks == 1),
    "deterministic": ({"deterministic": True}, lambda llm: llm.executor.pool.ops.deterministic),
    "on_fetch": ({"on_fetch": lambda *given: None}, lambda llm: True),
    "on_load": ({"on_load": lambda done, of: CALLS.append((done, of))}, lambda llm: CALLS),
    "engine": ({"engine": EngineConfig(max_rows=3)}, lambda llm: llm.config.max_rows == 3),
    "store": ({"store": STORE}, lambda llm: llm.documents._given is STORE),
    "gate": ({"gate": GateConfig(every=5)}, lambda llm: llm._gate is not None and llm._gate.config.every == 5),
    "context_prefix": ({"context_prefix": "Be brief."}, lambda llm: len(llm.documents.context_prefix) == 9),
    "discover": ({"discover": True}, lambda llm: llm.config.discover),
    "draft": ({"draft": "ngram"}, lambda llm: llm._drafter is not None),
    "draft_tokens": (
        {"draft": "ngram", "draft_tokens": 3},
        lambda llm: llm._drafter is not None and llm._drafter.most == 3,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    yield
    STORE.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_of_bytes(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["load", "load_async"])
def load(request: pytest.FixtureRequest) -> Callable[..., Facade]:
    found: Callable[..., Facade] = getattr(kvilt, request.param)
    return found


def close(llm: Facade) -> None:
    if isinstance(llm, LLM):
        llm.close()
    else:
        asyncio.run(llm.aclose())


@pytest.mark.parametrize("option", OPTIONS)
def test_both_take_every_option(load: Callable[..., Facade], folder: Path, option: str) -> None:
    given, holds = OPTIONS[option]
    CALLS.clear()
    llm = load(folder, **{"kv_memory": "4M", **given})
    try:
        assert holds(llm)
    finally:
        close(llm)


def test_no_option_is_left_out() -> None:
    assert set(OPTIONS) == {field.name for kind in (RunConfig, LoadOptions) for field in dataclasses.fields(kind)}


def test_an_unknown_option_is_refused_with_those_there_are(load: Callable[..., Facade]) -> None:
    with pytest.raises(ParamError) as caught:
        load("no-such-model", kv_memmory="1G")
    assert caught.value.field == "kv_memmory"
    assert str(caught.value).endswith(", ".join(sorted(OPTIONS)))


def test_discover_goes_over_what_the_engine_says(load: Callable[..., Facade], folder: Path) -> None:
    for discover, expected in ((None, True), (False, False), (True, True)):
        llm = load(folder, kv_memory="4M", engine=EngineConfig(discover=True, max_rows=3), discover=discover)
        assert (llm.config.discover, llm.config.max_rows) == (expected, 3)
        close(llm)


def test_both_facades_are_made_of_the_same_parts() -> None:
    assert inspect.signature(LLM) == inspect.signature(AsyncLLM)


def test_what_editors_see_is_what_is_taken() -> None:
    """The typed keywords are written beside the values; names and types must stay the same."""
    options, run = get_type_hints(LoadOptions), get_type_hints(RunConfig)
    seen, seen_run = get_type_hints(LoadFields), get_type_hints(RunFields)
    for name in ("kv_memory", "lora_memory"):
        assert seen_run.pop(name) == run.pop(name) | str  # sizes may be written with a unit
    assert seen_run == run
    assert seen.pop("behind") == options["context_prefix"]
    assert {name: kind for name, kind in seen.items() if name in options} == options
    assert set(seen) == {*options, *get_type_hints(RunFields)}
