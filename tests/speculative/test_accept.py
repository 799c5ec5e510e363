"""Accepting drafts: grammars and other memories step by step, rows that are nobody's, and the distribution itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from grammars import BYTES, byte_compiler
from torch import Tensor

from kvilt.errors import NumericsError
from kvilt.sampling.accept import DraftRun, accept
from kvilt.sampling.constraint import Regex
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import SamplerOutput, SamplingState, sample

VOCAB = 24


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def one_by_one(logits: Tensor, state: SamplingState, position: int) -> list[int]:
    """What a state draws from these rows, each behind the one before."""
    own, tokens = state.fork(), []
    for row in range(len(logits)):
        tokens.append(int(sample(logits[row : row + 1], [own], [position + row]).tokens[0]))
        own.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize("fields", [{}, {"frequency_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"min_tokens": 3}])
@pytest.mark.parametrize("good", range(6))
def test_drafts_are_accepted_up_to_the_first_that_is_not_drawn(fields: dict[str, object], good: int) -> None:
    logits = logits_of(6)
    state = SamplingState(SamplingParams.of(temperature=1.0, seed=3, **fields), [1, 2], end_ids=[VOCAB - 1])
    drawn = one_by_one(logits, state, 2)
    drafts = [*drawn[:good], *[(token + 1) % VOCAB for token in drawn[good:]]][:5]
    (result,) = accept(logits, [DraftRun(state, 2, 0, drafts)], sample)
    assert result.tokens == drawn[: good + 1]
    assert len(result.logprobs) == len(result.tokens)
    assert state.history.ids == [1, 2]  # nothing was committed


def test_an_end_token_ends_a_run() -> None:
    logits = torch.full((4, VOCAB), -9.0)
    logits[range(4), [5, 7, 6, 6]] = 9.0
    state = SamplingState(SamplingParams(), [1], end_ids=[7])
    (result,) = accept(logits, [DraftRun(state, 1, 0, [5, 7, 6])], sample)
    assert result.tokens == [5, 7]


def test_runs_of_different_lengths_share_a_draw() -> None:
    logits = logits_of(7, seed=4)
    states = [SamplingState(SamplingParams(temperature=1.0, seed=i, presence_penalty=i / 2), [i]) for i in range(3)]
    drawn = [
        one_by_one(logits[rows], state, 9) for state, rows in zip(states, ([0, 1, 2], [3], [4, 5, 6]), strict=True)
    ]
    runs = [DraftRun(states[0], 9, 0, drawn[0][:2]), DraftRun(states[1], 9, 3), DraftRun(states[2], 9, 4, drawn[2][:2])]
    assert [one.tokens for one in accept(logits, runs, sample)] == drawn


def test_a_grammar_follows_and_comes_back() -> None:
    grammar = byte_compiler().compile(Regex("[ab]{3}c[0-9]+"))
    state = SamplingState(
        SamplingParams(temperature=1.0, seed=5, grammar=Regex("[ab]{3}c[0-9]+")), matcher=grammar.matcher()
    )
    logits = logits_of(6, len(BYTES), 2)
    drawn = one_by_one(logits, state, 0)
    assert bytes(drawn[:4])[-1:] == b"c"
    for good in range(6):
        drafts = [*drawn[:good], *b"zzzzz"][:5]
        (result,) = accept(logits, [DraftRun(state, 0, 0, drafts)], sample)
        assert result.tokens == drawn[: good + 1]
    state.advance(drawn[0])  # it stands where it stood
    assert state.history.generated_tokens == 1


def test_what_is_wrong_behind_a_rejected_draft_is_not_there() -> None:
    logits = logits_of(3)
    logits[2] = math.nan
    state = SamplingState(SamplingParams())
    first = int(logits[0].argmax())
    wrong = [(first + 1) % VOCAB, 0]
    with pytest.raises(NumericsError):
        accept(logits, [DraftRun(state, 0, 0, wrong)], sample)
    (result,) = accept(logits, [DraftRun(state, 0, 0, wrong)], sample, at_once=False)
    assert result.tokens == [first]
    right = [first, int(logits[1].argmax())]
    (result,) = accept(logits, [DraftRun(state, 0, 0, right)], sample, at_once=False)
    assert result.tokens == right  # what the third row has is for the next step to say


def test_the_distribution_is_that_of_plain_sampling() -> None:
    """Chi-square of the second token of a run against softmax, over seeds, with drafts that come from elsewhere."""
    logits = logits_of(2, 8, 1)
    first = int(logits[0].argmax())
    expected = torch.softmax(logits[1].double(), -1)
    counts, runs = torch.zeros(8, dtype=torch.float64), 0
    for seed in range(6000):
        state = SamplingState(SamplingParams(temperature=1.0, seed=seed))
        (drawn,) = accept(logits, [DraftRun(state, 0, 0, [first])], sample)
        if len(drawn.tokens) == 2:  # the draft was accepted
            counts[drawn.tokens[1]] += 1
            runs += 1
    assert runs > 1500
    chi_square = float(((counts - runs * expected) ** 2 / (runs * expected)).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001
    share = runs / 6000
    assert abs(share - float(torch.softmax(logits[0].double(), -1)[first])) < 0.02  # and so is that of the first


def test_rows_are_looked_at_once_for_what_has_no_memory() -> None:
    calls = 0

    def counted(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> SamplerOutput:
        nonlocal calls
        calls += 1
        return sample(logits, states, positions)

    logits = logits_of(5)
    drafts = logits.argmax(-1).tolist()[:4]
    accept(logits, [DraftRun(SamplingState(SamplingParams()), 0, 0, drafts)], counted)
    assert calls == 1
