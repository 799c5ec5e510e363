"""Prompts with embedding rows: the same answers as the ids they stand for, and KV that is known by their bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import Free
from small import Ear, finish, load_small, run
from stores import always
from tiny import VOCAB
from torch import Tensor

from kvilt import Inputs
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import Span
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.counters import PREEMPTIONS
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.handles.handles import Handles
from kvilt.engine.prompt_embeds import PromptEmbeds
from kvilt.engine.request import Request
from kvilt.errors import InputError, ParamError
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.inputs import read_inputs
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.ngram import NgramDrafter
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

SIZE = 32
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPT = [(7 * i + i // 5) % 60 for i in range(100)]
PLACES = [0, *range(30, 50), 77, 99]


def table(executor: Executor) -> Tensor:
    """What ids enter the first layer as."""
    assert isinstance(executor, ModelExecutor)
    decoder = executor._decoder
    return decoder.ops.embed(decoder.embedding, torch.arange(VOCAB), executor.spec.embed_scale).float().clone()


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 0.4


def embedded(executor: Executor, ids: Sequence[int], at: Sequence[int], vectors: Tensor) -> PromptEmbeds:
    (given,) = read_inputs(Inputs(ids, at, vectors), 1, VOCAB, executor.spec.hidden_size)
    made = PromptEmbeds.of(given)
    assert made is not None
    return made


def as_rows(executor: Executor, ids: Sequence[int], at: Sequence[int]) -> tuple[list[int], PromptEmbeds]:
    """A prompt whose ids at these places are given as the rows of the embedding; the ids there say something else."""
    places = set(at)
    shown = [(token + 1) % VOCAB if i in places else token for i, token in enumerate(ids)]
    return shown, embedded(executor, shown, at, table(executor)[[ids[i] for i in at]])


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams | None = GREEDY, **fields: object) -> Ear:
    request = Request(prompt, params, **fields)  # type: ignore[arg-type]
    ear = Ear(request.samples)
    engine.add(engine.prepare(request, ear))
    return ear


def said(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: object) -> Ear:
    ear = ask(engine, prompt, params, **fields)
    run(engine, lambda: ear.over)
    assert ear.error is None
    return ear


def alone(
    executor: Executor, prompt: Sequence[int], embeds: PromptEmbeds, params: SamplingParams = GREEDY
) -> list[int]:
    """What the executor's own loop says."""
    assert params.max_tokens is not None
    with executor.create_kv_cache() as kv:
        given = Inputs(prompt, embeds.at, embeds.vectors)
        return executor.sample_tokens(params.max_tokens, given, kv, params=params)[0]


@pytest.fixture
def small_steps(executor: Executor, nothing_left: None) -> Engine:
    return Engine(executor, EngineConfig(step_tokens=16, max_rows=8))


# The same answers.


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 3, "logprobs": 2}])
def test_rows_of_the_embedding_say_what_their_ids_say(
    executor: Executor, engine: Engine, nothing_left: None, params: dict[str, object]
) -> None:
    drawn = SamplingParams.of(GREEDY, **params)
    plain = said(engine, PROMPT, drawn)
    shown, embeds = as_rows(executor, PROMPT, PLACES)
    with_rows = said(engine, shown, drawn, embeds=embeds)
    assert with_rows.tokens == plain.tokens
    every, all_rows = as_rows(executor, PROMPT, range(len(PROMPT)))
    assert said(engine, every, drawn, embeds=all_rows).tokens == plain.tokens


