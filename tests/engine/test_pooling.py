"""Embeddings of prompts through the engine: the pooled states of Hugging Face's model, whatever else happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from small import CONTEXT, WINDOW, Ear, asks, finish, start
from tiny import write_tiny
from transformers import AutoModel

from kvilt.batch import Batch, Ids, Logits, Nothing, Pooled, Row
from kvilt.engine.engine import Engine
from kvilt.engine.event import Event, PooledPrompt
from kvilt.engine.pooling import Pooling, PoolingKind
from kvilt.engine.request import Request
from kvilt.errors import InputError, NumericsError
from kvilt.executor.protocol import Executor

TEXT = tuple(i * 7 % 61 for i in range(90))
KINDS: tuple[PoolingKind, ...] = ("mean", "last")

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass(eq=False)
class Embedded(Ear):
    """Hears the embedding too."""

    found: list[torch.Tensor] = field(default_factory=list)

    def on_event(self, event: Event) -> bool:
        if isinstance(event, PooledPrompt):
            self.found.append(torch.tensor(event.values))
            return False
        return super().on_event(event)


def embed(engine: Engine, ids: Sequence[int], kind: PoolingKind) -> Embedded:
    ear = Embedded()
    engine.add(engine.prepare(Request(ids, pooling=kind, reuse=kind == "last"), ear))
    return ear


def whole(executor: Executor, ids: Sequence[int], kind: PoolingKind) -> torch.Tensor:
    """By one row of the executor, without any engine."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        row = Row(Ids(ids), range(len(ids)), kv, want=Pooled(kind == "last"))
        pooled = executor.run(Batch.of([row])).hidden[0]
    return pooled.float() / (len(ids) if kind == "mean" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_pooled_state_of_the_original(executor: Executor, tmp_path: Path, kind: PoolingKind) -> None:
    window = WINDOW if any(group.window_pages is not None for group in executor.layout.groups) else None
    folder = write_tiny(tmp_path, sliding_window=window, max_position_embeddings=CONTEXT, model_type="mistral")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([TEXT])).last_hidden_state[0]
    expected = states.mean(0) if kind == "mean" else states[-1]
    found = whole(executor, TEXT, kind)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.9999
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)  # keys and values are half floats


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_pooled_in_chunks_beside_others(executor: Executor, engine: Engine, kind: PoolingKind) -> None:
    ears = [embed(engine, TEXT, kind), embed(engine, TEXT[:1], kind)]
    others = [start(engine, one) for one in asks(2, 1)]
    finish(engine)
    for ear, ids in zip(ears, (TEXT, TEXT[:1]), strict=True):
        (found,) = ear.found
        torch.testing.assert_close(found, whole(executor, ids, kind), atol=1e-5, rtol=1e-5)
        assert ear.tokens == [[]]
    assert all(ear.ends[0] is not None for ear in others)


def test_the_last_state_reuses_a_prefix_and_a_mean_does_not(executor: Executor, engine: Engine) -> None:
    for kind, cached in (("last", False), ("last", True), ("mean", False)):
        ear = embed(engine, TEXT, kind)
        finish(engine)
        (found,) = ear.found
        torch.testing.assert_close(found, whole(executor, TEXT, kind), atol=1e-5, rtol=1e-5)
        assert ear.ends[0] is not None
        assert (ear.ends[0].cached > 0) == cached


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_after_a_preemption_counts_once(executor: Executor, kind: PoolingKind) -> None:
    pooling = Pooling(kind, len(TEXT))
    for cuts in ((0, 20, 37), (0, 10, 50, 90)):  # it was preempted after 37 tokens, and began again
        assert pooling.event() is None
        with executor.create_kv_cache() as kv:
            for begin, stop in pairwise(cuts):
                kv.reserve(stop - begin)
                ids, want = TEXT[begin:stop], pooling.want(begin, stop) or Nothing()
                row = Row(Ids(ids), range(begin, stop), kv, want=want)
                pooling.watcher(stop)(row, executor.run(Batch.of([row])), 0)
                kv.commit([ids])
    found = pooling.event()
    assert found is not None
    torch.testing.assert_close(torch.tensor(found.values), whole(executor, TEXT, kind), atol=1e-5, rtol=1e-5)


def test_states_that_are_no_numbers_fail_their_row(executor: Executor) -> None:
    pooling = Pooling("mean", 1)
    row = Row(Ids(TEXT[:1]), range(1), executor.create_kv_cache(), want=Pooled())
    with row.cache, pytest.raises(NumericsError):
        pooling.watcher(1)(row, Logits(torch.zeros(0), (0, 0), {}, {0: torch.tensor([float("nan")])}), 0)


def test_a_row_pools_tokens_that_it_has(executor: Executor) -> None:
    with executor.create_kv_cache() as kv:
        kv.reserve(4)
        with pytest.raises(InputError, match="none from 4"):
            executor.run(Batch.of([Row(Ids(TEXT[:4]), range(4), kv, want=Pooled(first=4))]))
