"""The engine on a GPU: overlapped steps, sampling on the device, grammars, drafts, documents and adapters."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from gpu_models import VOCAB, Models
from small import Ask, Ear, finish, run, start

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.request import Request
from kvilt.executor.executor import ModelExecutor
from kvilt.sampling.constraint import Regex
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.ngram import NgramDrafter
from kvilt.store.store import Budget, Store

FIELDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.7, "no_repeat_ngram_size": 3, "logit_bias": {7: 2.0}},
]


def asks(count: int, seed: int) -> list[Ask]:
    dice = random.Random(seed)
    stem = [dice.randrange(VOCAB) for _ in range(120)]
    made = []
    for i in range(count):
        own = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 300))]
        params = SamplingParams.of(max_tokens=dice.randrange(1, 40), seed=i, **FIELDS[i % len(FIELDS)])
        made.append(Ask((*(stem if i % 2 else []), *own), params))
    return made


def answers(executor: ModelExecutor, many: list[Ask], **fields: object) -> list[list[list[int]]]:
    executor.prefixes.clear()
    engine = Engine(executor, EngineConfig(**fields))  # type: ignore[arg-type]
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert all(ear.reasons == ["length"] for ear in ears), [ear.error for ear in ears]
    return [ear.tokens for ear in ears]


def test_requests_say_what_they_say_on_the_cpu(models: Models) -> None:
    many = asks(25, 1)
    assert answers(models.exact, many) == answers(models.reference, many, step_tokens=300, overlap=False)


def test_overlap_changes_no_token(models: Models) -> None:
    many = [Ask(ask.prompt, replace(ask.params, repetition_penalty=1.0, frequency_penalty=0.0)) for ask in asks(25, 2)]
    plain = [ask for ask in many if not ask.params.no_repeat_ngram_size]
    assert answers(models.exact, plain, overlap=True) == answers(models.exact, plain, overlap=False)


def test_a_grammar_holds(models: Models) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    from grammars import byte_compiler

    grammar = byte_compiler().compile(Regex("[ab]{10}"))
    engine = Engine(models.usual)
    ear = Ear()
    params = SamplingParams(max_tokens=10, temperature=0.9, seed=1, grammar=Regex("[ab]{10}"))
    job = engine.prepare(Request([5, 6, 7], params, grammar=grammar), ear)
    engine.add(job)
    finish(engine)
    assert all(token in b"ab" for token in ear.tokens[0])


def test_drafts_change_no_token(models: Models) -> None:
    many = [Ask(tuple([5, 6, 7, 8] * 20), SamplingParams(max_tokens=40, temperature=0.0))]
    executor = models.exact
    executor.prefixes.clear()
    engine = Engine(executor, features=[Drafting(NgramDrafter(), VOCAB)])
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert [ear.tokens for ear in ears] == answers(models.reference, many)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_blended_prompts_are_the_references(models: Models, ratio: float) -> None:
    found = []
    dice = random.Random(3)
    segments = [[dice.randrange(VOCAB) for _ in range(size)] for size in (10, 200, 150, 12)]
    prompt = BlendPrompt.of(segments, [False, True, True, False])
    for executor in (models.exact, models.reference):
        executor.prefixes.clear()
        with Store(Budget(1 << 28)) as store:
            chunks = ChunkCache(executor, store)
            engine, ear = Engine(executor, chunks=lambda chunks=chunks: chunks), Ear()
            request = Request(
                prompt.ids, SamplingParams(max_tokens=12, temperature=0.0), documents=prompt.documents,
                recipe=Recipe(ratio, min_gain=0.0),
            )  # fmt: skip
            engine.add(engine.prepare(request, ear))
            run(engine, lambda ear=ear: ear.over)
            assert ear.reasons == ["length"], ear.error
            found.append(ear.tokens)
    assert found[0] == found[1]