@pytest.mark.parametrize("step_tokens", [8, 33, 512])
def test_chunks_of_a_prompt_with_rows_are_equal_to_the_bit(
    executor: Executor, nothing_left: None, step_tokens: int
) -> None:
    embeds = embedded(executor, PROMPT, PLACES, rows(len(PLACES), executor.spec.hidden_size, 5))
    with executor.create_kv_cache() as whole:
        executor.prefill(Inputs(PROMPT, embeds.at, embeds.vectors), whole)
        expected = whole.row(0).image()
    engine = Engine(executor, EngineConfig(step_tokens=step_tokens, max_rows=8))
    ear = said(engine, PROMPT, None, embeds=embeds, keep_kv=True)  # type: ignore[arg-type]
    assert ear.ends[0] is not None
    assert ear.ends[0].kv is not None
    with ear.ends[0].kv as kv:
        image = kv.row(0).image()
        assert (image.ids, image.embeds, image.firsts) == (expected.ids, expected.embeds, expected.firsts)
        for one, other in zip(image.groups, expected.groups, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_the_rows_of_a_request_are_its_own(executor: Executor, engine: Engine, nothing_left: None) -> None:
    """A caller that writes into its tensor later changes neither the answer nor what is cached under its hash."""
    vectors = rows(len(PLACES), executor.spec.hidden_size, 6)
    embeds = embedded(executor, PROMPT, PLACES, vectors)
    expected = alone(executor, PROMPT, embeds)
    ear = ask(engine, PROMPT, embeds=embeds)
    vectors.zero_()
    finish(engine)
    assert ear.tokens == [expected]


def test_penalties_count_no_row(executor: Executor, engine: Engine, nothing_left: None) -> None:
    """The id in the place of a row is not looked at, by penalties neither."""
    params = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
    vectors = rows(len(PLACES), executor.spec.hidden_size, 7)
    heard = []
    for filler in (0, 7, 23):
        ids = [filler if i in PLACES else token for i, token in enumerate(PROMPT)]
        heard.append(said(engine, ids, params, embeds=embedded(executor, ids, PLACES, vectors)).tokens)
    assert heard[0] == heard[1] == heard[2]


# KV that is known by bytes.


def test_equal_rows_share_kv_and_others_never_do(executor: Executor, small_steps: Engine) -> None:
    width, seen = executor.spec.hidden_size, []
    vectors = rows(20, width, 8)
    at = range(40, 60)  # on the second page and no other
    nearly = vectors.clone()
    nearly[-1, -1] += 1e-6
    for given, cached in (
        (vectors, 0),
        (vectors, 99),
        (nearly, SIZE),  # one bit of one number is another image
        (rows(20, width, 9), SIZE),
        (vectors.flip(0), SIZE),
        (vectors, 99),
    ):
        embeds = embedded(executor, PROMPT, at, given)
        ear = said(small_steps, PROMPT, embeds=embeds)
        assert ear.tokens == [alone(executor, PROMPT, embeds)]
        assert ear.ends[0] is not None
        whole_pages = cached - cached % SIZE
        assert ear.ends[0].cached in (cached, whole_pages)
        seen.append(tuple(ear.tokens[0]))
    plain = said(small_steps, PROMPT)
    assert plain.ends[0] is not None
    assert plain.ends[0].cached == SIZE  # the ids below the rows are not the rows
    assert seen[0] == seen[1] == seen[5]


def test_a_fork_and_the_next_turn_find_it(executor: Executor, small_steps: Engine) -> None:
    embeds = embedded(executor, PROMPT, PLACES, rows(len(PLACES), executor.spec.hidden_size, 10))
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, n=2)
    first = said(small_steps, PROMPT, params, embeds=embeds)
    turn = [*PROMPT, *first.tokens[1], 3, 4]
    again = said(small_steps, turn, embeds=embeds)
    assert again.ends[0] is not None
    assert again.ends[0].cached >= 3 * SIZE
    assert again.tokens == [alone(executor, turn, embeds)]


def test_preempted_prompts_compute_their_rows_again(tmp_path: Path) -> None:
    executor = load_small(tmp_path, 9, None, "native")
    engine = Engine(executor, EngineConfig(step_tokens=32, max_rows=8))
    dice, asked = random.Random(4), []
    for index in range(6):
        ids = [dice.randrange(VOCAB) for _ in range(dice.randrange(20, 60))]
        at = sorted(dice.sample(range(len(ids)), 9))
        embeds = embedded(executor, ids, at, rows(9, executor.spec.hidden_size, index))
        params = SamplingParams(max_tokens=60, temperature=0.0)
        asked.append((ask(engine, ids, params, embeds=embeds), ids, embeds, params))
    finish(engine)
    assert engine.metrics.snapshot()[PREEMPTIONS.name]["series"][0]["value"] > 0
    for ear, ids, embeds, params in asked:
        assert ear.tokens == [alone(executor, ids, embeds, params)]


def test_a_borrowed_cache_may_stand_before_rows(executor: Executor, engine: Engine, nothing_left: None) -> None:
    width = executor.spec.hidden_size
    embeds = embedded(executor, PROMPT, [*range(10, 20), *range(60, 70)], rows(20, width, 12))
    with executor.create_kv_cache() as kv:
        executor.prefill(Inputs(PROMPT[:50], embeds.at[:10], embeds.vectors[:10]), kv)
        ear, request = Ear(), Request(PROMPT, GREEDY, reuse=False, embeds=embeds)
        engine.add(engine.prepare(request, ear, BorrowedKV(kv.fork())))
        finish(engine)
    assert ear.tokens == [alone(executor, PROMPT, embeds)]


