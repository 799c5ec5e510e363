"""The sampler: its draws against Hugging Face's processors plus the noise, its distribution, and its independence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from effort import examples, some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvilt.errors import InputError, NoTokenLeft, NumericsError, ParamError
from kvilt.ops.native.backend import NativeOps
from kvilt.sampling.noise import gumbel
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import SamplerOutput, SamplingState, sample, token_logprobs

INF, NAN = float("inf"), float("nan")
VOCAB = 5_000


@pytest.fixture(scope="module", params=["torch", "native"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test below twice: sampling by torch, and by a backend's reductions."""
    reductions = NativeOps(2).reductions if request.param == "native" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "sample", partial(sample, reductions=reductions))
        yield


FIELDS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 64, "top_p": 0.95, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {3: 100.0, 4: -100.0}},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {9: 5.5}, "top_k": 900},
    {"temperature": 100.0, "presence_penalty": -2.0},
    {"temperature": 1e-30},
    {"temperature": 0.9, "top_p": 1e-6, "seed": -1},
    {"temperature": 2.0, "top_k": 10**20, "seed": 2**70},
    {"temperature": 1.2, "typical_p": 0.8},
    {"temperature": 1.0, "top_p": 0.99, "min_p": 1e-4, "typical_p": 0.5},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3], [1_000, 3, 9], [3, 11], [7, 12]], "temperature": 0.5},
    {"min_tokens": 6, "stop_token_ids": [17]},
    {"min_tokens": 5, "stop_token_ids": [17]},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[2]],
        "min_tokens": 9,
        "top_k": 50,
        "typical_p": 0.9,
    },
]
END_IDS = (40, 41)


def state(fields: dict[str, object], index: int = 0) -> SamplingState:
    params = SamplingParams.of(**{"seed": 42, **fields})
    made = SamplingState(params, prompt_ids=range(0, 600, 7), sample_index=index, end_ids=END_IDS)
    for token in (5, 5, 7, 1_000, 3):
        made.advance(token)
    return made


def mixed_batch(scale: float = 3.0) -> tuple[Tensor, list[SamplingState], list[int]]:
    logits = torch.randn(len(FIELDS), VOCAB, generator=torch.Generator().manual_seed(9)) * scale
    logits[:, VOCAB - 50 :] = -INF  # padded vocabulary
    return logits, [state(fields) for fields in FIELDS], [100 + row for row in range(len(FIELDS))]


def hugging_face(logits: Tensor, own: SamplingState) -> Tensor:
    """The processors as `generate` orders them; presence and frequency follow repetition."""
    p, scores, ids = own.params, logits[None], torch.tensor([own.history.ids])
    if p.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in p.logit_bias.items()})(ids, scores)
    if p.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores)
    for token, count in Counter(own.history.generated).items():
        scores[0, token] -= p.frequency_penalty * count + p.presence_penalty
    for processor in hugging_face_bans(own):
        scores = processor(ids, scores)
    if not p.greedy:
        scores = TemperatureLogitsWarper(p.temperature)(ids, scores)
        scores = TopKLogitsWarper(p.top_k)(ids, scores) if p.top_k else scores
        scores = TopPLogitsWarper(p.top_p)(ids, scores) if p.top_p < 1 else scores
        scores = MinPLogitsWarper(p.min_p)(ids, scores) if p.min_p else scores
        scores = TypicalLogitsWarper(p.typical_p)(ids, scores) if p.typical_p < 1 else scores
    return scores[0]


