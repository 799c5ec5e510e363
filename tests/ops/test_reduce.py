"""Reductions of logits: every instruction set against torch, a row alone against the same row among others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _kvilt_native
import pytest
import torch
from effort import examples, some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.ops.contract import Draws, RowLogprobs
from kvilt.ops.logprobs import row_logprobs
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.native.reduce import NativeReductions
from kvilt.sampling.draw import draw, draws_of
from kvilt.sampling.noise import fold_seed, row_key
from kvilt.sampling.sampler import SamplingState, sample

INF, NAN = float("inf"), float("nan")
Every = dict[tuple[str, int], NativeReductions]
WAYS = [(isa, threads) for isa in _kvilt_native.available_isas() for threads in (1, 2)]
SIZES = [1, 2, 15, 16, 17, 33, 1_000, 5_003]

PARAMS = [
    SamplingParams.of(temperature=0.8, **fields)
    for fields in (
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 10**20},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"typical_p": 0.6},
        {"top_k": 60, "top_p": 0.7, "min_p": 0.02},
        {"top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    )
]


@pytest.fixture(scope="module")
def every() -> Every:
    """By instruction set and number of threads."""
    return {(isa, threads): NativeOps(threads, isa).reductions for isa, threads in WAYS}


@pytest.fixture(params=WAYS, ids=str)
def own(request: pytest.FixtureRequest, every: Every) -> NativeReductions:
    return every[request.param]


def rows_of(vocab: int, seed: int = 0) -> Tensor:
    """Flat, ordinary, peaked, tied, sparse and single-token rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(8, vocab, generator=generator) * torch.tensor([0, 0.1, 1, 3, 12, 3, 3, 3.0])[:, None]
    rows[2] = (rows[2] * 2).round() / 2
    rows[5, torch.rand(vocab, generator=generator) < 0.9] = -INF
    rows[6] = -INF
    rows[5, vocab // 2] = rows[6, vocab - 1] = 1.5
    rows[7] += 1_000.0
    return rows


def keys(count: int, seed: int = 0) -> list[int]:
    return [row_key(fold_seed(seed), 0, position) for position in range(count)]


def same(found: RowLogprobs, other: RowLogprobs) -> bool:
    pairs = zip(fields_of(found), fields_of(other), strict=True)
    return all(torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)) for a, b in pairs)


def fields_of(found: RowLogprobs) -> tuple[Tensor, ...]:
    return found.logprobs, found.ranks, found.top_ids, found.top_logprobs


@pytest.mark.parametrize("vocab", SIZES)
def test_the_argmax_is_the_first_largest(own: NativeReductions, vocab: int) -> None:
    logits = rows_of(vocab)
    ids, peaks = own.argmax(logits)
    assert ids.tolist() == logits.numpy().argmax(-1).tolist()
    assert torch.equal(peaks, logits.amax(-1))
    for place in {0, vocab // 2, vocab - 1}:
        logits[3, place:] = NAN
        ids, peaks = own.argmax(logits)
        assert int(ids[3]) == place and peaks.isnan().tolist() == [row == 3 for row in range(8)]
        logits[3] = -INF
        assert own.argmax(logits)[1][3] == -INF


@pytest.mark.parametrize("vocab", SIZES)
def test_draws_are_those_of_torch(own: NativeReductions, vocab: int) -> None:
    logits = rows_of(vocab).repeat(len(PARAMS), 1)
    params = [one for one in PARAMS for _ in range(8)]
    for seed in range(3):
        drawn = own.draw(logits, draws_of(range(80), params, keys(80, seed)))
        assert torch.equal(drawn, draw(logits, range(80), params, keys(80, seed)))


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0, 30.0])
def test_draws_are_those_of_torch_over_many_seeds(every: Every, scale: float) -> None:
    logits = torch.randn(1, 3_001, generator=torch.Generator().manual_seed(3)) * scale
    plain = [SamplingParams(temperature=0.9)] * 2_000
    expected = draw(logits.expand(2_000, -1), range(2_000), plain, keys(2_000))
    for own in every.values():
        assert torch.equal(own.draw(logits, draws_of([0] * 2_000, plain, keys(2_000))), expected)


