"""The blend interfaces driven by a forward that is not ours, with the numbers of our engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from plain_llama import PlainLlama
from tiny import write_tiny_of_bytes

import kvilt
from kvilt.blend import SelectiveBlend, key_rotations
from kvilt.blend.recipe import Recipe
from kvilt.llm import LLM

SYSTEM, QUESTION = "Answer from the passages.\n", "Which river ends in the Black Sea?"
PASSAGES = [
    "The Elbe flows through Dresden.\n",
    "The Danube flows through Vienna.\n",
    "The Rhine flows through Basel.\n",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_of_bytes(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with kvilt.load(folder, backend="reference", kv_dtype="float32", kv_memory="16M") as made:
        yield made


@pytest.mark.parametrize("check_layer", [0, 1])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 1.0])
def test_a_plain_forward_has_the_numbers_of_the_engine(llm: LLM, folder: Path, ratio: float, check_layer: int) -> None:
    llm.warm(PASSAGES)
    parts = [llm.tokenizer.encode(text, add_special=False) for text in (SYSTEM, *PASSAGES, QUESTION)]
    starts = torch.tensor([len(part) for part in parts]).cumsum(0)[:-1].tolist()
    ids = torch.tensor([token for part in parts for token in part])
    task = llm.retriever().new_request([ids], [starts])
    blend = SelectiveBlend(key_rotations(llm.executor.spec), ratio, check_layer)
    plain = PlainLlama(folder).logprobs(ids, task, blend)

    recipe = Recipe(ratio, "deviation", check_layer=check_layer, repair=0.0, min_gain=0.0)
    done = llm.blend([SYSTEM, *PASSAGES, QUESTION], recipe=recipe, max_tokens=1, temperature=0.0, logprobs=5)
    assert done.usage.blended_recomputed == int(ratio * sum(map(len, parts[1:-1])))
    assert done.logprobs is not None
    found, expected = done.logprobs[0], plain.topk(5)
    assert list(found.top_ids) == expected.indices.tolist()
    assert list(found.top_logprobs) == pytest.approx(expected.values.tolist(), abs=1e-4)


def test_ratios_make_a_difference(llm: LLM, folder: Path) -> None:
    """Else the comparison above would show nothing."""
    llm.warm(PASSAGES)
    found = []
    for ratio in (0.0, 0.2, 0.5, 1.0):
        recipe = Recipe(ratio, "deviation", repair=0.0, min_gain=0.0)
        done = llm.blend([SYSTEM, *PASSAGES, QUESTION], recipe=recipe, max_tokens=1, temperature=0.0, logprobs=1)
        assert done.logprobs is not None
        found.append(done.logprobs[0].logprob)
    assert min(abs(a - b) for a, b in pairwise(found)) > 1e-3