def hugging_face_bans(own: SamplingState) -> list[LogitsProcessor]:
    p, processors = own.params, list[LogitsProcessor]()
    if p.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(p.no_repeat_ngram_size))
    if p.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(sequence) for sequence in p.bad_words_ids]))
    if p.min_tokens and own.end_ids:
        ends = sorted(own.end_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(own.history.prompt_tokens, p.min_tokens, ends))
    return processors


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_a_token_is_the_argmax_of_hugging_face_scores_plus_the_noise_of_its_position(scale: float) -> None:
    logits, states, positions = mixed_batch(scale)
    tokens = sample(logits, states, positions).tokens
    for row, own in enumerate(states):
        scores = hugging_face(logits[row].clone(), own).double()
        if not own.params.greedy:
            key = torch.tensor([own.noise_key(positions[row])])
            scores = scores + gumbel(key, torch.arange(VOCAB))[0]
        assert int(tokens[row]) == int(scores.argmax()), FIELDS[row]


def test_a_row_does_not_see_its_neighbours() -> None:
    logits, states, positions = mixed_batch()
    states = [state({**fields, "logprobs": 5}) for fields in FIELDS]
    together = sample(logits, states, positions)
    for row in range(len(states)):
        alone = sample(logits[row : row + 1], states[row : row + 1], positions[row : row + 1])
        assert torch.equal(alone.tokens, together.tokens[row : row + 1])
        assert alone.logprobs[0] == together.logprobs[row]
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [states[i] for i in order], [positions[i] for i in order])
    assert torch.equal(shuffled.tokens, together.tokens[order])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    logits = torch.randn(6, 100_000, generator=torch.Generator().manual_seed(4))
    states = [state(fields) for fields in FIELDS[:6]]
    expected = sample(logits, states, range(6)).tokens
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(sample(logits, states, range(6)).tokens, expected)
    finally:
        torch.set_num_threads(before)


def test_sampling_changes_neither_logits_nor_states() -> None:
    logits, states, positions = mixed_batch()
    before, lengths = logits.clone(), [len(own.history) for own in states]
    first = sample(logits, states, positions).tokens
    assert torch.equal(logits, before)
    assert [len(own.history) for own in states] == lengths
    assert torch.equal(sample(logits, states, positions).tokens, first)


