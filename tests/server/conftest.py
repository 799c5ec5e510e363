"""One tiny model behind SmolLM2's vocabulary for all tests of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running import Running, running
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer, from_gguf

CONTEXT = 1024


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_tiny(
        tmp_path_factory.mktemp("served"), vocab_size=tokenizer.vocab_size, max_position_embeddings=CONTEXT
    )
    made = load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    made.close = lambda: None  # type: ignore[method-assign]  # it outlives each server
    return made


@pytest.fixture(scope="module")
def server(executor: Executor, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with default settings, for tests that leave it as it was."""
    executor.prefixes.clear()  # it may hold prompts of other modules, and tests count what is found again
    with running(executor, tokenizer, kv_dir=tmp_path_factory.mktemp("kv")) as one:
        yield one


Start = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def start(executor: Executor, tokenizer: Tokenizer) -> Start:
    """Servers with settings of their own."""
    made: Any = partial(running, executor, tokenizer)
    return made


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    yield exporter
    provider.shutdown()
