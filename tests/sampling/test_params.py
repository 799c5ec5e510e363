"""Sampling params: every invalid value is refused by the name of its field, and good ones are kept as given."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvilt.errors import InputError, ParamError
from kvilt.sampling.params import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_NGRAM, MAX_STOPS, SamplingParams

NAN, INF = math.nan, math.inf
WHOLE = ["max_tokens", "min_tokens", "no_repeat_ngram_size", "top_k", "logprobs", "seed", "n"]
REAL = ["temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
LISTS = ["stop", "stop_token_ids", "bad_words", "bad_words_ids"]
FLAGS = ["ignore_eos", "include_stop_str_in_output"]

BAD = [
    *[(name, value) for name in WHOLE for value in (True, 1.0, "1", [1], NAN)],
    *[(name, None) for name in ("top_k", "n", *REAL, *FLAGS, *LISTS, "logit_bias", "min_tokens")],
    *[(name, value) for name in REAL for value in (True, "1", [1.0], NAN, INF, -INF, 10**400, -(10**400), 1j, 0j)],
    *[(name, value) for name in FLAGS for value in (0, 1, "yes")],
    *[("max_tokens", value) for value in (0, -1, 2**31, 10**5000)],
    *[("top_k", value) for value in (-1, -(10**5000))],
    *[("temperature", value) for value in (-1e-9, -1, 1e-31, 5e-324, 100.1)],
    *[("min_tokens", value) for value in (-1, 2**31)],
    *[("no_repeat_ngram_size", value) for value in (-1, MAX_NGRAM + 1, 10**5000)],
    *[("typical_p", value) for value in (0, 0.0, -0.1, 1.0000001)],
    *[("bad_words", value) for value in ("", [""], ["a", ""], [1], ["x"] * (MAX_BAD_WORDS + 1), ["x" * 10_000], 5)],
    ("bad_words", ["é" * 1000] * 9),
    *[
        ("bad_words_ids", value)
        for value in ([[]], [[1], []], [1], "ab", [[-1]], [[True]], [["1"]], [[2**40]], {(1,)}, [[1]] * 5_000)
    ],
    ("bad_words_ids", [list(range(5_000))]),
    *[("top_p", value) for value in (0, 0.0, -0.1, 1.0000001, 2)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("repetition_penalty", value) for value in (0, -1.0, 1e-40, 1e9)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)],
    *[("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, 1_000_000)],
    *[("n", value) for value in (0, -1, 1_000_000)],
    *[
        ("stop", value)
        for value in ("", [""], ["a", ""], [1], ["x"] * (MAX_STOPS + 1), ["x" * 10_000], ["é" * 1000] * 9, 5, {"a"})
    ],
    *[("stop_token_ids", value) for value in ([-1], [True], ["1"], [1.0], [2**40], list(range(10_000)), {1}, "12", 7)],
    *[
        ("logit_bias", value)
        for value in (
            {"50": 1.0},
            {1.0: 1.0},
            {True: 1.0},
            {-1: 1.0},
            {2**70: 1.0},
            {1: NAN},
            {1: INF},
            {1: 100.5},
            {1: -100.5},
            {1: "1"},
            {1: None},
            {1: True},
            dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0),
            [(1, 1.0)],
            5,
        )
    ],
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: str(type(value).__name__))
def test_an_invalid_value_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with pytest.raises(ParamError) as caught:
        SamplingParams.of(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 300, "a message never repeats a gigantic value"
    assert isinstance(caught.value, InputError)


GOOD = [
    *[("max_tokens", value) for value in (None, 1, 2**31 - 1)],
    *[("temperature", value) for value in (0, 0.0, -0.0, 1e-30, 1, 2.0, 100)],
    *[("top_k", value) for value in (0, 1, 10**30)],
    *[("top_p", value) for value in (5e-324, 0.5, 1)],
    *[("min_p", value) for value in (0, 1)],
    *[("logprobs", value) for value in (None, 0, MAX_LOGPROBS)],
    *[("seed", value) for value in (None, 0, -1, 2**70, -(2**70))],
    ("stop_token_ids", (0, 5)),
    *[("min_tokens", value) for value in (0, 2**31 - 1)],
    *[("no_repeat_ngram_size", value) for value in (0, 1, MAX_NGRAM)],
    *[("typical_p", value) for value in (5e-324, 0.5, 1)],
    ("bad_words_ids", ((1, 2), (0,))),
    ("bad_words", ("a", " b")),
    ("stop", ("a", "\x00", "é")),
]


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_a_value_at_the_edge_of_its_range_is_kept(field: str, value: object) -> None:
    assert getattr(SamplingParams.of(**{field: value}), field) == value


def test_the_defaults_are_greedy_and_off() -> None:
    params = SamplingParams()
    assert params.greedy and not params.penalized
    assert (params.top_k, params.top_p, params.min_p, params.n) == (0, 1.0, 0.0, 1)
    assert params.max_tokens is None and params.logprobs is None and params.seed is None
    assert not params.logit_bias and not params.stop and not params.stop_token_ids


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_makes_params_penalized(field: str) -> None:
    assert SamplingParams.of(**{field: 1.5}).penalized


def test_numbers_are_stored_as_floats_and_lists_as_tuples() -> None:
    params = SamplingParams(temperature=1, stop=["a", "b"], stop_token_ids=[3])
    assert isinstance(params.temperature, float)
    assert params.stop == ("a", "b") and params.stop_token_ids == (3,)


def test_one_stop_string_is_a_list_of_one_not_a_list_of_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_params_are_frozen_hashable_and_unaffected_by_the_callers_dict() -> None:
    bias = {7: 1, 3: -2.5}
    params = SamplingParams(logit_bias=bias)
    bias[9] = 50
    assert dict(params.logit_bias) == {3: -2.5, 7: 1.0}
    assert list(params.logit_bias) == [3, 7]
    assert hash(params) == hash(SamplingParams(logit_bias={3: -2.5, 7: 1}))
    assert params == SamplingParams(logit_bias={3: -2.5, 7: 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 5  # type: ignore[misc]


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5).max_tokens is None
    with pytest.raises(ParamError, match="min_tokens: must not be above max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_bad_word_is_a_list_of_one_and_sequences_become_tuples() -> None:
    params = SamplingParams(bad_words="END", bad_words_ids=[[1, 2], [3]])
    assert params.bad_words == ("END",)
    assert params.bad_words_ids == ((1, 2), (3,))
    assert hash(params) == hash(SamplingParams(bad_words=["END"], bad_words_ids=((1, 2), (3,))))


def test_of_merges_fields_over_params() -> None:
    base = SamplingParams(temperature=0.5, top_k=7)
    merged = SamplingParams.of(base, top_k=9, stop="x")
    assert (merged.temperature, merged.top_k, merged.stop) == (0.5, 9, ("x",))
    assert SamplingParams.of() == SamplingParams()
    assert SamplingParams.of(base) == base


def test_of_refuses_an_unknown_field_by_name_and_lists_the_known_ones() -> None:
    with pytest.raises(ParamError, match="temprature: is not a sampling field; the fields are max_tokens, min_tokens"):
        SamplingParams.of(temprature=1.0)


def test_of_refuses_params_of_another_kind() -> None:
    with pytest.raises(ParamError, match="params: must be a SamplingParams, not dict"):
        SamplingParams.of({"top_k": 1})  # type: ignore[arg-type]


def test_with_seed_keeps_a_given_seed_and_draws_a_missing_one() -> None:
    assert SamplingParams(seed=0).with_seed().seed == 0
    drawn = [SamplingParams(top_k=5).with_seed() for _ in range(8)]
    assert len({params.seed for params in drawn}) == 8
    assert all(params.top_k == 5 for params in drawn)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "bad_words_ids"])
def test_ids_past_the_vocabulary_are_refused_once_its_size_is_known(field: str) -> None:
    fields = {"logit_bias": {99: 1.0}, "stop_token_ids": [99], "bad_words_ids": [[4], [99, 3]]}
    params = SamplingParams.of(**{field: fields[field]})
    params.validate_vocab(100)
    with pytest.raises(ParamError, match="token id 99 is past the vocabulary of 99 tokens") as caught:
        params.validate_vocab(99)
    assert caught.value.field == field


def test_no_token_at_all_is_asked_for_only_beside_scores_of_the_prompt() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(ParamError, match="max_tokens: must be at least 1, not 0"):
        SamplingParams(max_tokens=0)
    for wrong in (-1, 21, True, "5"):
        with pytest.raises(ParamError, match="prompt_logprobs: must be"):
            SamplingParams(prompt_logprobs=wrong)  # type: ignore[arg-type]
