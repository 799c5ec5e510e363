"""Recorded steps of a model with recurrent state: which slots it reads and writes stands in their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, write_tiny_hybrid
from torch import Tensor

from kvilt.batch import Batch, Ids, Last, Row
from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.kv.cache import KVCache
from kvilt.ops import select
from kvilt.sampling.params import SamplingParams

pytest.importorskip("triton")
eager = pytest.importorskip("eager_recorder")

PROMPTS = [[1, 2], [9, 8, 7], [4]]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._NAMED, "interpreted", eager.recording_ops)
        folder = write_tiny_hybrid(Path(tmp_path_factory.mktemp("tiny")))
        with closing(load_executor(folder, RunConfig(backend="interpreted", kv_memory=1 << 22))) as opened:
            yield opened


def assert_near(found: Tensor, truth: Tensor) -> None:
    """Products of more rows, padded ones among them, sum in another order."""
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def decode(kv: KVCache, tokens: list[int]) -> Batch:
    kv.reserve([1] * kv.batch_size)
    return Batch.of([Row(Ids([token]), [kv.lengths[i]], kv, i) for i, token in enumerate(tokens)])


def test_a_replay_reads_and_writes_the_states_of_its_rows(executor: ModelExecutor) -> None:
    """Three rows, padded to four: the same logits and the same states as by the decoder, step after step."""
    with executor.create_kv_cache(3) as kv, executor.create_kv_cache(3) as plain, torch.no_grad():
        executor.prefill(PROMPTS, kv)
        executor.prefill(PROMPTS, plain)
        before = executor.pool.state_store
        assert before is not None
        for step in range(2):  # the first is recorded, the second replayed
            tokens = [step, step + 1, step + 2]
            executor.run(decode(kv, [7, 8, 9]))  # not committed, so it leaves the state as it was
            found = executor.run(decode(kv, tokens)).values
            truth = executor._decoder(decode(plain, tokens), lambda _: None).values
            assert_near(found, truth)
            kv.commit([[token] for token in tokens])
            plain.commit([[token] for token in tokens])
        for row in range(3):
            mine, theirs = (one.row(row).states for one in (kv, plain))
            assert mine is not None and theirs is not None
            last = kv.lengths[row]
            for part in (before.tails, before.memories):
                assert_near(part[:, mine.committed[last]], part[:, theirs.committed[last]])
    assert len(executor._replay._steps) == 1


def test_drafts_leave_a_state_after_each(executor: ModelExecutor) -> None:
    """A row with all its logits is recorded too; of its tokens two are kept."""
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as plain:
        for one in (kv, plain):
            executor.prefill(PROMPTS[0], one)
        kv.reserve(4, drafts=3)
        verified = executor.run(Batch.of([Row(Ids([5, 6, 7, 8]), range(2, 6), kv, want=Last(4))])).values
        kv.commit([[5, 6]])
        truth = [executor.step([token], plain) for token in (5, 6, 9)]
        assert_near(verified[:2], torch.cat(truth[:2]))
        assert_near(executor.step([9], kv), truth[2])


@pytest.mark.slow
def test_tokens_are_those_of_steps_that_are_not_recorded(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for _ in range(2):
        with executor.create_kv_cache(2) as kv:
            found.append(executor.sample_tokens(6, PROMPTS[:2], kv, params=GREEDY))
        monkeypatch.setattr(executor._replay, "run", lambda *_: None)
    assert found[0] == found[1]
    assert all(0 <= token < VOCAB for own in found[0] for token in own)
