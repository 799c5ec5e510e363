"""Blending by hand: whatever is stored, however rows are cut and whoever stands beside, the numbers are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drive import blended, computed, content, finish, memory_store, start, tokens
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from kvilt.batch import Batch, HiddenOut, Ids, Last, LayerSpan, Row
from kvilt.blend.blender import PROBE_TOKENS, Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.blend.selection import FAR_TOKENS
from kvilt.config import RunConfig
from kvilt.errors import BlobError, InputError, StoreMiss
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.codec import describe
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.store.loading import Loading
from kvilt.store.store import Store

STRATEGIES = ("deviation", "head", "query", "head:0.3+query:0.7", "deviation+query", "deviation+head")


@pytest.fixture(scope="session", params=["full", "window"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    window = 9 if request.param == "window" else None
    folder = write_tiny(tmp_path_factory.mktemp("blend"), sliding_window=window, max_position_embeddings=640)
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as made:
        yield made


def recipe(ratio: float = 0.3, strategy: str = "query", **fields: object) -> Recipe:
    return Recipe.of(Recipe(ratio, strategy, check_layer=0, min_gain=0.0), **fields)


QUILT = BlendPrompt.of(
    [tokens(5, 1), tokens(40, 2), tokens(17, 3), tokens(40, 2), tokens(8, 4)], [False, True, True, True, False]
)


@st.composite
def quilts(draw: st.DrawFn) -> BlendPrompt:
    """Up to four segments of 0, 1 or many tokens, some of them twice, anything before, between and behind them."""
    length = st.sampled_from([0, 1, 2, 31, 32, 33, 45, 135])
    assert PROBE_TOKENS < 135, "a question may be longer than what is probed"
    segments = draw(st.lists(st.tuples(length, st.integers(0, 3), st.booleans()), min_size=1, max_size=4))
    made = BlendPrompt.of([tokens(count, seed) for count, seed, _ in segments], [flag for *_, flag in segments])
    return made if made.documents else BlendPrompt.of([tokens(3, 9), tokens(4, 8)], [False, True])


@settings(max_examples=examples(25))
@given(
    blend_prompt=quilts(),
    strategy=st.sampled_from(STRATEGIES),
    ratio=st.sampled_from([0.0, 0.1, 0.5]),
    first=st.sampled_from([0, 1, 4]),
    step=st.sampled_from([3, 7, 64, 512]),
    beside=st.booleans(),
    known=st.integers(0, 15),
)
def test_cold_warm_cut_and_crowded_are_the_same_to_the_bit(
    native: Executor,
    blend_prompt: BlendPrompt,
    strategy: str,
    ratio: float,
    first: int,
    step: int,
    beside: bool,
    known: int,
) -> None:
    made = recipe(ratio, strategy, first_tokens=first)
    with memory_store() as cold, memory_store() as other:
        chunks = ChunkCache(native, cold)
        logits, kv, blending = blended(native, chunks, blend_prompt, made)
        again, twin, second = blended(native, chunks, blend_prompt, made, step)  # everything is stored now
        assert torch.equal(logits, again)
        assert second.report().made == 0
        # A store that knows some of the documents, other cuts, and a decode of somebody else in every step.
        there = ChunkCache(native, other)
        for index, one in enumerate(blend_prompt.documents):
            if known >> index & 1:
                alone = BlendPrompt.of([blend_prompt.ids[one.start : one.stop]], [True])
                blended(native, there, alone, recipe(0.0, "head"))[1].close()
        third = Blending(native, there, blend_prompt, made)
        with start(native, blend_prompt) as mixed, native.create_kv_cache() as neighbour:
            third.begin(mixed)
            neighbour.reserve(3)
            rows = [Row(Ids([5, 6, 7]), range(3), neighbour)] if beside else []
            assert torch.equal(logits, finish(native, third, step, rows))
            mixed.commit([list(blend_prompt.ids[blend_prompt.exact :])])
            with kv, twin:
                assert all(map(torch.equal, content(kv), content(twin)))
                assert all(map(torch.equal, content(kv), content(mixed)))
        check_report(blending, blend_prompt, made)


def check_report(blending: Blending, blend_prompt: BlendPrompt, made: Recipe) -> None:
    report = blending.report()
    assert report.computed + report.reused + report.recomputed == len(blend_prompt.ids) - blend_prompt.exact
    distinct = {blend_prompt.ids[one.start : one.stop] for one in blend_prompt.documents}
    assert report.made == sum(map(len, distinct))
    forced = sum(min(made.first_tokens, len(one)) for one in blend_prompt.documents)
    ends = blend_prompt.documents[-1].stop == len(blend_prompt.ids)  # then the last token is one of them
    budget = int(made.ratio * blend_prompt.reused + 1e-9)
    assert max(budget, forced) <= report.recomputed <= max(budget, forced + ends)


@settings(max_examples=examples(15))
@given(blend_prompt=quilts(), strategy=st.sampled_from(STRATEGIES), step=st.sampled_from([1, 13, 512]))
def test_everything_computed_again_is_a_whole_prefill(
    native: Executor, blend_prompt: BlendPrompt, strategy: str, step: int
) -> None:
    with memory_store() as store:
        logits, kv, _ = blended(native, ChunkCache(native, store), blend_prompt, recipe(1.0, strategy), step)
        expected, whole = computed(native, blend_prompt.ids)
        with kv, whole:
            assert torch.equal(logits, expected)
            assert all(map(torch.equal, content(kv), content(whole)))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "k8v4"])
@pytest.mark.parametrize("strategy", ["deviation", "query"])
def test_other_numbers_in_pages(tmp_path: Path, store: Store, kv_dtype: str, strategy: str) -> None:
    config = RunConfig(kv_memory=1 << 22, backend="native", threads=1, kv_dtype=kv_dtype)
    executor = load_executor(write_tiny(tmp_path), config)
    chunks = ChunkCache(executor, store)
    logits, kv, _ = blended(executor, chunks, QUILT, recipe(1.0, strategy))
    expected, whole = computed(executor, QUILT.ids)
    with kv, whole:
        assert torch.equal(logits, expected)
    once, first, _ = blended(executor, chunks, QUILT, recipe(0.2, strategy), 512)
    twice, second, _ = blended(executor, chunks, QUILT, recipe(0.2, strategy), 5)
    with first, second:
        assert torch.equal(once, twice)


def test_the_reference_backend_blends_alike(tiny: Executor, store: Store) -> None:
    for strategy in STRATEGIES:
        logits, kv, _ = blended(tiny, ChunkCache(tiny, store), QUILT, recipe(1.0, strategy))
        expected, whole = computed(tiny, QUILT.ids)
        with kv, whole:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_mask_is_by_position(native: Executor, store: Store) -> None:
    """What is computed again early in the prompt does not change when what stands behind it does."""
    chunks, made = ChunkCache(native, store), recipe(0.0, "head", first_tokens=6)
    head, document = tokens(5, 1), tokens(40, 2)
    flags = [False, True, True, False]
    kept = []
    for seed in (20, 30):
        blend_prompt = BlendPrompt.of([head, document, tokens(33, seed), tokens(4, seed + 1)], flags)
        blending = Blending(native, chunks, blend_prompt, made)
        with start(native, blend_prompt) as kv:
            blending.begin(kv)
            finish(native, blending)
            pool, row = native.pool, kv.row(0)
            groups = range(len(pool.stores))
            kept.append([pool.ops.read_slots(pool.stores[g], row.slots(g, 0, 45)) for g in groups])
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_chosen_tokens_are_those_of_one_forward_after_the_other(native: Executor, store: Store) -> None:
    """Each chosen token alone, in order, over documents as they are placed: the same bits as all of them together."""
    chunks, made = ChunkCache(native, store), recipe(0.4, "head", repair=0.0)
    logits, kv, _ = blended(native, chunks, QUILT, made)
    slow = Blending(native, chunks, QUILT, made)
    with kv, start(native, QUILT) as other:
        slow.begin(other)
        row = slow.next(512)
        assert isinstance(row.source, Ids)
        loads = row.loads  # documents come with the first row
        assert loads
        for token, position in zip(row.source.ids, row.positions, strict=True):
            last = native.run(Batch.of([Row(Ids([token]), [position], other, loads=loads)]))
            loads = ()
        assert torch.equal(logits, last.values[0])


def test_a_question_chooses_by_attention_and_distance(native: Executor, store: Store) -> None:
    """The best of what the probe saw, each token counting the less the later it stands."""
    blending = Blending(native, ChunkCache(native, store), QUILT, recipe(0.2, "query"))
    with start(native, QUILT) as kv:
        blending.begin(kv)
        mass = torch.empty(0)
        while not isinstance((row := blending.next(512)).want, Last):
            found = native.run(Batch.of([row]))
            mass = found.mass.get(0, mass)
            blending.took(row, found, 0)
        worth = {
            p: float(mass[p]) / (1 + p / FAR_TOKENS) for one in QUILT.documents for p in range(one.start, one.stop)
        }
        best = sorted(worth, key=lambda p: -worth[p])[: int(0.2 * QUILT.reused)]
        assert [p for p in row.positions if p in worth] == sorted(best)
        blending.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_that_arrive_late_cut_the_span_and_nothing_else(
    native: Executor, store: Store, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    chunks, made = ChunkCache(native, store), recipe(0.3, strategy)
    expected, kv, _ = blended(native, chunks, QUILT, made)
    kv.close()
    dice = random.Random(5)
    monkeypatch.setattr(Loading, "layers_ready", property(lambda _self: dice.randrange(4)))
    spans = []

    def watched(executor: Executor, blending: Blending) -> torch.Tensor:
        own = blending.next
        monkeypatch.setattr(blending, "next", lambda step: spans.append(row := own(step)) or row)
        return finish(executor, blending, 9)

    for _ in range(5):
        blending = Blending(native, chunks, QUILT, made)
        with start(native, QUILT) as other:
            blending.begin(other)
            assert torch.equal(expected, watched(native, blending))
    assert any(isinstance(row.want, HiddenOut) and row.layers.stop < 3 for row in spans)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_record_that_fails_half_way_is_computed_instead(
    native: Executor, store: Store, monkeypatch: pytest.MonkeyPatch, strategy: str, broken: int
) -> None:
    chunks, made = ChunkCache(native, store), recipe(0.3, strategy)
    expected, kv, _ = blended(native, chunks, QUILT, made)
    kv.close()
    blending = Blending(native, chunks, QUILT, made)
    blending.open()
    whole = Loading.layer
    victim = chunks.open(QUILT.ids[45:62])
    loading = [piece.loading for one in blending._documents._found.values() for piece in one.task._pieces]  # type: ignore[attr-defined]
    found = next(one for one in loading if one.address.key == victim.address.key)

    def layer(self: Loading, index: int) -> object:
        if self is found and index >= broken:
            self._reason = "checksum"
            raise StoreMiss("checksum")
        return whole(self, index)

    monkeypatch.setattr(Loading, "layer", layer)
    with start(native, QUILT) as other:
        blending.begin(other)
        assert torch.equal(expected, finish(native, blending))
    assert blending.report().made == 17


def test_gradual_filtering_narrows_layer_by_layer(tmp_path: Path, store: Store) -> None:
    executor = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    chunks, made = ChunkCache(executor, store), recipe(0.2, "deviation", gradual=[2.0])
    blended(executor, chunks, QUILT, made)[1].close()
    blending = Blending(executor, chunks, QUILT, made)
    sizes = []
    with start(executor, QUILT) as kv:
        blending.begin(kv)
        while not blending.done:
            row = blending.next(512)
            sizes.append((row.layers, len(row.positions)))
            blending.took(row, executor.run(Batch.of([row])), 0)
    outside = len(QUILT.ids) - QUILT.exact - QUILT.reused
    everything = (LayerSpan(0, 1), len(QUILT.ids) - QUILT.exact)
    assert sizes == [everything, (LayerSpan(1, 2), outside + 38), (LayerSpan(2), outside + 19)]
    assert blending.report().recomputed == 38
    # With everything computed again nothing is filtered.
    logits, kv, _ = blended(executor, chunks, QUILT, recipe(1.0, "deviation", gradual=[2.0]))
    expected, whole = computed(executor, QUILT.ids)
    with kv, whole:
        assert torch.equal(logits, expected)


def test_a_document_that_stands_where_it_was_computed_is_left_alone(native: Executor, store: Store) -> None:
    """The first document, with nothing before it, is right; the budget goes to the others."""
    blend_prompt = BlendPrompt.of([tokens(30, 1), tokens(30, 2), tokens(4, 3)], [True, True, False])
    blending = Blending(native, ChunkCache(native, store), blend_prompt, recipe(0.5, "head"))
    with start(native, blend_prompt) as kv:
        blending.begin(kv)
        while not blending.done:
            row = blending.next(512)
            chosen = list(row.positions)
            blending.took(row, native.run(Batch.of([row])), 0)
    assert chosen == list(range(30, 64))


def test_documents_behind_a_fixed_beginning(native: Executor, store: Store) -> None:
    """Documents that were computed behind a few tokens are other chunks, and exact behind just these tokens."""
    context_prefix = tokens(3, 40)
    plain, backed = ChunkCache(native, store), ChunkCache(native, store, context_prefix)
    document = tokens(20, 41)
    for chunks in (plain, backed):
        blended(native, chunks, BlendPrompt.of([document], [True]), recipe(0.0, "head"))[1].close()
    one, other = (chunks.open(document).layer(2) for chunks in (plain, backed))
    assert not torch.equal(one.values, other.values)
    blend_prompt = BlendPrompt.of([context_prefix, document, tokens(4, 42)], [False, True, False])
    expected, whole = computed(native, blend_prompt.ids)
    logits, kv, blending = blended(native, backed, blend_prompt, recipe(0.0, "head"))
    with whole, kv:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2)  # keys were rounded once more
    assert blending.report().made == 0


def test_tenants_do_not_share_documents(native: Executor, store: Store) -> None:
    chunks, document = ChunkCache(native, store), tokens(20, 41)
    blend_prompt = BlendPrompt.of([document, tokens(2, 1)], [True, False])
    for tenant, made in (("one", 20), ("one", 0), ("other", 20), ("", 20)):
        blending = Blending(native, chunks, blend_prompt, recipe(0.1, "head"), tenant)
        with start(native, blend_prompt) as kv:
            blending.begin(kv)
            finish(native, blending)
        assert blending.report().made == made


def test_blended_kv_never_enters_the_prefix_index(native: Executor, store: Store) -> None:
    _, kv, blending = blended(native, ChunkCache(native, store), QUILT, recipe(0.2))
    native.prefixes.clear()
    prefix_keys = PrefixKeys(PrefixScope())
    with kv, kv.fork() as child:
        assert kv.origin == child.origin == blending.recipe.name != "exact"
        native.prefixes.insert(kv.row(0), prefix_keys)
        native.prefixes.insert(child.row(0), prefix_keys)
        assert len(native.prefixes) == 0
        child.truncate(0)
        assert child.origin == "exact"
    _, whole = computed(native, QUILT.ids)
    with whole:
        native.prefixes.insert(whole.row(0), prefix_keys)
        assert len(native.prefixes) > 0
    native.prefixes.clear()


def test_a_blended_cache_says_so_in_its_bytes(native: Executor, store: Store) -> None:
    _, kv, blending = blended(native, ChunkCache(native, store), QUILT, recipe(0.2))
    with kv, native.create_kv_cache() as other:
        data = kv.serialize()
        assert describe(data).identity.origin == blending.recipe.name
        with pytest.raises(BlobError, match="origin"):
            other.load(data)


def test_a_blended_cache_opens_again_for_a_caller_that_names_its_origin(
    native: Executor, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kv, blending = blended(native, ChunkCache(native, store), QUILT, recipe(0.2))
    origin, own = blending.recipe.name, native.pool.identity()
    with kv:
        kv.save(tmp_path / "blended.kv")
        with monkeypatch.context() as patch:
            patch.setattr(native.pool, "identity", lambda: replace(own, numerics="another CPU"))
            kv.save(tmp_path / "foreign.kv")
        for wrong in ({}, {"origin": "blend:another"}):
            with pytest.raises(BlobError, match=r"identity\.origin: .* give origin="):
                native.open_kv_cache(tmp_path / "blended.kv", **wrong)
        with native.open_kv_cache(tmp_path / "blended.kv", origin=origin) as again, native.create_kv_cache() as other:
            other.load(kv.serialize(), origin=origin)
            for same in (again, other):
                assert same.origin == origin
                assert same.serialize() == kv.serialize()
        with pytest.raises(BlobError, match=r"identity\.numerics"):  # computed again, it would be exact and not this
            native.open_kv_cache(tmp_path / "foreign.kv", origin=origin)
        with native.open_kv_cache(tmp_path / "foreign.kv", accept_numerics=True, origin=origin) as accepted:
            assert accepted.origin == origin


def test_a_stored_blended_cache_is_found_by_its_recipe_alone(native: Executor, store: Store) -> None:
    _, kv, blending = blended(native, ChunkCache(native, store), QUILT, recipe(0.2))
    identity, layout = native.pool.identity(), native.layout
    with kv:
        store.put_cache(kv)
        assert not store.open_row(identity, layout, kv.tokens()).hit()
        found = store.open_row(replace(identity, origin=blending.recipe.name), layout, kv.tokens())
        with KVCache.of_images(native.pool, [found.image(layout)], kv.capacity) as again:
            assert again.origin == kv.origin
            assert all(map(torch.equal, content(kv), content(again)))


def test_recipes_that_a_model_cannot_follow_are_refused(native: Executor, store: Store) -> None:
    chunks = ChunkCache(native, store)
    with pytest.raises(InputError, match="check_layer"):
        Blending(native, chunks, QUILT, Recipe(0.2, "deviation", check_layer=2))
    with pytest.raises(InputError, match="mass_layers"):
        Blending(native, chunks, QUILT, Recipe(0.2, "query", mass_layers=(3,)))


def test_nothing_is_left_behind(native: Executor, store: Store) -> None:
    """Also by a blending that is given up half way, while a document is being computed."""
    free = native.pool.free_pages()
    for rounds in range(4):
        blending = Blending(native, ChunkCache(native, store), QUILT, recipe(0.2, "deviation"), tenant=str(rounds))
        with start(native, QUILT) as kv:
            blending.begin(kv)
            for _ in range(rounds * 3):
                row = blending.next(11)
                blending.took(row, native.run(Batch.of([row])), 0)
            blending.close()
    assert native.pool.free_pages() == free


def test_a_blending_can_begin_again(native: Executor, store: Store) -> None:
    """After a preemption: from the first row on, with what was stored meanwhile."""
    made = recipe(0.2)
    expected, kv, _ = blended(native, ChunkCache(native, store), QUILT, made)
    kv.close()
    blending = Blending(native, ChunkCache(native, store), QUILT, made)
    for rows in (0, 1, 2):
        with start(native, QUILT) as first:
            blending.begin(first)
            for _ in range(rows):
                row = blending.next(4)
                blending.took(row, native.run(Batch.of([row])), 0)
    with start(native, QUILT) as last:
        blending.begin(last)
        assert torch.equal(expected, finish(native, blending))


def test_segments() -> None:
    made = BlendPrompt.of([[1, 2], [], [3], [4, 5]], [False, True, True, False])
    assert made.ids == (1, 2, 3, 4, 5)
    assert [(one.start, one.stop) for one in made.documents] == [(2, 3)]
    assert (made.exact, made.reused, made.question.start) == (2, 1, 3)
    assert BlendPrompt.of([[1], [2, 3]], [False, True]).question.start == 2


@pytest.mark.parametrize(
    ("lengths", "ratio", "strategy", "worth"),
    [
        ([10, 400, 10], 0.15, "head", True),
        ([10, 400, 10], 0.95, "head", False),
        ([10, 4, 400], 0.15, "head", False),
        ([10, 400, 300], 0.15, "query", False),
    ],
)
def test_small_gain_is_no_blend(lengths: Sequence[int], ratio: float, strategy: str, worth: bool) -> None:
    blend_prompt = BlendPrompt.of([tokens(count, 1) for count in lengths], [False, True, False])
    assert blend_prompt.worth(Recipe(ratio, strategy), 30) is worth
    assert blend_prompt.worth(Recipe(ratio, strategy, min_gain=0.0), 30)  # 0: whatever it saves
    assert not BlendPrompt.of([[1, 2]], [False]).worth(Recipe(min_gain=0.0), 30)
