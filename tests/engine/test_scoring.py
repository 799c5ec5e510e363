"""Log-probabilities of prompts through the engine: those of the executor's own scoring, whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from small import PAGES, Ask, Ear, asks, finish, start

from kvilt import Inputs
from kvilt.batch import Batch, Ids, Logits, Row, Score
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.counters import PREEMPTIONS
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended
from kvilt.errors import NumericsError
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import TokenLogprobs, token_logprobs

TEXT = tuple(i * 7 % 61 for i in range(90))
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
BOTH = SamplingParams(max_tokens=12, prompt_logprobs=3)

pytestmark = pytest.mark.usefixtures("nothing_left")


def scored(ear: Ear) -> dict[int, TokenLogprobs]:
    """By position; no position is told twice."""
    told = [(event.start + i, one) for event in ear.scored for i, one in enumerate(event.logprobs)]
    assert len(dict(told)) == len(told)
    return dict(told)


def expected(executor: Executor, ids: Sequence[int], top: int = 3) -> dict[int, TokenLogprobs]:
    """By one row of the executor, without any engine."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        row = Row(Ids(ids), range(len(ids)), kv, want=Score([*ids[1:], 0], top, ranks=True))
        values = executor.run(Batch.of([row])).scores[0]
    return {
        i + 1: TokenLogprobs(
            ids[i + 1],
            float(values.logprobs[i]),
            int(values.ranks[i]),
            tuple(values.top_ids[i].tolist()),
            tuple(values.top_logprobs[i].tolist()),
        )
        for i in range(len(ids) - 1)
    }


def end(ear: Ear) -> Ended:
    assert ear.ends[0] is not None
    return ear.ends[0]


def test_scores_and_ranks_are_those_of_the_raw_logits(executor: Executor) -> None:
    with executor.create_kv_cache() as kv:
        for i, one in enumerate(expected(executor, TEXT[:40]).values()):
            wanted = token_logprobs(executor.step([TEXT[i]], kv)[0], TEXT[i + 1], 3)
            assert (one.token, one.rank, one.top_ids) == (wanted.token, wanted.rank, wanted.top_ids)
            assert one.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            assert one.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


def test_a_prompt_is_scored_in_chunks_and_nothing_is_drawn(executor: Executor, engine: Engine) -> None:
    ear = start(engine, Ask(TEXT, SCORE), progress=True)
    steps = finish(engine)
    assert scored(ear) == expected(executor, TEXT)
    assert (ear.reasons, ear.tokens, steps) == (["length"], [[]], 3)
    assert (end(ear).computed, end(ear).cached) == (90, 0)
    assert [one.tokens for one in ear.progress] == [32, 64, 90]


def test_scored_and_then_continued_as_alone(executor: Executor, engine: Engine) -> None:
    plain = Ask(TEXT, SamplingParams(max_tokens=12))
    ear = start(engine, Ask(TEXT, BOTH))
    finish(engine)
    assert scored(ear) == expected(executor, TEXT)
    assert (ear.reasons, ear.tokens[0]) == (["length"], plain.alone(executor))
    wide = start(engine, Ask(TEXT, SamplingParams(max_tokens=3, prompt_logprobs=3, n=3)))
    finish(engine)
    assert scored(wide) == expected(executor, TEXT)
    assert wide.tokens == [plain.alone(executor)[:3]] * 3


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("params", [SCORE, BOTH], ids=["only", "both"])
def test_every_length_around_chunks_and_pages(
    executor: Executor, engine: Engine, length: int, params: SamplingParams
) -> None:
    ear = start(engine, Ask(TEXT[:length], params))
    finish(engine)
    assert scored(ear) == expected(executor, TEXT[:length])
    assert ear.reasons == ["length"]


def test_what_others_computed_is_not_used_but_others_find_what_was_scored(executor: Executor, engine: Engine) -> None:
    first, second = start(engine, Ask(TEXT, SCORE)), start(engine, Ask(TEXT, BOTH))
    finish(engine)
    assert scored(first) == scored(second) == expected(executor, TEXT)
    assert (end(first).cached, end(second).cached) == (0, 0)
    after = start(engine, Ask(TEXT, SamplingParams(max_tokens=1)))
    finish(engine)
    assert end(after).cached >= 64


