"""Transforms against Hugging Face's processors, in the order `generate` runs them, and row by row independence."""

from __future__ import annotations

import pytest
import torch
from effort import examples, some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from kvilt.ops.contract import Reductions
from kvilt.ops.native.backend import NativeOps
from kvilt.sampling.draw import draws_of
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.transforms import (
    Filters,
    PenalizedTokens,
    add_bias_,
    apply_temperature,
    ban_,
    filter_rows,
    mask_,
    penalize_,
)

INF = float("inf")


def touched(
    rows: list[int], ids: list[int], counts: list[float], rep: float, freq: float, pres: float
) -> PenalizedTokens:
    full = [torch.full((len(ids),), value) for value in (rep, freq, pres)]
    return PenalizedTokens(torch.tensor(rows), torch.tensor(ids), torch.tensor(counts), *full)


@pytest.fixture(scope="module", params=["torch", "native"])
def native(request: pytest.FixtureRequest) -> Reductions | None:
    """A backend's own filters, or none: then those of torch."""
    return NativeOps(2).reductions if request.param == "native" else None


def dense(scores: Tensor, params: list[SamplingParams], native: Reductions | None = None) -> Tensor:
    """filter_rows, spread back over the vocabulary with -inf for what was filtered out; or a backend's own filters."""
    if native is not None:
        drawn = [SamplingParams.of(param, temperature=1.0) for param in params]
        kept = native.kept(scores, draws_of(range(len(params)), drawn, [0] * len(params)))
        return scores.masked_fill(~kept, -INF)
    out = torch.full_like(scores, -INF)
    seen: list[int] = []
    for group in filter_rows(scores, Filters.of(params, scores.shape[-1])):
        for row, ids, left in zip(group.rows.tolist(), group.ids, group.scores, strict=True):
            kept = left > -INF
            out[row, ids[kept]] = left[kept]
            seen.append(row)
    assert sorted(seen) == list(range(len(scores)))
    return out


def hugging_face_filters(scores: Tensor, params: SamplingParams) -> Tensor:
    warpers = LogitsProcessorList()
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        warpers.append(TypicalLogitsWarper(params.typical_p))
    return warpers(torch.zeros(len(scores), 1, dtype=torch.long), scores)


def assert_same_filter(ours: Tensor, theirs: Tensor, scores: Tensor, params: SamplingParams) -> None:
    """Equal kept values, but for those that lie on a threshold within float32 rounding.

    Which of several equal scores stays at a top-p cut is left open by Hugging Face (its sort is not stable), so kept
    sets are compared as values; where no two scores are equal that is the same as comparing ids.
    """
    kept = ours > -INF
    assert bool(kept.any()), "something is always left to draw"
    assert torch.equal(ours[kept], scores[kept])
    mine, other = ours[kept].sort(descending=True).values, theirs[theirs > -INF].sort(descending=True).values
    common = min(len(mine), len(other))
    assert torch.equal(mine[:common], other[:common])
    for place in range(common, max(len(mine), len(other))):
        assert on_a_threshold(scores, place, params), f"place {place} of {scores} with {params}"


def on_a_threshold(scores: Tensor, place: int, params: SamplingParams) -> bool:
    """Whether exact (float64) arithmetic puts the fate of the token at this place, likeliest first, on a cut."""
    falling = scores.double().sort(descending=True).values
    if params.top_k:
        falling = falling.masked_fill(falling < falling[min(params.top_k, len(falling)) - 1], -INF)
    probs = falling.softmax(-1)
    above = float(probs[:place].sum())
    near_top_p = params.top_p < 1 and abs(above - params.top_p) < 2e-6
    near_min_p = params.min_p > 0 and abs(float(probs[place] / probs[0]) - params.min_p) < 1e-5
    return near_top_p or near_min_p


