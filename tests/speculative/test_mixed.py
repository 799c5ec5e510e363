"""Drafts beside everything else in one step: adapters, base rows, documents, grammars, aborts, few pages (law 10)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from drafters import Free, Oracle
from effort import some
from lora_files import write_lora
from small import Ear, load_small
from stores import always
from tiny import VOCAB

from kvilt.batch import Adapter, Base, Batch, Logits
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.counters import ACCEPTED, DRAFTED, PREEMPTIONS
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.request import Request
from kvilt.executor.protocol import Executor
from kvilt.metrics import Metrics
from kvilt.sampling.constraint import Regex
from kvilt.sampling.grammar import Compiler
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.drafter import Drafter
from kvilt.speculative.model import ModelDrafter
from kvilt.speculative.ngram import NgramDrafter
from kvilt.store.store import Store
from kvilt.store.tier import Budget

END = VOCAB - 1
INVOCATION = [7, 3]
DRAWS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "no_repeat_ngram_size": 2, "logit_bias": {5: 2.0}},
)
GRAMMAR = Compiler([bytes([65 + i]) for i in range(VOCAB - 1)] + [b""], [END]).compile(
    Regex("[A-Z]{3}([a-z]+[A-F]){2}G*")
)


@dataclass(frozen=True)
class Kind:
    """A request, and what it says alone without drafts."""

    request: Request
    said: list[int]


def executor_with_adapters(folder: Path, pages: int) -> Executor:
    made = load_small(folder / "base", pages, None, "native")
    for seed, rank in enumerate((2, 5, 16)):
        made.load_lora(write_lora(folder / f"lora{seed}", rank, seed=seed))
    made.load_lora(write_lora(folder / "alora", 4, seed=9, alora_invocation_tokens=INVOCATION))
    made.load_lora(write_lora(folder / "dora", 3, seed=5, use_dora=True))
    return made


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    made = executor_with_adapters(tmp_path_factory.mktemp("mixed"), 90)
    yield made
    made.close()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """The same weights without adapters, as a draft model: right about base rows, and about others now and then."""
    made = load_small(tmp_path_factory.mktemp("twin"), 200, None, "native")
    yield made
    made.close()


@pytest.fixture
def store() -> Iterator[Store]:
    with closing(Store(Budget(1 << 26))) as made:
        yield made


def tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCAB - 1) for _ in range(count)]


def adapters(executor: Executor, ids: Sequence[int]) -> list[Adapter]:
    choose = executor.adapters.choose
    return [
        Base(),
        *(choose(f"lora{i}") for i in range(3)),
        choose("lora1", 0.5),
        choose("alora", ids=ids),
        choose("dora"),
    ]


def requests(executor: Executor, seed: int, count: int = 12) -> list[Request]:
    """Of every kind: on adapters and not, with documents and not, with a grammar and not."""
    dice, made = random.Random(seed), []
    stems = [tokens(dice, size) for size in (20, 45)]
    shelf = [tokens(dice, size) for size in (33, 12, 40)]
    for number in range(count):
        draw = dice.choice(DRAWS)
        params = SamplingParams.of(None, **{"max_tokens": dice.choice([9, 20, 90]), "seed": number, **draw})
        parts = [dice.choice(stems), *dice.sample(shelf, 2), [*INVOCATION, *tokens(dice, dice.randrange(1, 9))]]
        blend_prompt = BlendPrompt.of(parts, [False, True, True, False])
        request = Request(
            blend_prompt.ids, params, id=str(number), adapter=dice.choice(adapters(executor, blend_prompt.ids))
        )
        if number % 2:
            recipe = Recipe(dice.choice([0.2, 1.0]), dice.choice(["query", "head", "deviation"]), 0, min_gain=0.0)
            request = replace(request, documents=blend_prompt.documents, recipe=recipe)
        if number % 4 > 1:
            held = SamplingParams.of(params, grammar=GRAMMAR.constraint)
            request = replace(request, params=held, grammar=GRAMMAR, end_ids=frozenset([END]))
        made.append(request)
    return made


def put(engine: Engine, request: Request) -> Ear:
    ear = Ear(request.samples)
    engine.add(engine.prepare(request, ear))
    return ear


def alone(executor: Executor, request: Request) -> Kind:
    """Nobody else, no drafts, nothing known before."""
    executor.prefixes.clear()
    with closing(Store(Budget(1 << 26))) as store:
        engine = Engine(executor, chunks=always(ChunkCache(executor, store)))
        ear = put(engine, request)
        while engine.step():
            pass
    executor.prefixes.clear()
    assert ear.error is None, ear.error
    return Kind(request, ear.tokens[0])


@pytest.fixture(scope="module")
def crowds(executor: Executor) -> dict[int, list[Kind]]:
    return {seed: [alone(executor, request) for request in requests(executor, seed)] for seed in range(3)}


def drafters(kinds: Sequence[Kind], twin: Executor) -> dict[str, Drafter]:
    answers = {tuple(kind.request.prompt): kind.said for kind in kinds}
    return {
        "truth": Oracle(answers, 1.0, VOCAB),
        "lies": Oracle(answers, 0.6, VOCAB, 9),
        "ngram": NgramDrafter(5),
        "model": ModelDrafter(twin, 4),
    }


def count(metrics: Metrics, name: str) -> int:
    return int(sum(point["value"] for point in metrics.snapshot()[name]["series"]))


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", ["truth", "lies", "ngram", "model"])
def test_everybody_says_what_they_say_alone(
    executor: Executor, twin: Executor, crowds: dict[int, list[Kind]], store: Store, name: str, seed: int
) -> None:
    kinds = crowds[seed]
    widths: Counter[str] = Counter()
    run = executor.run

    def watched(batch: Batch) -> Logits:
        adapted = {row.adapter for row in batch.rows}
        drafted = any(len(row.positions) > 1 and getattr(row.want, "k", 0) > 1 for row in batch.rows)
        widths["adapters beside each other, with drafts"] += drafted and len(adapted) > 2
        widths["a part of a model, with drafts"] += drafted and len(batch.step.segments) > 1
        return run(batch)

    executor.run = watched  # type: ignore[method-assign]
    try:
        for step_tokens in (512, 40):
            executor.prefixes.clear()
            drafter = drafters(kinds, twin)[name]
            config = EngineConfig(step_tokens=step_tokens, max_rows=16)
            engine = Engine(
                executor,
                config,
                features=[Drafting(drafter, VOCAB, Free())],
                chunks=always(ChunkCache(executor, store)),
            )
            ears = [put(engine, kind.request) for kind in kinds]
            while engine.step():
                pass
            assert [ear.error for ear in ears] == [None] * len(ears)
            assert [ear.tokens[0] for ear in ears] == [kind.said for kind in kinds]
            assert count(engine.metrics, DRAFTED.name) > 0
    finally:
        executor.run = run  # type: ignore[method-assign]
    executor.prefixes.clear()
    assert executor.pool.usage().used == twin.pool.usage().used == 0
    if name in ("truth", "lies"):
        assert min(widths.values()) > 0, widths


def test_the_truth_about_rows_on_adapters_and_documents_is_accepted(
    executor: Executor, crowds: dict[int, list[Kind]], store: Store
) -> None:
    for kinds in crowds.values():
        drafter = Oracle({tuple(kind.request.prompt): kind.said for kind in kinds}, 1.0, VOCAB)
        engine = Engine(
            executor, features=[Drafting(drafter, VOCAB, Free())], chunks=always(ChunkCache(executor, store))
        )
        for kind in kinds:
            ear = put(engine, kind.request)
            while engine.step():
                pass
            end = ear.ends[0]
            assert end is not None
            assert end.drafts.accepted == end.drafts.drafted
            assert end.drafts.drafted > 0 or len(kind.said) < 5
        assert drafter.live == 0


def test_aborts_and_few_pages(tmp_path: Path, twin: Executor, store: Store, crowds: dict[int, list[Kind]]) -> None:
    assert day(tmp_path, twin, store, 1, crowds)["accepted"] > 0


@pytest.mark.slow
def test_many_eventful_days(tmp_path: Path, twin: Executor, store: Store, crowds: dict[int, list[Kind]]) -> None:
    tally = sum((day(tmp_path / str(seed), twin, store, seed, crowds) for seed in range(8)), Counter())
    assert min(tally["cancelled"], tally["preempted"]) > 3, tally
    assert min(tally["accepted"], tally["rejected"]) > 50, tally


def day(tmp_path: Path, twin: Executor, store: Store, seed: int, crowds: dict[int, list[Kind]]) -> Counter[str]:
    """Whoever comes, goes, gives way and comes back: what was said is the beginning of what is said alone."""
    executor = executor_with_adapters(tmp_path, 18)
    dice, kinds = random.Random(seed), crowds[seed % 3]
    drafter = drafters(kinds, twin)[["lies", "ngram", "model"][seed % 3]]
    config = EngineConfig(step_tokens=dice.choice([30, 200]), max_rows=dice.choice([4, 12]))
    engine = Engine(
        executor, config, features=[Drafting(drafter, VOCAB, Free())], chunks=always(ChunkCache(executor, store))
    )
    order, ears = dice.sample(range(len(kinds)), len(kinds)), dict[int, Ear]()
    while order or engine.ready:
        for at in [order.pop() for _ in range(min(len(order), dice.choice([0, 1, 4])))]:
            ears[at] = put(engine, kinds[at].request)
        if dice.random() < 0.05 and ears:
            engine.abort(str(dice.choice(list(ears))))
        engine.step()
    for at, ear in ears.items():
        (reason,), (said,), expected = ear.reasons, ear.tokens, kinds[at].said
        assert ear.error is None
        assert said == (expected[: len(said)] if reason == "cancelled" else expected), f"request {at}: {reason}"
    assert all(one.users == 0 for one in executor.adapters.all())
    executor.prefixes.clear()
    assert executor.pool.usage().used == twin.pool.usage().used == 0
    executor.close()
    accepted = count(engine.metrics, ACCEPTED.name)
    return Counter(
        cancelled=sum(ear.reasons == ["cancelled"] for ear in ears.values()),
        preempted=count(engine.metrics, PREEMPTIONS.name),
        accepted=accepted,
        rejected=count(engine.metrics, DRAFTED.name) - accepted,
    )


def test_unloading_an_adapter_under_drafts(tmp_path: Path, twin: Executor) -> None:
    executor = executor_with_adapters(tmp_path, 60)
    prompt = tokens(random.Random(1), 30)
    request = Request(prompt, SamplingParams(max_tokens=30), adapter=executor.adapters.choose("lora2"))
    kind = alone(executor, request)
    engine = Engine(executor, features=[Drafting(drafters([kind], twin)["lies"], VOCAB, Free())])
    ear = put(engine, request)
    for _ in range(3):
        engine.step()
    executor.unload_lora(executor.adapters.find("lora2").id)
    while engine.step():
        pass
    assert ear.tokens[0] == kind.said
    assert "lora2" not in [one.name for one in executor.adapters.all()]
    executor.close()
