"""A caller's retriever and blend executor in the engine: what they give is used, what they fail to give is computed."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import blended, computed, finish, memory_store, start, tokens
from small import Ear, load_small, run
from stores import always
from torch import Tensor

import kvilt
from kvilt.blend import (
    BlendExecutor,
    BlendOutput,
    BlendRetriever,
    BlendRetrieverResult,
    BlendRetrieverTask,
    KeyRotation,
    Recipe,
    SelectiveBlend,
    key_rotations,
)
from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.plugins import BlendPlugins
from kvilt.blend.recipe import BlendPrompt, Span
from kvilt.blend.recipe_blend import RecipeBlend
from kvilt.blend.retriever import StoredTask
from kvilt.engine.engine import Engine
from kvilt.engine.request import Request
from kvilt.errors import InputError, ParamError, StoreMiss
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store

SYSTEM, DOCUMENTS, QUESTION = tokens(10, 1), [tokens(40, 2), tokens(30, 3)], tokens(9, 5)
PROMPT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, False])
DEVIATION = Recipe(0.3, "deviation", check_layer=0, repair=0.0, min_gain=0.0)
RECIPES = [
    DEVIATION,
    Recipe(0.3, "query", min_gain=0.0),
    Recipe(0.2, "head:0.5+deviation:0.5", check_layer=0, gradual=(1.5,), min_gain=0.0),
]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("plugins"), 64, None, "reference")


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as made:
        yield made


@pytest.fixture
def chunks(executor: Executor, store: Store) -> ChunkCache:
    made = ChunkCache(executor, store)
    blended(executor, made, PROMPT, DEVIATION)[1].close()  # the documents are stored now
    return made


class Foreign(BlendRetriever, BlendRetrieverTask):
    """Another system's KV: keys rotated where they once stood, heads and dimensions on one axis, and some holes."""

    def __init__(self, executor: Executor, chunks: ChunkCache, holes: Sequence[int] = ()) -> None:
        self._own = chunks.retriever()
        self._rotations: tuple[KeyRotation, ...] = key_rotations(executor.spec)
        self._holes = list(holes)
        self.asked: list[tuple[list[int], list[int]]] = []
        self.before: Callable[[int], object] = lambda _layer: None

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> BlendRetrieverTask:
        self.asked += [(one.tolist(), list(at)) for one, at in zip(full_prompts, indices, strict=True)]
        self.before(-1)
        self._task = self._own.new_request(full_prompts, indices)
        return self

    def result(self, layer_id: int) -> BlendRetrieverResult:
        self.before(layer_id)
        found = self._task.result(layer_id)
        valid = found.valid_mask.clone()
        valid[self._holes] = 0
        if found.k is None or found.v is None:
            return found
        origins = torch.where(valid.bool(), torch.arange(len(valid)) * 3 % 50, 0)
        k, v = self._rotations[layer_id].place(found.k, origins), found.v.clone()
        k[~valid.bool()], v[~valid.bool()] = torch.nan, torch.nan  # undefined
        return BlendRetrieverResult(k.flatten(1), v.flatten(1), valid, origins, rotated=True)


def answer(executor: Executor, chunks: ChunkCache, recipe: Recipe, plugins: BlendPlugins) -> tuple[Tensor, Blending]:
    """Log-probabilities after the prompt, and what blended it."""
    blending = Blending(executor, chunks, PROMPT, recipe, plugins=plugins)
    with start(executor, PROMPT) as kv:
        blending.begin(kv)
        return finish(executor, blending).log_softmax(-1), blending


# Retrievers.


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.strategy)
def test_kv_of_another_system_gives_the_same_answer(executor: Executor, chunks: ChunkCache, recipe: Recipe) -> None:
    foreign = Foreign(executor, chunks)
    found, blending = answer(executor, chunks, recipe, BlendPlugins(foreign))
    expected, own = answer(executor, chunks, recipe, BlendPlugins())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert foreign.asked == [(list(PROMPT.ids), [10, 50, 80])]  # the whole prompt, and where its segments start
    assert blending.report().recomputed == own.report().recomputed > 0
    assert blending.report().made == 0
    assert blending.origin == f"{recipe.name} retriever=Foreign"