# Whole and half numbers make ties; the rest are extremes and ordinary values.
logit = st.one_of(
    st.integers(-6, 6).map(float),
    st.floats(-30, 30, width=32),
    st.sampled_from([-INF, -1e9, 1e4, -1e4, 0.0, -0.0, 1e-30]),
)
filters = st.builds(
    SamplingParams,
    top_k=st.one_of(st.just(0), st.integers(1, 40)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0), st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.999999])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.just(1.0)),
)


@st.composite
def rows_and_filters(draw: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    vocab = draw(st.integers(1, 30))
    rows = draw(st.lists(st.tuples(st.lists(logit, min_size=vocab, max_size=vocab), filters), min_size=1, max_size=4))
    scores = torch.tensor([values for values, _ in rows])
    scores[:, 0] = torch.where(scores.amax(-1) == -INF, 0.0, scores[:, 0])
    return scores, [params for _, params in rows]


@settings(max_examples=examples(300))
@given(rows_and_filters())
def test_filters_keep_what_hugging_face_keeps_with_the_same_values(
    native: Reductions | None, case: tuple[Tensor, list[SamplingParams]]
) -> None:
    scores, params = case
    ours = dense(scores, params, native=native)
    for row, param in enumerate(params):
        theirs = hugging_face_filters(scores[row : row + 1], param)[0]
        assert_same_filter(ours[row], theirs, scores[row], param)


@settings(max_examples=examples(150))
@given(rows_and_filters())
def test_a_filtered_row_is_the_same_bits_alone_and_in_a_batch(
    native: Reductions | None, case: tuple[Tensor, list[SamplingParams]]
) -> None:
    scores, params = case
    together = dense(scores, params, native=native)
    for row, param in enumerate(params):
        assert torch.equal(dense(scores[row : row + 1], [param], native=native)[0], together[row])


FILTERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 20_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 64, "top_p": 0.95},
    {"top_k": 200, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.001},
]


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 50.0])
def test_filters_match_hugging_face_on_a_real_sized_vocabulary(scale: float, native: Reductions | None) -> None:
    generator = torch.Generator().manual_seed(3)
    params = [SamplingParams.of(**fields) for fields in FILTERS]
    scores = torch.randn(len(params), 20_000, generator=generator) * scale
    scores[:, 17_000:] = -INF
    ours = dense(scores, params, native=native)
    for row, param in enumerate(params):
        theirs = hugging_face_filters(scores[row : row + 1], param)[0]
        assert_same_filter(ours[row], theirs, scores[row], param)


def assert_same_typical(before: Tensor, ours: Tensor, mass: float) -> None:
    """Equal to Hugging Face on what the earlier filters left, but for tokens on the cut within float32 rounding."""
    theirs = TypicalLogitsWarper(mass)(torch.zeros(1, 1, dtype=torch.long), before[None])[0]
    kept = ours > -INF
    assert bool(kept.any()), "something is always left to draw"
    assert torch.equal(ours[kept], before[kept])
    probs = before.double().softmax(-1)
    surprise = -before.double().log_softmax(-1)
    distance = (surprise - (probs * surprise).nan_to_num().sum()).abs()
    slack = 1e-6 * (1 + float((before.amax() - before[before > -INF]).max()))
    for token in (kept != (theirs > -INF)).nonzero()[:, 0].tolist():
        nearer = float(probs[distance < distance[token] - slack].sum())
        not_farther = float(probs[distance < distance[token] + slack].sum())
        assert nearer - 1e-5 < mass < not_farther + 1e-5, f"token {token} of {before} with {mass}"


typical = st.one_of(st.floats(0.01, 0.999), st.sampled_from([0.1, 0.2, 0.5, 0.9, 0.95]))


@settings(max_examples=examples(300))
@given(rows_and_filters(), typical)
def test_typical_p_keeps_what_hugging_face_keeps(
    native: Reductions | None, case: tuple[Tensor, list[SamplingParams]], mass: float
) -> None:
    scores, params = case
    before = dense(scores, params, native=native)
    with_typical = [SamplingParams.of(param, typical_p=mass) for param in params]
    ours = dense(scores, with_typical, native=native)
    for row in range(len(scores)):
        assert_same_typical(before[row], ours[row], mass)
        assert torch.equal(dense(scores[row : row + 1], [with_typical[row]], native=native)[0], ours[row]), (
            "the same bits alone"
        )