def test_a_store_keeps_them_by_their_bytes(tmp_path: Path) -> None:
    executor = load_small(tmp_path / "model", 40, None, "native")
    embeds = embedded(executor, PROMPT, PLACES, rows(len(PLACES), executor.spec.hidden_size, 13))
    other = embedded(executor, PROMPT, PLACES, rows(len(PLACES), executor.spec.hidden_size, 14))
    limits = StoreLimits(lookup_s=300, layer_s=300, close_s=300)
    expected = alone(executor, PROMPT, embeds), alone(executor, PROMPT, other)
    for cached in (0, 3 * SIZE):
        with closing(Store(None, [Disk(tmp_path / "kv", Budget(1 << 28))], limits=limits)) as store:
            engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), store=store)
            ear = said(engine, PROMPT, embeds=embeds)
            assert ear.tokens == [expected[0]]
            assert ear.ends[0] is not None
            assert ear.ends[0].cached == cached
            if cached:
                ear = said(engine, PROMPT, embeds=other)
                assert ear.tokens == [expected[1]]
                assert ear.ends[0] is not None
                assert ear.ends[0].cached == 0
            engine.close()
            assert store.flush(300)
            executor.prefixes.clear()


# Beside other features.


def test_beside_drafts_such_a_prompt_is_drawn_without(executor: Executor, nothing_left: None) -> None:
    loop = [1, 2, 3, 4] * 20
    drafting = Drafting(NgramDrafter(), VOCAB, Free())
    engine = Engine(executor, EngineConfig(max_rows=8), features=[drafting])
    params = SamplingParams(max_tokens=40, temperature=0.0)
    embeds = embedded(executor, loop, [5, 6], rows(2, executor.spec.hidden_size, 15))
    with_rows, plain = ask(engine, loop, params, embeds=embeds), ask(engine, loop, params)
    finish(engine)
    assert with_rows.tokens == [alone(executor, loop, embeds, params)]
    assert with_rows.ends[0] is not None
    assert with_rows.ends[0].drafts.drafted == 0
    assert plain.ends[0] is not None
    assert plain.ends[0].drafts.drafted > 0
    with pytest.raises(ParamError, match="draft_tokens"):
        ask(engine, loop, SamplingParams.of(params, draft_tokens=4), embeds=embeds)
    assert ask(engine, loop, SamplingParams.of(params, draft_tokens=0), embeds=embeds)
    finish(engine)


def test_what_needs_ids_is_refused(executor: Executor, nothing_left: None) -> None:
    embeds = embedded(executor, PROMPT, PLACES, rows(len(PLACES), executor.spec.hidden_size, 16))
    with closing(Store(Budget(1 << 24))) as store:
        engine = Engine(executor, EngineConfig(discover=True), chunks=always(ChunkCache(executor, store)))
        with pytest.raises(InputError, match="documents"):
            ask(engine, PROMPT, embeds=embeds, documents=(Span(2, 20),))
        with pytest.raises(ParamError, match="prompt_logprobs"):
            ask(engine, PROMPT, SamplingParams.of(GREEDY, prompt_logprobs=1), embeds=embeds)
        assert said(engine, PROMPT, embeds=embeds).tokens == [alone(executor, PROMPT, embeds)]  # discovers nothing
    ear = said(engine, PROMPT, embeds=embeds, keep_kv=True)
    assert ear.ends[0] is not None
    assert ear.ends[0].kv is not None
    handles = Handles(executor)
    with pytest.raises(InputError, match="rows of embeddings"):
        handles.keep("", ear.ends[0].kv)


@pytest.mark.parametrize("at", [(), (3, 3), (4, 2), (-1, 5), (5, 100)])
def test_places_outside_of_the_prompt_are_refused(
    executor: Executor, engine: Engine, nothing_left: None, at: tuple[int, ...]
) -> None:
    good = embedded(executor, PROMPT, [2, 3], rows(2, executor.spec.hidden_size, 17))
    with pytest.raises(InputError, match="places"):
        ask(engine, PROMPT, embeds=replace(good, at=at))


def test_rows_of_another_width_are_refused(executor: Executor, engine: Engine, nothing_left: None) -> None:
    good = embedded(executor, PROMPT, [2, 3], rows(2, executor.spec.hidden_size, 17))
    with pytest.raises(InputError, match="numbers each"):
        ask(engine, PROMPT, embeds=replace(good, vectors=good.vectors[:, :-1]))


def test_parts_are_joined_in_order(executor: Executor) -> None:
    width = executor.spec.hidden_size
    image, sound = rows(3, width, 1), rows(2, width, 2)
    joined = Inputs.join([[1, 2], image, torch.tensor([3]), sound])
    assert (list(joined.ids), list(joined.at)) == ([1, 2, 0, 0, 0, 3, 0, 0], [2, 3, 4, 6, 7])
    assert torch.equal(joined.embeddings, torch.cat([image, sound]))
    assert list(Inputs.join([[1], [2, 3]]).ids) == [1, 2, 3]