@pytest.mark.parametrize("vocab", [2, 17, 49_152])
def test_greedy_ties_go_to_the_lowest_id(vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[0, vocab // 2 :] = 1.0
    plain, penalized = state({}), state({"logit_bias": {0: 0.0}})
    for own in (plain, penalized):
        assert sample(logits, [own, own], [0, 0]).tokens.tolist() == [vocab // 2, 0]


def test_a_half_precision_row_is_sampled_as_its_float32_values() -> None:
    logits, states, positions = mixed_batch()
    half = logits.bfloat16()
    assert torch.equal(sample(half, states, positions).tokens, sample(half.float(), states, positions).tokens)


def draws(logits: Sequence[float], positions: Sequence[int], index: int = 0, **fields: object) -> Tensor:
    own = SamplingState(SamplingParams.of(**{"temperature": 1.0, "seed": 1, **fields}), sample_index=index)
    return sample(torch.tensor([logits] * len(positions)), [own] * len(positions), positions).tokens


def p_value(tokens: Tensor, probs: Tensor) -> float:
    """Chi-square goodness of fit over the tokens that can occur."""
    expected = probs[probs > 0] * len(tokens)
    seen = torch.bincount(tokens, minlength=len(probs)).double()
    assert int(seen[probs == 0].sum()) == 0, "a token of probability zero was drawn"
    statistic = ((seen[probs > 0] - expected) ** 2 / expected).sum()
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


LOGITS = [0.0, 1.0, -1.0, 2.0, 0.5, -2.0, -INF, 1.5, 0.0, -0.5]


@pytest.mark.parametrize(
    "fields",
    some(
        [
            {"temperature": 0.5},
            {"top_p": 0.8},
            {},
            {"temperature": 3.0},
            {"top_k": 4},
            {"min_p": 0.2},
            {"logit_bias": {5: 3.0}},
            {"seed": -1},
            {"seed": 2**70},
            {"index": 3},
        ],
        2,
    ),
    ids=str,
)
def test_draws_follow_the_softmax_of_the_transformed_logits(fields: dict[str, object]) -> None:
    """40,000 positions of a fixed seed: the outcome is fixed too, so this cannot flake."""
    tokens = draws(LOGITS, range(40_000), **fields)  # type: ignore[arg-type]
    params = {name: value for name, value in fields.items() if name != "index"}
    own = SamplingState(SamplingParams.of(**{"temperature": 1.0, **params}))
    probs = hugging_face(torch.tensor(LOGITS), own).double().softmax(-1)
    assert p_value(tokens, probs) > 1e-3


def test_the_chi_square_check_notices_a_wrong_distribution() -> None:
    tokens = draws(LOGITS, range(40_000), temperature=1.05)
    assert p_value(tokens, torch.tensor(LOGITS).double().softmax(-1)) < 1e-6


def test_draws_over_seeds_at_one_position_follow_the_softmax() -> None:
    logits = torch.tensor([LOGITS] * 5_000)
    states = [SamplingState(SamplingParams(temperature=1.0, seed=seed)) for seed in range(5_000)]
    tokens = sample(logits, states, [17] * 5_000).tokens
    assert p_value(tokens, logits[0].double().softmax(-1)) > 1e-3


@pytest.mark.parametrize("step", ["position", "sample"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    """Pairs of draws follow the product distribution, with 63 degrees of freedom."""
    logits = [0.0, 1.0, -1.0, 0.5, 0.2, -0.3, 0.9, 0.0]
    first = draws(logits, range(0, 60_000, 2))
    second = draws(logits, range(1, 60_000, 2)) if step == "position" else draws(logits, range(0, 60_000, 2), index=1)
    probs = torch.tensor(logits).double().softmax(-1)
    assert p_value(first * 8 + second, torch.outer(probs, probs).flatten()) > 1e-3


def test_a_draft_with_the_same_noise_agrees_as_often_as_gumbel_coupling_promises() -> None:
    """P(agree) >= (1 - TV) / (1 + TV), far above the chance of two independent draws."""
    target, draft = LOGITS, [value + shift for value, shift in zip(LOGITS, [0.2, -0.2] * 5, strict=True)]
    p, q = (torch.tensor(values).double().softmax(-1) for values in (target, draft))
    distance = float((p - q).abs().sum() / 2)
    agree = float((draws(target, range(20_000)) == draws(draft, range(20_000))).double().mean())
    assert agree > (1 - distance) / (1 + distance) - 0.01
    assert agree > float((p * q).sum()) + 0.3


def test_states_without_a_seed_draw_their_own() -> None:
    seeds = {SamplingState(SamplingParams(temperature=1.0)).seed for _ in range(8)}
    assert len(seeds) == 8


def run(own: SamplingState, steps: int) -> list[int]:
    """A toy model whose logits depend on the last token; commits every token it draws."""
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(6)) * 2
    for _ in range(steps):
        token = int(sample(table[own.history.ids[-1]][None], [own], [len(own.history)]).tokens[0])
        own.advance(token)
    return own.history.generated


PENALIZED = SamplingParams(
    temperature=1.2, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3, seed=5
)


def test_a_fork_of_the_same_sample_repeats_it_and_another_sample_does_not() -> None:
    own = SamplingState(PENALIZED, [1, 2])
    twin, other = own.fork(), own.fork(sample_index=1)
    assert run(own, 20) == run(twin, 20) != run(other, 20)
    assert own.seed == other.seed and other.sample_index == 1


def test_verifying_drafts_in_one_batch_equals_drawing_one_by_one() -> None:
    """Law 10: rows that stand for future positions, with drafts in their histories, draw what a plain run draws."""
    plain = run(SamplingState(PENALIZED, [1, 2]), 6)
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(6)) * 2
    ahead = [SamplingState(PENALIZED, [1, 2])]
    for token in plain[:-1]:
        ahead.append(ahead[-1].fork())
        ahead[-1].advance(token)
    logits = torch.stack([table[own.history.ids[-1]] for own in ahead])
    assert sample(logits, ahead, [2 + i for i in range(6)]).tokens.tolist() == plain
    assert len(ahead[0].history) == 2, "a fork's tokens are not its parent's"


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_a_row_that_is_not_a_number_is_named_and_the_others_can_go_on(bad: float, fields: dict[str, object]) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    states = [state(fields) for _ in range(4)]
    expected = sample(logits, states, range(4)).tokens
    logits[1, 50], logits[3, 99] = bad, bad
    with pytest.raises(NumericsError, match="row 1, 3") as caught:
        sample(logits, states, range(4))
    assert caught.value.rows == (1, 3)
    assert torch.equal(sample(logits[[0, 2]], [states[0], states[2]], [0, 2]).tokens, expected[[0, 2]])


def test_a_row_without_any_possible_token_is_named() -> None:
    logits = torch.zeros(2, 10)
    logits[1] = -INF
    with pytest.raises(NumericsError) as caught:
        sample(logits, [state({}), state({"temperature": 1.0})], [0, 0])
    assert caught.value.rows == (1,)


def test_a_row_that_overflows_when_divided_by_its_temperature_is_named_by_its_place_in_the_batch() -> None:
    logits = torch.full((3, 10), 1e20)
    with pytest.raises(NumericsError) as caught:
        sample(logits, [state({}), state({"temperature": 1.0}), state({"temperature": 1e-30})], [0, 0, 0])
    assert caught.value.rows == (2,)


def test_a_bias_past_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ParamError, match="logit_bias: token id 10 is past the vocabulary of 10 tokens"):
        sample(torch.zeros(1, 10), [state({"logit_bias": {10: 1.0}})], [0])


def test_counts_that_disagree_are_refused() -> None:
    for logits, states, positions in [
        (torch.zeros(2, 5), [state({})], [0, 0]),
        (torch.zeros(2, 5), [state({})] * 2, [0]),
        (torch.zeros(5), [state({})], [0]),
    ]:
        with pytest.raises(InputError, match="one state and one position per row"):
            sample(logits, states, positions)
    with pytest.raises(InputError, match="position counts from 0"):
        sample(torch.zeros(1, 5), [state({})], [-1])
    with pytest.raises(InputError, match="sample index counts from 0"):
        SamplingState(SamplingParams(), sample_index=-1)


def test_an_empty_batch_gives_no_tokens() -> None:
    assert sample(torch.zeros(0, 5), [], []).tokens.tolist() == []


TOKENS = 8
few = st.lists(st.integers(0, TOKENS - 1), max_size=20)
banning = st.builds(
    SamplingParams,
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words_ids=st.lists(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(st.integers(0, TOKENS - 1), max_size=2),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 5),
)


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(banning, few, few), min_size=1, max_size=4), few)
def test_bans_are_those_of_hugging_face(
    cases: list[tuple[SamplingParams, list[int], list[int]]], end_ids: list[int]
) -> None:
    """Row by row: the same draw as the processors leave, or an error that names the rows with nothing left."""
    logits = torch.randn(len(cases), TOKENS, generator=torch.Generator().manual_seed(3))
    states = []
    for params, prompt, generated in cases:
        states.append(SamplingState(params, prompt, end_ids=end_ids))
        for token in generated:
            states[-1].advance(token)
    scores = [with_bans(logits[row : row + 1], own) for row, own in enumerate(states)]
    empty = tuple(row for row, left in enumerate(scores) if float(left.amax()) == -INF)
    if empty:
        with pytest.raises(NoTokenLeft) as caught:
            sample(logits, states, range(len(states)))
        assert caught.value.rows == empty
        return
    tokens = sample(logits, states, range(len(states))).tokens.tolist()
    for row, own in enumerate(states):
        noise = 0.0 if own.params.greedy else gumbel(torch.tensor([own.noise_key(row)]), torch.arange(TOKENS))
        assert tokens[row] == int((scores[row] + noise).argmax())


