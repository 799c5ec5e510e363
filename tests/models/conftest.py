"""Each family's random model, in transformers and in kvilt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import FAMILIES, random_model, write_checkpoint
from transformers import PreTrainedModel

from kvilt.config import RunConfig
from kvilt.executor.executor import Executor
from kvilt.executor.load import load_executor


@dataclass(frozen=True)
class Pair:
    """The same weights twice."""

    oracle: PreTrainedModel
    executor: Executor

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The oracle's logits, [tokens, vocab]."""
        with torch.no_grad():
            return self.oracle(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = random_model(request.param)
    folder: Path = write_checkpoint(model, tmp_path_factory.mktemp(request.param))
    executor = load_executor(folder, RunConfig(kv_memory=1 << 24))
    yield Pair(model, executor)
    executor.close()