def test_tokens_without_kv_are_computed(executor: Executor, chunks: ChunkCache) -> None:
    """ "If the KV of a token is not available, the mask will be 0, and the values in the KV tensor undefined"."""
    holes = [10, 11, 30, 49, *range(60, 70)]
    found, blending = answer(executor, chunks, DEVIATION, BlendPlugins(Foreign(executor, chunks, holes)))
    assert bool(found.isfinite().all())
    report = blending.report()
    assert report.computed == len(QUESTION) + len(holes)
    assert report.recomputed == int(0.3 * (70 - len(holes)))
    assert report.reused + report.recomputed == 70 - len(holes)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.strategy)
def test_nothing_retrieved_is_a_whole_prefill(executor: Executor, chunks: ChunkCache, recipe: Recipe) -> None:
    nothing = Foreign(executor, chunks, range(len(PROMPT.ids)))
    found, blending = answer(executor, chunks, recipe, BlendPlugins(nothing))
    logits, kv = computed(executor, PROMPT.ids)
    kv.close()
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=1e-4)
    assert (blending.report().reused, blending.report().recomputed) == (0, 0)


@pytest.mark.parametrize("at", [-1, 0, 2])
@pytest.mark.parametrize("error", [RuntimeError("the cable"), StoreMiss("gone")], ids=["error", "miss"])
def test_what_a_retriever_fails_to_give_is_computed(
    executor: Executor, chunks: ChunkCache, at: int, error: Exception
) -> None:
    foreign = Foreign(executor, chunks)

    def fail(layer: int) -> None:
        if layer == at:
            raise error

    foreign.before = fail
    found, _ = answer(executor, chunks, DEVIATION, BlendPlugins(foreign))
    if at < 1:  # nothing came: the prompt is computed as a whole
        logits, kv = computed(executor, PROMPT.ids)
        kv.close()
        expected = logits.log_softmax(-1)
    else:
        expected, _ = answer(executor, chunks, DEVIATION, BlendPlugins())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_retriever_that_waits_holds_nobody_up(executor: Executor, chunks: ChunkCache) -> None:
    foreign, gate = Foreign(executor, chunks), threading.Event()
    foreign.before = lambda layer: gate.wait() if layer in (-1, 2) else None
    engine = Engine(executor, chunks=always(chunks))
    slow, quick = Ear(), Ear()
    params = SamplingParams(max_tokens=4, temperature=0.0)
    fields: dict[str, Any] = {"documents": PROMPT.documents, "recipe": DEVIATION}
    engine.add(engine.prepare(Request(PROMPT.ids, params, blend_plugins=BlendPlugins(foreign), **fields), slow))
    engine.add(engine.prepare(Request(tokens(20, 9), params), quick))
    run(engine, lambda: quick.over)
    assert not slow.over
    gate.set()
    run(engine, lambda: slow.over)
    plain = Ear()
    engine.add(engine.prepare(Request(PROMPT.ids, params, **fields), plain))
    run(engine, lambda: plain.over)
    assert slow.tokens == plain.tokens


# Executors.