def test_draws_from_a_real_sized_vocabulary_are_those_of_torch(every: Every) -> None:
    logits = torch.randn(12, 49_153, generator=torch.Generator().manual_seed(4)) * 2.5
    for params in PARAMS:
        expected = draw(logits, range(12), [params] * 12, keys(12))
        for (_, threads), own in every.items():
            if threads == 2:
                assert torch.equal(own.draw(logits, draws_of(range(12), [params] * 12, keys(12))), expected)


number = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-40, 40, width=32),
    st.sampled_from([-INF, -1e30, 3e38, -3e38, 1e-40, -0.0]),
)


@st.composite
def some_logits(draw_one: st.DrawFn) -> Tensor:
    vocab = draw_one(st.integers(1, 70))
    rows = draw_one(st.lists(st.lists(number, min_size=vocab, max_size=vocab), min_size=1, max_size=5))
    logits = torch.tensor(rows)
    logits[:, 0] = torch.where(logits.amax(-1) == -INF, 0.0, logits[:, 0])
    return logits


@settings(max_examples=examples(200))
@given(some_logits(), st.integers(0, 2**64))
def test_draws_of_any_row_are_those_of_torch(every: Every, logits: Tensor, seed: int) -> None:
    count = len(logits)
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5)):
        expected = draw(logits, range(count), [params] * count, keys(count, seed))
        for own in every.values():
            assert torch.equal(own.draw(logits, draws_of(range(count), [params] * count, keys(count, seed))), expected)


@settings(max_examples=examples(200))
@given(some_logits(), st.data())
def test_logprobs_of_any_row_are_those_of_torch(every: Every, logits: Tensor, data: st.DataObject) -> None:
    vocab = logits.shape[1]
    tokens = [data.draw(st.integers(0, vocab - 1)) for _ in logits]
    top = data.draw(st.integers(0, vocab))
    expected = row_logprobs(logits, torch.tensor(tokens), top)
    for own in every.values():
        found = own.logprobs(logits, range(len(logits)), tokens, top)
        assert torch.equal(found.ranks, expected.ranks) and torch.equal(found.top_ids, expected.top_ids)
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=2e-7, atol=5e-7)
        torch.testing.assert_close(found.top_logprobs, expected.top_logprobs, rtol=2e-7, atol=5e-7)


def test_logprobs_are_as_exact_as_float64(own: NativeReductions) -> None:
    logits = rows_of(5_003)
    truth = logits.double().log_softmax(-1)
    found = own.logprobs(logits, range(8), own.argmax(logits)[0].tolist(), 20)
    expected = truth.gather(1, found.top_ids)
    torch.testing.assert_close(found.top_logprobs.double(), expected, rtol=2e-7, atol=2e-7)
    assert found.ranks.tolist() == [1] * 8
    order = torch.stack([row.sort(descending=True, stable=True).indices[:20] for row in logits])
    assert torch.equal(found.top_ids, order)


def test_law_5_a_row_is_the_same_bits_alone_and_among_others(every: Every, own: NativeReductions) -> None:
    logits, params = rows_of(1_003), PARAMS[:8]
    isa = next(isa for (isa, _), one in every.items() if one is own)
    drawn, kept = (
        own.draw(logits, draws_of(range(8), params, keys(8))),
        own.kept(logits, draws_of(range(8), params, keys(8))),
    )
    scored = own.logprobs(logits, range(8), drawn.tolist(), 7)
    for row in range(8):
        alone = draws_of([0], [params[row]], [keys(8)[row]])
        one = logits[row : row + 1].clone()
        for threads in (1, 2):
            other = every[isa, threads]
            assert torch.equal(other.draw(one, alone), drawn[row : row + 1])
            assert torch.equal(other.kept(one, alone), kept[row : row + 1])
            found = other.logprobs(one, [0], [int(drawn[row])], 7)
            assert same(found, RowLogprobs(*[field[row : row + 1] for field in fields_of(scored)]))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_no_number_is_said_to_be_none(own: NativeReductions, bad: float) -> None:
    for place in (0, 99):
        logits = torch.zeros(3, 100)
        logits[1, place], logits[2] = bad, -INF
        for params in PARAMS:
            assert own.draw(logits, draws_of(range(3), [params] * 3, keys(3))).tolist()[1:] == [-1, -1]
        found = own.logprobs(logits, range(3), [5, 5, 5], 2)
        assert same(found, row_logprobs(logits, torch.tensor([5, 5, 5]), 2))
        assert found.logprobs.isnan().tolist() == [False, True, True] and found.ranks.tolist() == [6, 0, 0]