def test_samples_of_a_scored_prompt_that_draw_nothing_all_end(engine: Engine) -> None:
    ear = start(engine, Ask(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0, n=3)))
    finish(engine)
    assert ear.reasons == ["length"] * 3
    assert all(one.top_ids == () for one in scored(ear).values())


@pytest.mark.parametrize("exact", [True, False])
def test_behind_a_lent_cache_the_new_tokens_are_scored_the_first_one_too(
    executor: Executor, engine: Engine, exact: bool
) -> None:
    with executor.create_kv_cache() as kv:
        executor.prefill(TEXT[:50], kv)
        ear = start(engine, Ask(TEXT, BOTH), borrowed=BorrowedKV(kv.fork(), exact=exact), continued_tokens=50)
        finish(engine)
        assert kv.num_entries == 50
    whole = expected(executor, TEXT)
    assert scored(ear) == {i: whole[i] for i in range(50, 90)}
    assert (end(ear).computed, end(ear).cached) == (41, 49)


def test_where_the_cache_is_not_here_the_same_tokens_are_scored(executor: Executor, engine: Engine) -> None:
    start(engine, Ask(TEXT, SamplingParams(max_tokens=1)))
    finish(engine)
    ear = start(engine, Ask(TEXT, SCORE), continued_tokens=50)
    finish(engine)
    assert sorted(scored(ear)) == list(range(50, 90))
    assert end(ear).cached == 32, "whole pages before what is to be scored may be found"


def test_behind_an_embedding_the_first_token_has_no_score(executor: Executor, engine: Engine) -> None:
    with executor.create_kv_cache() as kv:
        executor.prefill(Inputs([5, 0], [1], torch.ones(1, executor.spec.hidden_size)), kv)
        ear = start(engine, Ask((5, 0, 9, 8, 7), SCORE), borrowed=BorrowedKV(kv.fork()), continued_tokens=2)
        finish(engine)
    assert sorted(scored(ear)) == [3, 4]


@pytest.mark.parametrize("seed", range(8))
def test_neighbours_chunks_and_preemption_change_no_bit(executor: Executor, seed: int) -> None:
    dice = random.Random(seed)
    many = asks(12, seed)
    alone = [(expected(executor, ask.prompt), ask.alone(executor)) for ask in many]
    engine = Engine(executor, EngineConfig(step_tokens=dice.choice([16, 33, 64]), max_rows=9))
    taken = executor.pool.take([PAGES - 9] * len(executor.layout.groups))
    ears = []
    for ask in many:
        assert ask.params.max_tokens is not None
        scores = dice.random() < 0.7
        tokens = dice.choice([0, ask.params.max_tokens]) if scores else ask.params.max_tokens
        params = SamplingParams.of(ask.params, max_tokens=tokens, prompt_logprobs=3 if scores else None)
        ears.append((start(engine, Ask(ask.prompt, params)), scores, tokens))
        if dice.random() < 0.5:
            engine.step()
    finish(engine)
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    for (ear, scores, tokens), (wanted, said) in zip(ears, alone, strict=True):
        assert scored(ear) == (wanted if scores else {})
        assert ear.tokens[0] == said[:tokens]
    if seed == 0:
        assert engine.metrics.snapshot()[PREEMPTIONS.name]["series"][0]["value"] > 0


def test_scores_that_are_no_numbers_fail_their_row_alone(
    executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, plain = executor.run, Ask(TEXT, SamplingParams(max_tokens=5))
    wanted = plain.alone(executor)

    def run(batch: Batch) -> Logits:
        logits = honest(batch)
        for index, scores in logits.scores.items():
            if batch.rows[index].source.ids[0] == 60:  # type: ignore[union-attr]
                scores.logprobs[1] = float("nan")
        return logits

    monkeypatch.setattr(executor, "run", run)
    bad, good, other = (start(engine, ask) for ask in (Ask((60, 1, 2, 3), SCORE), Ask(TEXT, SCORE), plain))
    finish(engine)
    assert isinstance(bad.error, NumericsError)
    assert (good.reasons, other.tokens[0]) == (["length"], wanted)