@pytest.mark.parametrize("mass", some([0.9, 0.05, 0.5, 0.999]))
@pytest.mark.parametrize("scale", some([1.0, 0.0, 0.3, 4.0, 50.0]))
def test_typical_p_matches_hugging_face_on_a_real_sized_vocabulary(
    scale: float, mass: float, native: Reductions | None
) -> None:
    scores = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(8)) * scale
    scores[1, 7] += 8.0  # a likely token that is not typical
    scores[2, :100] = -INF
    params = [SamplingParams(typical_p=mass)] * 2 + [SamplingParams(typical_p=mass, top_k=300, min_p=0.001)]
    before = dense(scores, [SamplingParams.of(param, typical_p=1.0) for param in params], native=native)
    ours = dense(scores, params, native=native)
    for row, param in enumerate(params):
        assert_same_typical(before[row], ours[row], mass)
        assert torch.equal(dense(scores[row : row + 1], [param], native=native)[0], ours[row])
    assert torch.equal(with_threads(2, scores, params, native), ours)


def test_typical_p_may_drop_the_likeliest_token(native: Reductions | None) -> None:
    scores = torch.tensor([[0.35, *[0.01] * 65]]).log()
    kept = dense(scores, [SamplingParams(typical_p=0.3)], native=native).isfinite()[0].tolist()
    assert kept == [False] + [True] * 65