def with_bans(logits: Tensor, own: SamplingState) -> Tensor:
    ids = torch.tensor([own.history.ids], dtype=torch.long)
    for processor in hugging_face_bans(own):
        logits = processor(ids, logits)
    return logits


def test_a_row_without_a_token_left_is_named_by_its_place_in_the_batch() -> None:
    everything = {"bad_words_ids": [[token] for token in range(10)]}
    for fields in (everything, {**everything, "temperature": 1.0}):
        with pytest.raises(NoTokenLeft, match="row 1, 2 may draw no token at all") as caught:
            sample(torch.zeros(3, 10), [state({}), state(fields), state(fields)], [0, 0, 0])
        assert caught.value.rows == (1, 2)


def test_end_ids_are_out_of_reach_until_min_tokens_are_generated() -> None:
    own = SamplingState(SamplingParams(min_tokens=3, stop_token_ids=[2]), [2, 5], end_ids=[5, 10_000])
    logits = torch.tensor([[0.0, 1.0, 9.0, 0.0, 0.0, 8.0]])
    drawn = []
    for position in range(2, 6):
        drawn.append(int(sample(logits, [own], [position]).tokens[0]))
        own.advance(drawn[-1])
    assert drawn == [1, 1, 1, 2], "an end id past the logits, and end ids in the prompt, do no harm"
    assert own.end_ids == {2, 5, 10_000}


