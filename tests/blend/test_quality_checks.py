"""Comparisons among an engine's steps: right to the bit, in nobody's way, and gone without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from drafters import Free, Oracle
from drive import blended, computed, memory_store, tokens
from lora_files import write_lora
from small import Ear, asks, finish, load_small
from small import start as ask_start
from stores import always

from kvilt.batch import Base, Batch
from kvilt.blend.certificate import Certificate, CertificateFile
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.quality_gate import QualityGate, compare
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig, GateConfig
from kvilt.engine.counters import ENGINE_METRICS, PROMPT_TOKENS, SUCCESS
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.features.feature import Feature
from kvilt.engine.features.quality_checks import (
    AGREEMENTS,
    DROPPED,
    FALLBACKS,
    KL,
    MAX_STEP_TOKENS,
    RATIO,
    SAMPLED,
    QualityChecks,
)
from kvilt.engine.request import Request
from kvilt.errors import Draining
from kvilt.executor.protocol import Executor
from kvilt.metrics import Counter, Gauge, Metrics
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store

SYSTEM, QUESTION = tokens(70, 1), tokens(9, 5)
DOCUMENTS = [tokens(40, 2), tokens(60, 4)]
QUILT = BlendPrompt.of([SYSTEM, *DOCUMENTS, QUESTION], [False, True, True, False])
RIGHT = BlendPrompt.of([[], DOCUMENTS[0], QUESTION], [False, True, False])  # nothing stands before its only document
LOOK = GateConfig(every=1, act=False)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("gate"), 64, None, "native")


@pytest.fixture
def store() -> Iterator[Store]:
    with memory_store() as made:
        yield made


class Checked(Engine):
    """An engine whose blended prompts are compared, and the gate that learns from that."""

    gate: QualityGate


def certificates(engine: Engine) -> list[Certificate]:
    assert isinstance(engine, Checked)
    return engine.gate.certificates()


def make(
    executor: Executor,
    store: Store,
    config: GateConfig | None,
    path: Path | None = None,
    reclaim: Callable[[bool], bool] | None = None,
    **own: Any,
) -> Engine:
    executor.prefixes.clear()
    chunks = always(ChunkCache(executor, store))
    if config is None:
        return Engine(executor, EngineConfig(**own), chunks=chunks, reclaim=reclaim)
    file = CertificateFile(path) if path is not None else None
    gate = QualityGate(config, lambda: executor.pool.identity().model, file)
    return checked(gate, executor, EngineConfig(**own), chunks=chunks, reclaim=reclaim)


def checked(
    gate: QualityGate, executor: Executor, config: EngineConfig, features: Sequence[Feature] = (), **own: Any
) -> Checked:
    metrics = Metrics(ENGINE_METRICS)
    checks = QualityChecks(gate, executor, metrics)
    engine = Checked(executor, config, metrics, features=[checks, *features], judge=checks, **own)
    engine.gate = gate
    return engine


def recipe(ratio: float = 0.3, strategy: str = "head", **fields: Any) -> Recipe:
    return Recipe(ratio, strategy, check_layer=0, **{"min_gain": 0.0, **fields})


def put(engine: Engine, blend_prompt: BlendPrompt, made: Recipe, **fields: Any) -> Ear:
    params = fields.pop("params", SamplingParams(max_tokens=6, temperature=0.0))
    asked = Request(blend_prompt.ids, params, documents=blend_prompt.documents, recipe=made, **fields)
    ear = Ear(asked.samples)
    engine.add(engine.prepare(asked, ear))
    return ear


def settle(engine: Engine) -> None:
    """Until nobody wants a row and nothing is left to compare."""
    while engine.ready:
        engine.step()


def close(engine: Engine) -> None:
    assert isinstance(engine, Checked)
    engine.gate.close()


def value(engine: Engine, metric: Counter | Gauge, **labels: str) -> float:
    series = engine.metrics.snapshot()[metric.name]["series"]
    return sum(point["value"] for point in series if labels.items() <= point["labels"].items())


def whole_prompt(executor: Executor, blend_prompt: BlendPrompt, count: int = 6) -> list[int]:
    with executor.create_kv_cache() as kv:
        params = SamplingParams(max_tokens=count, temperature=0.0)
        return executor.sample_tokens(count, list(blend_prompt.ids), kv, params=params)[0]


# What is measured.


@pytest.mark.parametrize("strategy", ["deviation", "head", "query"])
@pytest.mark.parametrize("step_tokens", [24, 512])
def test_what_is_compared_is_what_it_is_by_hand(
    executor: Executor, store: Store, strategy: str, step_tokens: int
) -> None:
    made = recipe(0.2, strategy)
    with memory_store() as other:
        trial, kv, _ = blended(executor, ChunkCache(executor, other), QUILT, made)
        kv.close()
    reference, kv = computed(executor, QUILT.ids)
    kv.close()
    expected = compare(reference, trial)
    engine = make(executor, store, LOOK, step_tokens=step_tokens, max_rows=8)
    for _ in range(3):
        put(engine, QUILT, made)
        settle(engine)
    (known,) = certificates(engine)
    assert known.recent == (expected,) * 3
    assert expected is not None
    assert expected.kl > 0
    assert (known.strategy, known.ratio, known.count) == (strategy, 0.2, 3)
    assert known.model == executor.pool.identity().model
    (spread,) = engine.metrics.snapshot()[KL.name]["series"]
    assert (spread["count"], spread["sum"]) == (3, pytest.approx(3 * expected.kl))
    assert value(engine, AGREEMENTS, strategy=strategy) == 3 * expected.agrees
    assert value(engine, SAMPLED) == 3
    assert value(engine, RATIO) == 0.2


def test_ratio_1_is_right_to_the_bit(executor: Executor, store: Store) -> None:
    engine = make(executor, store, LOOK)
    put(engine, QUILT, recipe(1.0))
    settle(engine)
    (known,) = certificates(engine)
    assert (known.mean_kl, known.agreement) == (0.0, 1.0)


def test_comparing_changes_no_answer_and_leaves_nothing(executor: Executor, store: Store) -> None:
    """Blended and plain requests, all at once, with a gate that looks at every one and without."""
    others = asks(3, seed=5, longest=90)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=3)
    heard, left, counted = [], [], []
    for config in (None, LOOK):
        engine = make(executor, store, config, step_tokens=48, max_rows=8)
        ears = [put(engine, QUILT, recipe(0.2, one), params=params) for one in ("head", "query", "deviation")]
        ears += [ask_start(engine, one) for one in others]
        finish(engine)
        settle(engine)
        heard.append([ear.tokens for ear in ears])
        left.append(len(executor.prefixes))
        counted.append([value(engine, PROMPT_TOKENS), value(engine, SUCCESS)])
        assert engine.requests == 0
        executor.prefixes.clear()
        assert executor.pool.usage().used == 0
    assert heard[0] == heard[1]
    assert left[0] == left[1]  # nobody finds a prefix that only a comparison had
    assert counted[0] == counted[1]  # nor is it a request of anybody's
    assert value(engine, SAMPLED) == 3
    assert sum(known.count for known in certificates(engine)) + value(engine, DROPPED) == 3


def test_with_window_layers(tmp_path: Path, store: Store) -> None:
    executor = load_small(tmp_path, 24, 9, "native")
    engine = make(executor, store, LOOK, step_tokens=48, max_rows=8)
    for ratio in (0.2, 1.0):
        put(engine, QUILT, recipe(ratio))
        settle(engine)
    assert [(known.count, known.mean_kl == 0.0) for known in certificates(engine)][1] == (1, True)
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


def test_beside_drafts(executor: Executor, store: Store) -> None:
    """Rows of a comparison have logits that nobody draws from, among rows with several."""
    params = SamplingParams(max_tokens=60, temperature=0.0)
    expected = put(engine := make(executor, store, None), QUILT, recipe(0.2), params=params)
    settle(engine)
    drafting = Drafting(Oracle({QUILT.ids: expected.tokens[0]}, 0.8, 61), executor.spec.vocab_size, Free())
    gate, chunks = QualityGate(LOOK, lambda: "m"), ChunkCache(executor, store)
    engine = checked(gate, executor, EngineConfig(max_rows=8), [drafting], chunks=always(chunks))
    ears = [put(engine, QUILT, recipe(0.2), params=params) for _ in range(2)]
    settle(engine)
    assert [ear.tokens for ear in ears] == [expected.tokens] * 2
    assert all(end is not None and end.drafts.accepted > 0 for ear in ears for end in ear.ends)
    assert sum(known.count for known in certificates(engine)) == 2


# What follows.


ACT = GateConfig(every=1, max_kl=1e-3, least=2)


def served(engine: Engine, blend_prompt: BlendPrompt, made: Recipe) -> str:
    """The recipe that a request was answered with."""
    ear = put(engine, blend_prompt, made)
    settle(engine)
    end = ear.ends[0]
    assert end is not None
    assert end.blended is not None
    assert end.cached + end.computed == len(blend_prompt.ids)
    return end.blended.recipe


def fall_back(engine: Engine, made: Recipe) -> None:
    for _ in range(100):
        if served(engine, QUILT, made).startswith("full"):
            return
    raise AssertionError("it does not fall back")


def test_a_ratio_that_is_too_low_is_raised_until_it_falls_back(executor: Executor, store: Store) -> None:
    engine, reuse = make(executor, store, ACT), recipe(0.0)
    seen = [served(engine, QUILT, reuse) for _ in range(40)]
    ratios = list(dict.fromkeys(seen))
    assert ratios[0] == reuse.name
    assert [one.split("ratio=")[1].split()[0] for one in ratios[1:4]] == ["0.075", "0.1125", "0.16875"]
    assert ratios[-1] == f"full/1 instead of {reuse.name}"
    assert value(engine, FALLBACKS) == seen.count(ratios[-1]) > 0
    assert value(engine, RATIO, strategy="head", asked="0") == 1.0
    ear = put(engine, QUILT, reuse)
    settle(engine)
    assert ear.tokens == [whole_prompt(executor, QUILT)]
    assert served(engine, QUILT, recipe(0.0, gate=False)) == reuse.name  # who keeps out gets what is asked for
    (known,) = certificates(engine)
    assert known.falls_back
    assert known.mean_kl > 1e-3


def test_it_comes_back_when_documents_blend_well_again(executor: Executor, store: Store) -> None:
    engine, reuse = make(executor, store, ACT), recipe(0.0)
    fall_back(engine, reuse)
    seen = list(dict.fromkeys(served(engine, RIGHT, reuse) for _ in range(120)))
    ratios = [1.0 if one.startswith("full") else float(one.split("ratio=")[1].split()[0]) for one in seen]
    assert ratios[0] == 1.0
    assert ratios == sorted(ratios, reverse=True)
    assert seen[-1] == reuse.name
    assert value(engine, DROPPED) == 0


def test_a_restart_goes_on_where_it_was(executor: Executor, store: Store, tmp_path: Path) -> None:
    path, reuse = tmp_path / "certificates.json", recipe(0.0)
    engine = make(executor, store, ACT, path)
    fall_back(engine, reuse)
    close(engine)
    again = make(executor, store, ACT, path)
    assert served(again, QUILT, reuse).startswith("full")
    close(again)
    path.write_bytes(path.read_bytes()[:-40])
    assert served(make(executor, store, ACT, path), QUILT, reuse) == reuse.name


def test_adapters_have_certificates_of_their_own(tmp_path: Path, store: Store) -> None:
    executor = load_small(tmp_path / "base", 40, None, "native")
    one = executor.load_lora(write_lora(tmp_path / "one", 2, seed=1))
    engine, adapter = make(executor, store, LOOK), executor.adapters.choose(one, 1.0, [])
    for each in (Base(), adapter):
        put(engine, QUILT, recipe(1.0), adapter=each)
        settle(engine)
    known = certificates(engine)
    assert [each.adapter for each in known] == ["base", executor.adapters.identity(adapter)]
    assert [each.mean_kl for each in known] == [0.0, 0.0]
    ear = put(engine, QUILT, recipe(0.2), adapter=adapter)
    while not ear.tokens[0]:
        engine.step()
    executor.unload_lora(one)  # who is compared keeps it, until that is over
    settle(engine)
    assert ear.error is None
    assert value(engine, DROPPED, reason="failed") == 1
    executor.prefixes.clear()
    assert (executor.pool.usage().used, len(executor.adapters)) == (0, 0)
    executor.close()


# Nobody's way.


def test_comparisons_wait_for_prompts_and_go_on_beside_decodes(executor: Executor, store: Store) -> None:
    engine = make(executor, store, LOOK, step_tokens=128, max_rows=8)
    batches: list[list[int]] = []
    run = executor.run

    def watched(batch: Batch) -> object:
        batches.append(sorted(len(row.positions) for row in batch.rows))
        return run(batch)

    first = put(engine, QUILT, recipe(), params=SamplingParams(max_tokens=80, temperature=0.0))
    while not first.tokens[0]:
        engine.step()
    executor.run = watched  # type: ignore[method-assign, assignment]
    try:
        engine.step()
        assert batches == [[1, MAX_STEP_TOKENS]]  # a row of the comparison beside a decode
        late = Ear()
        engine.add(engine.prepare(Request(tokens(300, 9), SamplingParams(max_tokens=3, temperature=0.0)), late))
        assert engine.requests == 2
        batches.clear()
        while not late.tokens[0]:
            engine.step()
        assert batches == [[1, 127], [1, 127], [1, 46]]  # all of the budget is the prompt's
        assert [sample.request for sample in engine.view("").samples] == [
            seq.sample.request for seq in engine._seqs.values() if not seq.job.request.background
        ]
        settle(engine)
    finally:
        executor.run = run  # type: ignore[method-assign]
    assert sum(known.count for known in certificates(engine)) == 1
    assert value(engine, DROPPED) == 0


def test_who_waits_too_long_is_dropped(executor: Executor, store: Store) -> None:
    engine = make(executor, store, GateConfig(every=1, act=False, patience=3), step_tokens=32, max_rows=8)
    ear = put(engine, QUILT, recipe())
    while not ear.tokens[0]:
        engine.step()
    late = Ear()
    engine.add(engine.prepare(Request(tokens(400, 9), SamplingParams(max_tokens=1, temperature=0.0)), late))
    settle(engine)
    assert late.over
    assert value(engine, DROPPED, reason="busy") == 1
    assert certificates(engine)[0].count == 0
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


def test_no_more_than_two_wait(executor: Executor, store: Store) -> None:
    engine = make(executor, store, LOOK, step_tokens=512, max_rows=16)
    ears = [put(engine, QUILT, recipe()) for _ in range(6)]
    settle(engine)
    assert all(ear.over for ear in ears)
    (known,) = certificates(engine)
    dropped = value(engine, DROPPED, reason="full")
    assert (known.count + dropped, known.count >= 2, dropped > 0) == (6, True, True)


@pytest.mark.parametrize("running", [False, True])
def test_an_engine_that_closes_drops_them(executor: Executor, store: Store, running: bool) -> None:
    engine = make(executor, store, LOOK)
    ear = put(engine, QUILT, recipe(), params=SamplingParams(max_tokens=40, temperature=0.0))
    while not ear.tokens[0]:
        engine.step()
    if running:
        engine.step()
    engine.fail_all(Draining())
    assert value(engine, DROPPED, reason="closing") == 1
    assert not engine.ready
    executor.prefixes.clear()
    assert executor.pool.usage().used == 0


@pytest.mark.parametrize("pages", [8, 9, 10, 11, 12, 14, 16])
def test_few_pages_are_everybody_elses(tmp_path: Path, store: Store, pages: int) -> None:
    """Nobody gives anything up for a comparison, and all say what they say without it."""
    executor = load_small(tmp_path, pages, None, "native")
    heard = []
    for config in (None, None, LOOK):  # the first one stores the documents
        asked: list[bool] = []

        def relief(pinned: bool, asked: list[bool] = asked) -> bool:
            asked.append(pinned)
            return False

        engine = make(executor, store, config, reclaim=relief, step_tokens=64, max_rows=8)
        params = SamplingParams(max_tokens=40, temperature=0.0)
        ears = [put(engine, RIGHT, recipe(0.2), params=params) for _ in range(2)]
        ears += [ask_start(engine, one) for one in asks(2, seed=8, longest=90)]
        settle(engine)
        heard.append(([ear.tokens for ear in ears], [ear.error for ear in ears], len(asked)))
        executor.prefixes.clear()
        assert executor.pool.usage().used == 0
    assert heard[1] == heard[2]


def _arrivals(dice: random.Random) -> list[tuple[int, Request]]:
    """Requests with and without documents, and the steps they come with."""
    texts = [tokens(size, seed) for seed, size in enumerate((33, 40, 60, 7, 1, 64))]
    made = []
    for index in range(dice.randrange(2, 7)):
        begin, end = tokens(dice.randrange(40), 50 + dice.randrange(3)), tokens(dice.randrange(1, 12), 70 + index)
        parts = [begin, *dice.sample(texts, dice.randrange(1, 3)), end]
        blend_prompt = BlendPrompt.of(parts, [False, *[True] * (len(parts) - 2), False])
        own = recipe(dice.choice([0.0, 0.2, 1.0]), dice.choice(["head", "query", "deviation"]))
        params = SamplingParams(max_tokens=dice.randrange(1, 50), temperature=0.0, n=dice.choice([1, 1, 2]))
        documents = blend_prompt.documents if dice.random() < 0.7 else ()
        request = Request(blend_prompt.ids, params, id=str(index), documents=documents, recipe=own)
        made.append((dice.randrange(40), request))
    return made


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_nobody_notices(tmp_path: Path, seed: int) -> None:
    """Requests that come, end, give way and are aborted at any time, on few pages or many."""
    dice = random.Random(seed)
    executor = load_small(tmp_path, dice.choice([9, 12, 16, 40]), None, "native")
    coming, own = _arrivals(dice), {"step_tokens": dice.choice([16, 64, 256]), "max_rows": 8}
    aborted = {request.id: at + dice.randrange(1, 30) for at, request in coming if dice.random() < 0.2}
    heard = []
    for config in (None, GateConfig(every=1, act=False, patience=dice.choice([5, 500]))):
        with memory_store() as store:
            engine, ears = make(executor, store, config, **own), {}
            for step in range(5000):
                for at, request in coming:
                    if at == step:
                        ears[request.id] = Ear(request.samples)
                        engine.add(engine.prepare(request, ears[request.id]))
                    if aborted.get(request.id) == step:
                        engine.abort(request.id)
                engine.step()
                if step > 80 and not engine.ready:
                    break
            assert not engine.ready
            assert engine.requests == 0
        executor.prefixes.clear()
        assert executor.pool.usage().used == 0
        heard.append({name: (ear.tokens, ear.reasons) for name, ear in ears.items() if name not in aborted})
    assert heard[0] == heard[1]
    compared = certificates(engine)
    assert sum(one.count for one in compared) + value(engine, DROPPED) == value(engine, SAMPLED)
    assert all(one.mean_kl == 0.0 for one in compared if one.asked_ratio == 1.0 and one.count)


def test_a_comparison_that_fails_is_nobody_elses_failure(
    executor: Executor, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(executor, store, LOOK)
    run = executor.run

    def broken(batch: Batch) -> object:
        if any(len(row.positions) == MAX_STEP_TOKENS for row in batch.rows):
            raise RuntimeError("no")
        return run(batch)

    monkeypatch.setattr(executor, "run", broken)
    ear = put(engine, QUILT, recipe())
    settle(engine)
    assert ear.error is None
    assert ear.tokens != [[]]
    assert value(engine, DROPPED, reason="failed") == 1


def test_who_draws_nothing_or_saves_nothing_is_not_compared(executor: Executor, store: Store) -> None:
    engine = make(executor, store, LOOK)
    put(engine, QUILT, recipe(), params=None)
    put(engine, QUILT, recipe(0.99, min_gain=0.5))
    put(engine, QUILT, recipe(0.2, gate=False))
    settle(engine)
    assert value(engine, SAMPLED) == 0
