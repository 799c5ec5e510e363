"""Tokens between computed ones are repaired: by which weights, in which layers, when, however rows are cut."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvilt.batch import Batch, HiddenOut, Ids, Last, LayerSpan, Repair, Row
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.key_rotation import key_rotations
from kvilt.blend.recipe import BlendPrompt, Recipe, Span
from kvilt.blend.repair import DOUBT, LEAST, REACH, RUN, KVRepair, runs
from kvilt.blend.row_stage import RowStage
from kvilt.errors import InputError
from kvilt.executor.protocol import Executor
from kvilt.ops.contract import Interpolation, PageStore
from kvilt.store.layer import LayerKV

from .drive import blended, content, finish, memory_store, start, tokens

DOCUMENTS = [Span(4, 4), Span(5, 205), Span(205, 206), Span(210, 250)]


def spread(documents: list[Span], chosen: set[int], question: int) -> list[int]:
    """All tokens that are run: those between documents, the chosen ones, and a question."""
    end = documents[-1].stop
    inside = {i for one in documents for i in range(one.start, one.stop)}
    return [i for i in range(end) if i not in inside or i in chosen] + list(range(end, end + question))


@given(chosen=st.sets(st.integers(0, 249)), question=st.integers(1, 40))
def test_every_token_of_a_document_belongs_to_one_run(chosen: set[int], question: int) -> None:
    positions = spread(DOCUMENTS, chosen, question)
    made = runs(DOCUMENTS, positions)
    for number, one in enumerate(DOCUMENTS):
        own = [run for run in made if run.document == number]
        mine = sorted(i - one.start for i in chosen if one.start <= i < one.stop)
        assert [i for run in own for i in run.interpolation.anchors.tolist()] == mine
        assert [positions[i] - one.start for run in own for i in range(run.first, run.stop)] == mine
        others = [i for run in own for i in run.interpolation.tokens.tolist()]
        assert others == ([i for i in range(len(one)) if i not in mine] if mine else [])
        sizes = [run.stop - run.first for run in own]
        assert max(sizes, default=0) <= RUN
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        # What runs before a run sees no token of it.
        for before, run in pairwise(own):
            assert before.interpolation.anchors[-1] < min(
                [*run.interpolation.anchors.tolist(), *run.interpolation.tokens.tolist()]
            )


@given(chosen=st.sets(st.integers(0, 249), min_size=1))
def test_weights_fall_with_the_distance(chosen: set[int]) -> None:
    for run in runs(DOCUMENTS, spread(DOCUMENTS, chosen, 1)):
        for i, other in enumerate(run.interpolation.tokens.tolist()):
            expected = list(weights(other, run.interpolation.anchors.tolist()).values())
            torch.testing.assert_close(run.interpolation.weights[i], torch.tensor(expected), rtol=1e-4, atol=1e-7)


def weights(token: int, computed: list[int]) -> dict[int, float]:
    near = {c: math.exp(-abs(token - c) / REACH) for c in computed}
    return {c: one / (sum(near.values()) + DOUBT) for c, one in near.items()}


def expected_layer(stored: Tensor, fresh: Tensor, computed: list[int], share: float) -> Tensor:
    """One document's layer after repair, token by token."""
    out = stored.double().clone()
    change = {c: fresh[i].double() - stored[c].double() for i, c in enumerate(computed)}
    for token in range(len(stored)):
        if token in change:
            out[token] = fresh[computed.index(token)].double()
            continue
        for c, weight in weights(token, computed).items():
            out[token] += share * weight * change[c]
    return out


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_blended_prompt_holds_what_the_formula_says(
    tiny: Executor, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, head, question = tokens(40, 2), tokens(5, 1), tokens(8, 4)
    blend_prompt = BlendPrompt.of([head, text, question], [False, True, False])
    made = Recipe(0.3, "head", min_gain=0.0, repair=share)
    seen = fresh_of_repairs(tiny, monkeypatch)
    with memory_store() as store, tiny.create_kv_cache() as alone:
        blending = Blending(tiny, ChunkCache(tiny, store), blend_prompt, made)
        with start(tiny, blend_prompt) as kv:
            blending.begin(kv)
            while not blending.done:
                row = blending.next(512)
                blending.took(row, tiny.run(Batch.of([row])), 0)
            kv.commit([list(blend_prompt.ids[blend_prompt.exact :])])
            (group,) = kv.row(0).image().groups
        alone.reserve(40)
        layers = range(len(tiny.spec.layers))
        found = tiny.run(Batch.of([Row(Ids(text), range(40), alone, want=HiddenOut(layers))])).kv[0]
        computed = list(range(12))
        assert [layer for layer, *_ in seen] == list(layers)
        for (layer, new_keys, new_values), turn in zip(seen, key_rotations(tiny.spec), strict=True):
            keys = expected_layer(found[layer].keys, new_keys, computed, share)
            values = expected_layer(found[layer].values, new_values, computed, share)
            placed = turn.place(keys.float(), torch.arange(5, 45))
            torch.testing.assert_close(group.keys[layer, 5:45].float(), placed, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(group.values[layer, 5:45].float(), values.float(), rtol=2e-3, atol=2e-3)


def fresh_of_repairs(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Tensor, Tensor]]:
    """Layer, keys and values of the computed tokens of every repair from now on; the backend carries them out."""
    seen, real = [], executor.pool.ops.interpolate

    def watched(store: PageStore, layer: int, slots: Tensor, who: Interpolation, kept, fresh, rotation) -> None:  # type: ignore[no-untyped-def]
        seen.append((layer, fresh[0].clone(), fresh[1].clone()))
        real(store, layer, slots, who, kept, fresh, rotation)

    monkeypatch.setattr(executor.pool.ops, "interpolate", watched)
    return seen


def unchanged(executor: Executor, ids: list[int], at: range, span: range) -> Repair:
    """A repair that writes the KV of `ids` as it is stored, at the positions `at`; the row's first token is asked."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        stored = executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=HiddenOut(span))])).kv[0]
    none = Interpolation(torch.arange(len(ids)), torch.tensor([0]), torch.zeros(len(ids), 1))
    return Repair(at, 0, 1, none, stored)


def test_others_are_repaired_before_attention_reads_them(tiny: Executor) -> None:
    """A row whose repair writes the KV of earlier tokens equals one before which they stood from the beginning."""
    ids, layers = tokens(30, 7), range(len(tiny.spec.layers))
    with tiny.create_kv_cache() as whole, tiny.create_kv_cache() as repaired:
        whole.reserve(30)
        repaired.reserve(30)
        tiny.run(Batch.of([Row(Ids(ids[:20]), range(20), whole, want=HiddenOut(layers))]))
        expected = tiny.run(Batch.of([Row(Ids(ids[20:]), range(20, 30), whole)])).values
        repair = unchanged(tiny, ids[:20], range(20), layers)
        row = Row(Ids(ids[20:]), range(20, 30), repaired, repairs=(repair,))
        assert torch.equal(tiny.run(Batch.of([row])).values, expected)


def test_a_repair_reads_its_own_row_in_its_own_layers(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, repair = tokens(9, 7), unchanged(tiny, tokens(2, 1), range(9, 11), range(2))
    found = fresh_of_repairs(tiny, monkeypatch)
    with tiny.create_kv_cache(batch_size=2) as kv:
        kv.reserve(11)
        want = HiddenOut([0, 1])
        row = Row(
            Ids(ids), range(9), kv, 1, layers=LayerSpan(0, 2), want=want, repairs=(replace(repair, first=3, stop=4),)
        )
        seen = tiny.run(Batch.of([Row(Ids(ids[:4]), range(4), kv, 0), row])).kv[1]
    assert [layer for layer, *_ in found] == [0, 1]
    for layer, keys, values in found:
        assert torch.equal(keys, seen[layer].keys[3:4])
        assert torch.equal(values, seen[layer].values[3:4])


@pytest.mark.parametrize("run", [1, 3])
def test_a_decode_that_repairs_is_not_replayed(tiny: Executor, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = range(len(tiny.spec.layers))
    repair = unchanged(tiny, [5], range(2 * run, 2 * run + 1), layers)
    found = fresh_of_repairs(tiny, monkeypatch)
    with tiny.create_kv_cache() as kv:
        kv.reserve(2 * run + 1)
        for at in (0, run):
            row = Row(Ids([3] * run), range(at, at + run), kv, want=Last(run), repairs=(repair,))
            tiny.run(Batch.of([row]))
    assert [layer for layer, *_ in found] == list(layers) * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": 2, "stop": 2}, "no part of a row"),
        ({"stop": 99}, "no part of a row"),
        ({"stop": 2}, "a weight for each pair"),
        ({"positions": [20]}, "a weight for each pair"),
        ({"positions": [21, 20]}, "must ascend"),
        ({"positions": [3, 20]}, "none of the row's own"),
        ({"positions": [20, 64]}, "in room that reserve"),
        ({"stored": {}}, r"layers \[0, 1, "),
    ],
)
def test_a_repair_that_does_not_fit_its_row_is_refused(tiny: Executor, change: dict[str, Any], says: str) -> None:
    repair = unchanged(tiny, tokens(2, 1), range(20, 22), range(len(tiny.spec.layers)))
    with tiny.create_kv_cache() as kv:
        kv.reserve(22)
        with pytest.raises(InputError, match=says):
            Batch.of([Row(Ids(tokens(5, 2)), range(5), kv, repairs=(replace(repair, **change),))])


@given(joints=st.sets(st.integers(1, 59), min_size=1), budget=st.integers(0, 70))
def test_a_stage_is_cut_at_its_joints_alone(tiny: Executor, joints: set[int], budget: int) -> None:
    ends = sorted({*joints, 60})
    with tiny.create_kv_cache() as kv:
        kv.reserve(60)
        stage = RowStage(kv, range(60), tokens(60, 1), LayerSpan(), Last(), ends)
        while stage.left:
            row = stage.row(budget)
            stop = stage.at + len(row.positions)
            fits = [end for end in ends if stage.at < end <= stage.at + budget]
            assert stop == (fits[-1] if fits else next(end for end in ends if end > stage.at))
            stage.at = stop


def test_few_computed_tokens_say_nothing_of_others(tiny: Executor) -> None:
    """Nor do they hold a row together."""
    with tiny.create_kv_cache() as kv:
        kv.reserve(60)
        spans = [Span(0, 50)]
        for count in (LEAST - 1, LEAST):
            positions = [*range(10, 10 + count), *range(50, 60)]
            layer = LayerKV(torch.zeros(50, 1, 2), torch.zeros(50, 1, 2))
            repair = KVRepair(spans, positions, 0.5, lambda *_, one=layer: one, 3)  # type: ignore[misc]
            repairs = count >= LEAST
            found = repair.of(0, len(positions), LayerSpan(1))
            assert len(found) == repairs
            assert all(sorted(one.stored) == [1, 2] and one.positions[0] == 0 for one in found)
            assert repair.joints == [*range(count if repairs else 1, len(positions) + 1)]
            assert repair.of(count, len(positions), LayerSpan()) == ()


@pytest.mark.parametrize("strategy", ["head", "query"])
def test_repair_is_part_of_the_recipe(tiny: Executor, strategy: str) -> None:
    """It changes answers, the name that its KV is known by, and not how much is computed."""
    blend_prompt = BlendPrompt.of(
        [tokens(5, 1), tokens(60, 2), tokens(50, 3), tokens(2, 4)], [False, True, True, False]
    )
    made = [Recipe(0.3, strategy, check_layer=0, min_gain=0.0, repair=share) for share in (0.0, 0.8, 0.8)]
    with memory_store() as store:
        chunks = ChunkCache(tiny, store)
        found = [blended(tiny, chunks, blend_prompt, one, step) for one, step in zip(made, (512, 512, 6), strict=True)]
        logits, caches, blendings = zip(*found, strict=True)
        assert not torch.equal(logits[0], logits[1])
        torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-4)
        assert blendings[0].report().recomputed == blendings[1].report().recomputed
        assert blendings[0].report().recipe != blendings[1].report().recipe
        for kv in caches:
            kv.close()


def test_a_preempted_row_repairs_the_same_again(tiny: Executor) -> None:
    """A row that was made, and even run, but not taken leaves nothing behind."""
    blend_prompt = BlendPrompt.of([tokens(5, 1), tokens(60, 2), tokens(8, 4)], [False, True, False])
    made = Recipe(0.3, "head", min_gain=0.0)
    with memory_store() as store:
        chunks = ChunkCache(tiny, store)
        expected, kv, _ = blended(tiny, chunks, blend_prompt, made)
        again = Blending(tiny, chunks, blend_prompt, made)
        with kv, start(tiny, blend_prompt) as other:
            again.begin(other)
            tiny.run(Batch.of([again.next(512)]))
            again.next(512)
            assert torch.equal(expected, finish(tiny, again))
            other.commit([list(blend_prompt.ids[blend_prompt.exact :])])
            assert all(map(torch.equal, content(kv), content(other)))
