"""Sampling by kernels of a device gives the tokens, log-probabilities and errors of the CPU for the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from effort import examples, some
from grammars import BYTES, END, byte_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from kvilt.errors import GrammarFailed, NoTokenLeft, NumericsError, ParamError
from kvilt.ops.triton import filters, sampling
from kvilt.ops.triton.sampling import TritonSampling
from kvilt.sampling.constraint import Choice
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import SamplerOutput, SamplingState, sample, start_sample

INF, NAN = float("inf"), float("nan")
VOCAB = 300
KERNELS = TritonSampling(torch.device("cpu"))

FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 64, "top_p": 0.95, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0.9, "top_p": 1e-6, "logit_bias": {3: 100.0, 4: -100.0}, "no_repeat_ngram_size": 1},
    {"temperature": 0.8, "top_k": 10**20, "min_tokens": 9, "bad_words_ids": [[2], [5, 7]]},
    {"temperature": 1.0, "top_p": 0.99, "min_p": 1e-3, "typical_p": 0.5},
    {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "min_p": 0.05},
]


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a few hundred tokens in several shares."""
    for module in (sampling, filters):
        monkeypatch.setattr(module, "BLOCK", 128)


def state(fields: dict[str, Any], seed: int = 42, index: int = 0) -> SamplingState:
    params = SamplingParams.of(**{"seed": seed, **fields})
    made = SamplingState(params, prompt_ids=range(0, 40, 7), sample_index=index, end_ids=(17, 18))
    for token in (5, 5, 7, 250, 5):
        made.advance(token)
    return made


def same(logits: Tensor, states: Sequence[SamplingState], first: int = 3) -> SamplerOutput:
    """What the kernels give, which must be what the CPU gives."""
    positions = range(first, first + len(states))
    made = sample(logits, states, positions, kernels=KERNELS)
    expected = sample(logits, states, positions)
    assert made.tokens.tolist() == expected.tokens.tolist()
    return made


def rows_of(count: int, scale: float, vocab: int = VOCAB) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(int(scale * 10))) * scale


