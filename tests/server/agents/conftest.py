"""A model with room for the prompts of agents."""

from __future__ import annotations

import pytest
from scripted_server import CONTEXT
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def roomy(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = tmp_path_factory.mktemp("roomy")
    write_tiny(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=CONTEXT)
    made = load_executor(folder, RunConfig(kv_memory=1 << 25, backend="native", threads=1))
    made.close = lambda: None  # type: ignore[method-assign]  # it outlives each server
    return made