def test_only_the_rows_named_are_drawn_and_logits_stay_as_they_are(own: NativeReductions) -> None:
    logits = rows_of(100)
    before = logits.clone()
    whole = own.draw(logits, draws_of(range(8), [PARAMS[4]] * 8, keys(8)))
    some = own.draw(logits, draws_of([6, 1, 1], [PARAMS[4]] * 3, [keys(8)[row] for row in (6, 1, 1)]))
    assert torch.equal(some, whole[[6, 1, 1]])
    assert torch.equal(logits, before)
    assert len(own.draw(logits, draws_of([], [], []))) == 0


def one_draw(**changes: Any) -> Draws:
    fields: dict[str, Sequence[Any]] = {
        "rows": [0],
        "keys": [0],
        "temperatures": [1.0],
        "top_k": [0],
        "top_p": [1.0],
        "min_p": [0.0],
        "typical_p": [1.0],
    }
    return Draws(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": [0.0]},
        {"temperatures": [NAN]},
        {"top_k": [-1]},
        {"top_p": [0.0]},
        {"min_p": [1.5]},
        {"typical_p": [NAN]},
        {"keys": []},
        {"rows": [4]},
        {"rows": [-1]},
    ],
    ids=str,
)
def test_a_draw_that_makes_no_sense_is_refused(own: NativeReductions, changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, IndexError)):
        own.draw(torch.zeros(4, 10), one_draw(**changes))


ABSENT = [([0], [10], 1), ([0], [-1], 1), ([4], [0], 1), ([0], [0], 11), ([0], [], 0)]


@pytest.mark.parametrize(("rows", "tokens", "top"), ABSENT)
def test_logprobs_of_what_is_not_there_are_refused(
    own: NativeReductions, rows: list[int], tokens: list[int], top: int
) -> None:
    with pytest.raises((ValueError, IndexError)):
        own.logprobs(torch.zeros(4, 10), rows, tokens, top)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Any:
    with kvilt.load(str(smollm2_path), backend="native", threads=2, kv_memory="128M", max_context=256) as model:
        yield model


PROMPT = "Once upon a time there was"


@pytest.mark.parametrize(
    "fields", some([{"typical_p": 0.8, "repetition_penalty": 1.2}, {}, {"top_p": 0.9}, {"top_k": 40}])
)
def test_a_model_draws_what_torch_draws_from_its_logits(llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams.of(temperature=0.9, seed=3, logprobs=4, **fields)
    done = llm.generate(PROMPT, params, max_tokens=12)
    prompt = llm.tokenizer.encode(PROMPT)
    state, given = SamplingState(params, prompt), prompt
    with llm.executor.create_kv_cache() as kv:
        for token, logprobs in zip(done.token_ids, done.logprobs or [], strict=True):
            logits = llm.executor.step(given, kv)
            drawn = sample(logits, [state], [len(state.history)])
            assert drawn.tokens.tolist() == [token]
            assert drawn.logprobs[0] is not None and drawn.logprobs[0].top_ids == logprobs.top_ids
            state.advance(token)
            given = [token]


def test_a_drawn_token_is_scored_like_the_same_token_of_a_prompt_to_the_bit(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPT)
    done = llm.generate(prompt, temperature=0.9, seed=5, logprobs=5, max_tokens=10, ignore_eos=True)
    again = llm.generate([*prompt, *done.token_ids], max_tokens=1, prompt_logprobs=5)
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[len(prompt) :] == done.logprobs
