"""An executor whose window group has few pages: the same bits as with equal groups, and inputs that are longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import load_mixed
from tiny import VOCAB

from kvilt.batch import Batch, Ids, Row
from kvilt.errors import ContextOverflow, PoolExhausted
from kvilt.executor.executor import ModelExecutor
from kvilt.sampling.params import SamplingParams

EQUAL, FEW = (40, 40), (40, 9)
LONG = [(i * 17 + i // 7) % VOCAB for i in range(400)]  # 13 pages
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> list[ModelExecutor]:
    folder = tmp_path_factory.mktemp("mixed")
    return [load_mixed(folder, pages, backend="native") for pages in (EQUAL, FEW)]


@pytest.fixture(autouse=True)
def nothing_left(executors: list[ModelExecutor]) -> None:
    for one in executors:
        assert one.pool.usage().used == 0


def test_a_prefill_is_the_same_to_the_bit(executors: list[ModelExecutor]) -> None:
    blobs, logits = [], []
    for one in executors:
        with one.create_kv_cache() as kv:
            one.prefill(LONG[:150], kv)
            one.prefill(LONG[150:], kv)
            blobs.append(kv.serialize())
            logits.append(one.step([5], kv))
    assert blobs[0] == blobs[1]
    assert torch.equal(*logits)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_sampled_tokens_are_the_same(executors: list[ModelExecutor], params: SamplingParams) -> None:
    drawn = []
    for one in executors:
        with one.create_kv_cache() as kv:
            drawn.append(one.sample_tokens(90, LONG, kv, params=params))
            drawn[-1] += one.sample_tokens(10, drawn[-1][0][-1:], kv, params=params)
    assert drawn[0] == drawn[1]


def test_scores_are_the_same(executors: list[ModelExecutor]) -> None:
    scores = []
    for one in executors:
        with one.create_kv_cache() as kv:
            one.prefill(LONG[:70], kv)
            scores.append(one.score(LONG[70:], kv, top=2))
            assert kv.lengths == (70,)
    assert torch.equal(scores[0].logprobs, scores[1].logprobs)
    assert torch.equal(scores[0].top_ids, scores[1].top_ids)


def test_saved_kv_goes_from_one_to_the_other(executors: list[ModelExecutor], tmp_path: Path) -> None:
    for source, target in (executors, executors[::-1]):
        with source.create_kv_cache() as kv:
            source.prefill(LONG, kv)
            kv.save(tmp_path / "kv")
            expected = source.step([7], kv)
        with target.open_kv_cache(tmp_path / "kv") as again, again.fork() as fork:
            assert torch.equal(target.step([7], fork), expected)
        with target.create_kv_cache() as copy, source.create_kv_cache() as kv:
            source.prefill(LONG, kv)
            copy.select_and_copy_from(kv, 0)
            assert torch.equal(target.step([7], copy), expected)


def test_one_step_has_room_for_what_the_windows_have_beside_two(executors: list[ModelExecutor]) -> None:
    """A caller that runs rows itself gets as much as there is, and hears of the rest; the cache stays usable."""
    few = executors[1]
    assert few.pool.step_tokens == 32
    with few.create_kv_cache() as kv:
        with pytest.raises(PoolExhausted, match="13 more KV pages are needed and 9 of 9 are free"):
            kv.reserve(len(LONG))
        kv.reserve(32)
        few.run(Batch.of([Row(Ids(LONG[:32]), range(32), kv)]))
        kv.commit([LONG[:32]])
        assert kv.lengths == (32,)


def test_rows_of_a_batch_share_the_windows(executors: list[ModelExecutor]) -> None:
    blobs = []
    for one in executors:
        with one.create_kv_cache(2) as kv:
            one.prefill([LONG[:100], LONG[50:250]], kv)
            blobs.append(kv.serialize())
    assert blobs[0] == blobs[1]
    with executors[1].create_kv_cache(3) as kv:
        executors[1].prefill([LONG[:60]] * 3, kv)
        before = kv.serialize()
        with pytest.raises(PoolExhausted):  # three windows are more than there are
            executors[1].prefill([LONG[60:250]] * 3, kv)
        assert kv.serialize() == before


def test_the_longest_sequence_is_that_of_the_full_group(tmp_path: Path) -> None:
    small = load_mixed(tmp_path, (12, 9))
    with small.create_kv_cache() as kv:
        assert kv.capacity == 12 * 32
        small.prefill(LONG[: 12 * 32], kv)
        with pytest.raises(ContextOverflow):
            small.prefill([1], kv)
        assert [len(pages) for pages in kv.pages()] == [12, 3]


def test_a_fork_leaves_the_first_as_it_was(executors: list[ModelExecutor]) -> None:
    answers = []
    for one in executors:
        with one.create_kv_cache() as kv:
            one.prefill(LONG[:300], kv)
            with kv.fork() as fork:
                one.prefill(LONG[300:], fork)
                answers.append(one.step([3], fork))
            kv.truncate(290)
            answers.append(one.step([3], kv))
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