class Watched(BlendExecutor):
    """Every second token at layer 0, and of these every third at layer 1."""

    selection_layers = (0, 1)
    calls: list[dict[str, Any]]

    def blend(
        self,
        layer_id: int,
        retrieved_k: Tensor | None,
        retrieved_v: Tensor | None,
        valid_mask: Tensor,
        original_positions: Tensor,
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        self.calls.append({name: value for name, value in locals().items() if name not in ("self", "__class__")})
        keep = torch.arange(0, len(positions), layer_id + 2)
        return BlendOutput(fresh_q[keep], fresh_k, fresh_v, positions[keep], keep, query_start_loc)


def test_an_executor_is_called_at_its_layers_and_only_there(executor: Executor, chunks: ChunkCache) -> None:
    class Own(Watched):
        calls: list[dict[str, Any]] = []  # noqa: RUF012

    _, blending = answer(executor, chunks, DEVIATION, BlendPlugins(executor=Own))
    first, second = Own.calls
    spec, everything = executor.spec.layers[0].attention, torch.arange(10, 89)
    assert (first["layer_id"], second["layer_id"]) == (0, 1)
    assert torch.equal(first["positions"], everything)
    assert first["valid_mask"].tolist() == [1] * 70 + [0] * 9
    assert first["query_start_loc"].tolist() == [0, 79]
    assert first["fresh_q"].shape == (79, spec.heads, spec.head_dim)
    assert first["fresh_k"].shape == first["retrieved_k"].shape == first["retrieved_v"].shape
    # In the first layer keys depend on tokens alone: what is retrieved stands where fresh keys stand.
    torch.testing.assert_close(first["fresh_k"][:70], first["retrieved_k"][:70], rtol=0, atol=1e-5)
    chosen = sorted({*range(10, 80, 2), *range(80, 89)})  # tokens without KV are computed in any case
    assert second["positions"].tolist() == chosen
    assert len(second["fresh_v"]) == len(chosen)
    assert len(second["retrieved_v"]) == len(second["valid_mask"]) == 79
    assert blending.report().recomputed == 35
    assert blending.origin == f"{DEVIATION.name} executor=Own"


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_selective_blend_in_the_engine_is_the_recipe(executor: Executor, chunks: ChunkCache, ratio: float) -> None:
    def paper() -> SelectiveBlend:
        return SelectiveBlend(key_rotations(executor.spec), ratio, 0, selects_only=True)

    found, blending = answer(executor, chunks, DEVIATION, BlendPlugins(executor=paper))
    expected, own = answer(executor, chunks, Recipe.of(DEVIATION, ratio=ratio), BlendPlugins())
    assert torch.equal(found, expected)
    assert blending.report().recomputed == own.report().recomputed


def test_the_engine_itself_goes_through_the_interfaces(
    executor: Executor, chunks: ChunkCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    def watch(owner: type, name: str) -> None:
        called = getattr(owner, name)

        def watched(self: Any, layer: int, *given: Any) -> Any:
            seen.append((name, layer))
            return called(self, layer, *given)

        monkeypatch.setattr(owner, name, watched)

    watch(StoredTask, "result")
    watch(RecipeBlend, "blend")
    answer(executor, chunks, DEVIATION, BlendPlugins())
    assert {("result", 0), ("result", 1), ("result", 2)} <= set(seen)
    assert [one for one in seen if one[0] == "blend"] == [("blend", 0)]


def test_what_keeps_no_promise_is_refused(executor: Executor, chunks: ChunkCache) -> None:
    def asked(plugins: BlendPlugins, documents: tuple[Span, ...] = PROMPT.documents) -> None:
        request = Request(PROMPT.ids, None, documents=documents, recipe=DEVIATION, blend_plugins=plugins)
        Engine(executor, chunks=always(chunks)).prepare(request, Ear())

    class Silent(Watched):
        selection_layers = ()

    class Late(Watched):
        selection_layers = (2,)

    for wrong, why in ((Silent, "must name its selection_layers"), (Late, "lie between 0 and 1"), (list, "must make")):
        with pytest.raises(ParamError, match=why):
            asked(BlendPlugins(executor=wrong))  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="BlendRetriever"):
        asked(BlendPlugins(object()))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="with documents"):
        asked(BlendPlugins(Foreign(executor, chunks)), ())

    class Wild(Watched):
        selection_layers = (0,)
        calls: list[dict[str, Any]] = []  # noqa: RUF012

        def blend(self, *given: Any) -> BlendOutput:
            out = super().blend(*given)
            return BlendOutput(out.q, out.k, out.v, out.positions, out.local_indices + 1000, out.query_start_loc)

    with pytest.raises(InputError, match="row numbers"):
        answer(executor, chunks, DEVIATION, BlendPlugins(executor=Wild))


def test_both_through_the_facade(tiny_llm: LLM) -> None:
    class Own(Watched):
        selection_layers = (1,)
        calls: list[dict[str, Any]] = []  # noqa: RUF012

    tiny_llm.warm(DOCUMENTS)
    recipe = Recipe(min_gain=0.0)
    done = tiny_llm.generate(
        QUESTION,
        documents=DOCUMENTS,
        retriever=tiny_llm.retriever(),
        blend_executor=Own,
        recipe=recipe,
        max_tokens=2,
        temperature=0.0,
    )
    assert len(Own.calls) == 1
    assert done.usage.recipe == f"{recipe.name} retriever=StoreRetriever executor=Own"
    assert done.usage.blended_recomputed == 24  # every third of 70


def test_the_example_runs(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kvilt, "load", lambda: nullcontext(tiny_llm))
    made = runpy.run_path(str(Path(__file__).parent.parent.parent / "examples" / "own_selection.py"))
    assert made["done"].usage.blended_recomputed > 0
    assert "executor=RareValues" in capsys.readouterr().out