def test_wide_rows_do_not_change_their_narrow_neighbours(native: Reductions | None) -> None:
    """A flat row has every token as candidate, a peaked one a handful; both are the bits they are alone."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(5, 10_000, generator=generator) * torch.tensor([[0.01], [6.0], [0.0], [3.0], [9.0]])
    params = [SamplingParams(top_p=0.97)] * 3 + [SamplingParams(top_k=70, top_p=0.7), SamplingParams(min_p=0.1)]
    together = dense(scores, params, native=native)
    for row, param in enumerate(params):
        assert torch.equal(dense(scores[row : row + 1], [param], native=native)[0], together[row])
    for threads in (1, 2):
        assert torch.equal(with_threads(threads, scores, params, native), together)


def with_threads(threads: int, scores: Tensor, params: list[SamplingParams], native: Reductions | None) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return dense(scores, params, native)
    finally:
        torch.set_num_threads(before)


def test_among_equal_scores_at_a_top_p_cut_the_higher_ids_stay_as_a_stable_sort_leaves_them(
    native: Reductions | None,
) -> None:
    kept = dense(torch.zeros(1, 40), [SamplingParams(top_p=0.5)], native=native).isfinite()
    assert kept[0].tolist() == [False] * 20 + [True] * 20


def test_top_k_keeps_all_tokens_tied_with_the_last_one(native: Reductions | None) -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert dense(scores, [SamplingParams(top_k=2)], native=native).isfinite().tolist() == [
        [False, True, True, True, True, False]
    ]


def test_min_p_is_relative_to_the_likeliest_token(native: Reductions | None) -> None:
    scores = torch.tensor([[0.6, 0.29, 0.07, 0.04]]).log()
    assert dense(scores, [SamplingParams(min_p=0.1)], native=native).isfinite().tolist() == [[True, True, True, False]]


values = st.lists(logit, min_size=12, max_size=12)


@settings(max_examples=examples(150))
@given(values, st.lists(st.integers(0, 11), min_size=1, max_size=30), st.floats(0.1, 3.0))
def test_repetition_penalty_equals_hugging_face(row: list[float], history: list[int], penalty: float) -> None:
    logits = torch.tensor([row])
    ids = list(dict.fromkeys(history))
    ours = penalize_(logits.clone(), touched([0] * len(ids), ids, [0.0] * len(ids), penalty, 0.0, 0.0))
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits))


@settings(max_examples=examples(100))
@given(values, st.dictionaries(st.integers(0, 11), st.floats(-100, 100), min_size=1, max_size=8))
def test_logit_bias_equals_hugging_face_sequence_bias(row: list[float], bias: dict[int, float]) -> None:
    logits = torch.tensor([row])
    ids = torch.tensor(list(bias))
    ours = add_bias_(logits.clone(), torch.zeros_like(ids), ids, torch.tensor(list(bias.values())))
    theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    assert torch.equal(ours, theirs(torch.zeros(1, 1, dtype=torch.long), logits))


@settings(max_examples=examples(100))
@given(values, st.floats(1e-3, 100.0))
def test_temperature_equals_hugging_face(row: list[float], temperature: float) -> None:
    logits = torch.tensor([row])
    ours = apply_temperature(logits, torch.tensor([temperature]))
    assert torch.equal(ours, TemperatureLogitsWarper(temperature)(torch.zeros(1, 1, dtype=torch.long), logits))


def test_a_ban_takes_a_token_out_of_reach_and_no_other() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(2))
    ours = ban_(logits.clone(), torch.tensor([1, 2, 1, 1]), torch.tensor([4, 0, 7, 4]))
    assert (ours == -INF).nonzero().tolist() == [[1, 4], [1, 7], [2, 0]]
    assert torch.equal(ours[ours > -INF], logits[ours > -INF])


def test_frequency_counts_and_presence_does_not() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    ours = penalize_(logits.clone(), touched([0, 0, 0], [0, 1, 2], [0.0, 1.0, 3.0], 1.0, 0.25, 0.5))
    assert ours.tolist() == [[1.0, 0.25, -0.25, 1.0]]


def test_frequency_and_presence_come_after_repetition() -> None:
    ours = penalize_(torch.tensor([[4.0, -4.0]]), touched([0, 0], [0, 1], [2.0, 2.0], 2.0, 0.5, 0.25))
    assert ours.tolist() == [[4.0 / 2 - 1.0 - 0.25, -4.0 * 2 - 1.0 - 0.25]]


def test_switched_off_transforms_leave_a_row_bit_identical() -> None:
    row = torch.tensor([[0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, -INF, 0.1]])
    ids = list(range(8))
    off = penalize_(row.clone(), touched([0] * 8, ids, [2.0] * 8, 1.0, 0.0, 0.0))
    assert torch.equal(off.view(torch.int32), row.view(torch.int32))
    assert torch.equal(apply_temperature(row, torch.ones(1)).view(torch.int32), row.view(torch.int32))


def test_transforms_write_into_their_input_only_if_their_names_say_so() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    apply_temperature(logits, torch.tensor([0.5, 2.0]))
    narrowing = [SamplingParams(top_k=3, top_p=0.5), SamplingParams(min_p=0.2, typical_p=0.5)]
    filter_rows(logits, Filters.of(narrowing, 50))
    assert torch.equal(logits, before)
    index = torch.tensor([0, 1])
    for changed in (
        add_bias_(logits, index, index, torch.ones(2)),
        penalize_(logits, touched([0, 1], [4, 5], [1.0, 1.0], 1.3, 0.5, 0.5)),
        ban_(logits, index, index),
        mask_(logits, [1], torch.arange(50)[None] < 30),
        mask_(logits, [0, 1], torch.arange(50).expand(2, -1) < 40),
    ):
        assert changed is logits
    assert logits.isfinite().sum(-1).tolist() == [39, 29]


def test_penalties_touch_the_rows_they_name_and_no_other() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    ours = penalize_(logits.clone(), touched([1, 1], [4, 7], [1.0, 2.0], 1.3, 0.5, 0.5))
    changed = (ours != logits).nonzero().tolist()
    assert changed == [[1, 4], [1, 7]]
