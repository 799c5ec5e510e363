"""A tiny model behind SmolLM2's vocabulary, for tests of the facades; and the machines that documents must survive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import _redis, proxy, redis_server, small_disk  # noqa: F401 (fixtures)
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM
from kvilt.text.tokenizer import Tokenizer, from_gguf


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


@pytest.fixture(scope="session")
def tiny_executor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    made = load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    yield made
    made.close()


@pytest.fixture
def tiny_llm(tiny_executor: Executor, tokenizer: Tokenizer) -> Iterator[LLM]:
    made = LLM(tiny_executor, tokenizer)
    yield made
    made.documents.close()