def test_a_fork_keeps_bans_and_end_ids() -> None:
    own = SamplingState(SamplingParams(min_tokens=2, bad_words_ids=[[4, 1]]), [4], end_ids=[0])
    fork = own.fork(sample_index=2)
    logits = torch.tensor([[9.0, 8.0, 7.0, 0.0, 0.0]])
    assert sample(logits, [fork], [1]).tokens.tolist() == [2]
    fork.advance(2)
    assert sample(logits.expand(2, -1), [fork, own], [2, 1]).tokens.tolist() == [1, 2], (
        "the parent still stands behind its 4"
    )
    with pytest.raises(InputError, match="sample index counts from 0"):
        own.fork(sample_index=-1)


def test_bad_words_as_text_are_refused_where_there_is_no_tokenizer() -> None:
    with pytest.raises(ParamError, match=r"bad_words: is text.*bad_words_ids"):
        SamplingState(SamplingParams(bad_words=["word"]))


def test_logprobs_are_of_the_raw_logits_whatever_the_transforms() -> None:
    logits, _, positions = mixed_batch()
    states = [state({**fields, "logprobs": 3}) for fields in FIELDS]
    out = sample(logits, states, positions)
    for row, entry in enumerate(out.logprobs):
        raw = logits[row].double().log_softmax(-1)
        assert entry is not None and entry.token == int(out.tokens[row])
        assert entry.logprob == pytest.approx(float(raw[entry.token]), abs=1e-4)
        best = raw.topk(3)
        assert entry.top_ids == tuple(best.indices.tolist())
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.rank == 1 + int((raw > raw[entry.token]).sum())


def test_logprobs_come_only_to_rows_that_ask() -> None:
    out: SamplerOutput = sample(
        torch.zeros(3, 9), [state({}), state({"logprobs": 0}), state({"logprobs": 20})], [0, 0, 0]
    )
    assert out.logprobs[0] is None
    assert out.logprobs[1] is not None and out.logprobs[1].top_ids == ()
    assert out.logprobs[2] is not None and out.logprobs[2].top_ids == tuple(range(9)), "there are only nine tokens"


def test_among_equal_logprobs_the_lower_id_ranks_first() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, -INF])
    entry = token_logprobs(logits, token=2, top=4)
    assert entry.top_ids == (1, 3, 0, 2)
    assert entry.rank == 4
    assert token_logprobs(logits, token=5, top=0).logprob == -INF
    assert token_logprobs(torch.zeros(5_000), token=30, top=20).top_ids == tuple(range(20))