@pytest.mark.parametrize(("scale", "room"), some([(3.0, 8192), (12.0, 8192), (3.0, 4), (0.5, 8192), (0.5, 4)], 3))
def test_tokens_are_those_of_the_cpu(scale: float, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for few candidates the filters look at the whole row."""
    monkeypatch.setattr(filters, "CANDIDATES", room)
    logits = rows_of(len(FIELDS), scale)
    logits[:, VOCAB - 9 :] = -INF  # a padded vocabulary
    before = logits.clone()
    same(logits, [state(fields) for fields in FIELDS])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("room", [8192, 4])
def test_of_equal_scores_those_are_kept_that_the_cpu_keeps(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "CANDIDATES", room)
    tied = [{"temperature": 1.0, **more} for more in ({"top_p": 0.55}, {"top_k": 7}, {"top_k": 40, "top_p": 0.3})]
    for logits in (rows_of(3, 1.0).round(), torch.zeros(3, VOCAB)):
        same(logits, [state(fields, seed=7) for fields in tied])


number = st.one_of(
    st.integers(-4, 4).map(float),
    st.floats(-40, 40, width=32),
    st.sampled_from([-INF, -1e30, 3e38, -3e38, 1e-40, -0.0]),
)


@settings(max_examples=examples(50))
@given(
    scores=st.lists(number, min_size=1, max_size=40),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_row_is_drawn_from_as_on_the_cpu(scores: list[float], seed: int, **filters_of: Any) -> None:
    params = SamplingParams.of(seed=seed, **filters_of)

    def drawn(kernels: TritonSampling | None) -> tuple[int, ...] | list[int]:
        try:
            return sample(torch.tensor([scores]), [SamplingState(params)], [1], kernels=kernels).tokens.tolist()
        except NumericsError as error:
            return tuple(error.rows)

    assert drawn(KERNELS) == drawn(None)


def test_a_row_alone_is_drawn_as_among_others() -> None:
    logits, states = rows_of(3, 3.0), [state(FIELDS[at]) for at in (1, 3, 8)]
    together = sample(logits, states, [9] * 3, kernels=KERNELS).tokens
    for row in range(3):
        alone = sample(logits[row : row + 1], [states[row]], [9], kernels=KERNELS).tokens
        assert alone.tolist() == [together[row]]


def test_half_precision_rows_are_sampled_as_their_float32_values() -> None:
    logits, states = rows_of(3, 3.0).bfloat16(), [state(FIELDS[at]) for at in (0, 2, 8)]
    same(logits[:2], states[:2])
    same(logits, states)  # with copies of edited rows


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_without_a_largest_logit_are_named(bad: float) -> None:
    logits, states = rows_of(4, 2.0), [state(FIELDS[at]) for at in (0, 1, 2, 4)]
    for row in (1, 2, 3):
        logits[row] = bad if bad == -INF else torch.where(torch.arange(VOCAB) == 200 + row, bad, logits[row])
    pending = start_sample(logits, states, range(4), kernels=KERNELS)
    assert int(pending.tokens.min()) >= 0 and int(pending.tokens.max()) < VOCAB, "a next step may look them all up"
    with pytest.raises(NumericsError) as error:
        pending.wait()
    assert list(error.value.rows) == [1, 2, 3]


def test_rows_whose_tokens_are_all_banned_or_overflow_are_named() -> None:
    nothing = SamplingParams.of(bad_words_ids=[[0], [1], [2]], temperature=1.0)
    hot = SamplingParams.of(temperature=1e-30)
    states = [SamplingState(SamplingParams()), SamplingState(nothing), SamplingState(hot)]
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 2 + [[1e30, 2.0, 3.0]])
    for own, kind in (([0, 1, 2], NoTokenLeft), ([2], NumericsError)):
        for kernels in (None, KERNELS):
            with pytest.raises(kind) as error:
                sample(logits[own], [states[row] for row in own], own, kernels=kernels)
            assert list(error.value.rows) == [own.index(1 if kind is NoTokenLeft else 2)]


def test_a_bias_past_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ParamError, match="logit_bias"):
        sample(torch.zeros(1, 5), [state({"logit_bias": {5: 1.0}})], [0], kernels=KERNELS)


def held(text: str = "", **fields: Any) -> SamplingState:
    choice = Choice(["yes", "no", "nothing"])
    matcher = byte_compiler().compile(choice).matcher()
    made = SamplingState(SamplingParams(grammar=choice, **fields), (), end_ids=[END], matcher=matcher)
    for byte in text.encode():
        made.advance(byte)
    return made


def test_grammars_leave_the_tokens_that_they_leave_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(4, 2.0, len(BYTES) + 6)  # a padded output layer, likelier than all else
    logits[:, len(BYTES) :] = 50.0
    states = [held(), state({}), held("no", temperature=1.0, seed=3), held(temperature=1.0, top_p=0.9, seed=4)]
    drawn = same(logits, states).tokens.tolist()
    assert drawn[0] in b"yn" and drawn[2] in [END, ord("t")] and drawn[3] in b"yn" and drawn[1] >= len(BYTES)

    def fails(bits: object) -> None:
        raise GrammarFailed([0], "too many states")

    assert states[2].matcher is not None
    monkeypatch.setattr(type(states[2].matcher), "fill", lambda self, bits: fails(bits))
    pending = start_sample(logits, states, range(4), kernels=KERNELS)
    with pytest.raises(GrammarFailed) as error:
        pending.wait()
    assert list(error.value.rows) == [0, 2, 3]


def test_log_probabilities_are_those_of_the_cpu() -> None:
    logits = rows_of(3, 3.0)
    logits[2] = logits[2].round()  # ties
    states = [state({"logprobs": 5}), state({}), state({"temperature": 1.0, "logprobs": 3, "repetition_penalty": 1.4})]
    made, expected = same(logits, states), sample(logits, states, range(3, 6))
    assert made.logprobs[1] is None
    for one, other in zip(made.logprobs[::2], expected.logprobs[::2], strict=True):
        assert one is not None and other is not None
        assert (one.token, one.rank, one.top_ids) == (other.token, other.rank, other.top_ids)
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-6)
