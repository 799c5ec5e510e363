"""No error of one request leaves that request: a fault is injected at every callback of a step.

The callbacks are found by a run with spies, so a new one cannot be forgotten.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from small import Ear, load_small
from stores import always
from tiny import VOCAB

from kvilt.blend.blender import Blending
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.engine.request import Request
from kvilt.engine.scoring import Scoring
from kvilt.engine.sequence import Job
from kvilt.errors import Cancelled, InputError
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.prefix import PrefixIndex
from kvilt.sampling.constraint import Regex
from kvilt.sampling.grammar import Compiler, Matcher
from kvilt.sampling.history import History
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.sampler import SamplingState
from kvilt.speculative.ngram import NgramDrafter
from kvilt.store.store import Store
from kvilt.store.tier import Budget

END = VOCAB - 1
GRAMMAR = Compiler([bytes([65 + i]) for i in range(VOCAB - 1)] + [b""], [END]).compile(Regex("[A-Z]{3}([a-z]+[A-F])*"))

# Everything that a step calls on behalf of one request. Closing is not among them: what ends a request is our own.
OWNED: tuple[type, ...] = (SamplingState, Matcher, History, Scoring, Blending, Ear, KVCache, PrefixIndex, NgramDrafter)
NEVER = {"close", "forget", "clear", "holders"}
# Called after the work is done, these make or hold pages, which a fault there would lose.
MAKES_PAGES = {"fork", "forks", "open", "begin", "reserve", "insert"}


class Panic(BaseException):
    """What a panic of a native library is: no Exception."""


ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("fault"),
    lambda: InputError("fault"),
    lambda: Panic("fault"),
)


@dataclass
class Faults:
    """Wraps the methods of OWNED: counts calls for the victim inside steps, and raises at one of them."""

    victim: Job | None = None
    drafting: Drafting | None = None
    stepping: bool = False
    calls: Counter[str] = field(default_factory=Counter)
    method: str = ""
    at: int = 0
    after: bool = False
    error: Callable[[], BaseException] = ERRORS[0]
    raised: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for owner in OWNED:
            for name, honest in vars(owner).items():
                if callable(honest) and not name.startswith("_") and name not in NEVER:
                    patch.setattr(owner, name, self._wrapped(f"{owner.__name__}.{name}", honest))

    def _wrapped(self, method: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if not self.stepping or not self._is_victims([*given, *named.values()]):
                return honest(*given, **named)
            self.calls[method] += 1
            due = method == self.method and self.calls[method] == self.at
            if due and not self.after:
                self._raise()
            result = honest(*given, **named)
            if due:
                self._raise()
            return result

        return call

    def _raise(self) -> None:
        self.raised += 1
        raise self.error()

    def _is_victims(self, given: Sequence[Any]) -> bool:
        if self.victim is None:
            return False
        own: list[Any] = [self.victim.listener]
        for seq in {id(one): one for one in (self.victim.first, *self.victim.live)}.values():
            own += [
                seq.kv,
                seq.prefix_keys,
                seq.blending,
                seq.scoring,
                (state := self.drafting and self.drafting.state_of(seq)) and state.draft_context,
            ]
            if seq.state is not None:
                own += [seq.state, seq.state.matcher, seq.state.history]
        owned = {id(one) for one in own if one is not None}
        # A list holds what several requests share, such as all stories of a drafter: that is nobody's alone.
        return any(id(one) in owned for one in given)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    made = load_small(tmp_path_factory.mktemp("isolation"), 90, None, "native")
    yield made
    made.close()


def tokens(dice: random.Random, size: int) -> list[int]:
    return [dice.randrange(VOCAB - 1) for _ in range(size)]


def victim(kind: str) -> Request:
    dice = random.Random(1)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, n=2, logprobs=2, repetition_penalty=1.1)
    blend_prompt = BlendPrompt.of([tokens(dice, 20), tokens(dice, 33), tokens(dice, 7)], [False, True, False])
    request = Request(blend_prompt.ids, params, id="victim", progress=True, keep_kv=True, end_ids=frozenset([END]))
    match kind:
        case "grammar":
            return replace(request, params=SamplingParams.of(params, grammar=GRAMMAR.constraint), grammar=GRAMMAR)
        case "scored":
            return replace(request, params=SamplingParams.of(params, prompt_logprobs=1))
        case "documents":
            return replace(request, documents=blend_prompt.documents, recipe=Recipe(0.2, "query", 0, min_gain=0.0))
        case _:
            loop = tokens(dice, 5) * 8  # something to look up
            return replace(request, prompt=tuple(loop), params=SamplingParams.of(params, n=1))


def neighbours() -> list[Request]:
    dice = random.Random(2)
    plain = [Request(tuple(tokens(dice, 15)), SamplingParams(max_tokens=14, seed=i, logprobs=1)) for i in range(2)]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, grammar=GRAMMAR.constraint)
    return [*plain, Request(tuple(tokens(dice, 40)), params, grammar=GRAMMAR, end_ids=frozenset([END]))]


class Keeper(Ear):
    """Closes the KV it is given."""

    def on_event(self, event: Any) -> bool:
        if getattr(event, "kv", None) is not None:
            event.kv.close()
        return super().on_event(event)


@dataclass
class Day:
    """One engine, its victim and the others."""

    engine: Engine
    faults: Faults
    asked: Keeper
    others: list[Ear]

    def step(self) -> bool:
        self.faults.stepping = True
        try:
            return self.engine.step()
        finally:
            self.faults.stepping = False

    def run(self) -> None:
        for _ in range(400):
            if not self.step() and not self.engine.ready:
                return
        raise AssertionError("the engine does not come to an end")


def begin(executor: Executor, kind: str, faults: Faults, chunks: ChunkCache) -> Day:
    executor.prefixes.clear()
    faults.drafting = Drafting(NgramDrafter(), VOCAB, clock=partial(next, count(1.0)))
    features = [faults.drafting] if kind == "drafts" else []
    engine = Engine(executor, EngineConfig(step_tokens=48, max_rows=8), features=features, chunks=always(chunks))
    request = victim(kind)
    asked, others = Keeper(request.samples), [Ear() for _ in neighbours()]
    for one, ear in zip(neighbours(), others, strict=True):
        engine.add(engine.prepare(one, ear))
    job = engine.prepare(request, asked)
    faults.victim, faults.calls = job, Counter()
    engine.add(job)
    return Day(engine, faults, asked, others)


def heard(ears: Sequence[Ear]) -> list[Any]:
    return [(ear.tokens, ear.reasons) for ear in ears]


KINDS = {
    "grammar": {"Matcher.fill", "Matcher.accept", "Matcher.fork", "SamplingState.fork"},
    "scored": {"Scoring.want", "Scoring.event", "PrefixIndex.insert"},
    "documents": {"Blending.begin", "Blending.next", "Blending.took", "Blending.report"},
    "drafts": {"NgramDrafter.begin", "PrefixIndex.fork"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_callback_of_a_step_ends_its_own_request_alone(
    executor: Executor, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with closing(Store(Budget(1 << 24))) as store:
        chunks, faults = ChunkCache(executor, store), Faults()
        quiet = begin(executor, kind, Faults(), chunks)
        quiet.run()
        right, alone = heard([quiet.asked]), heard(quiet.others)
        faults.install(monkeypatch)
        day = begin(executor, kind, faults, chunks)
        day.run()
        assert (heard([day.asked]), heard(day.others)) == (right, alone), "spies change nothing"
        found = dict(faults.calls)
        assert found.keys() >= {"SamplingState.advance", "Ear.on_event", "KVCache.commit", *KINDS[kind]}, found
        number = 0
        for method, times in sorted(found.items()):
            for at in sorted({1, (times + 1) // 2, times}):
                for after in (False, True) if method.split(".")[1] not in MAKES_PAGES else (False,):
                    number += 1
                    faults.method, faults.at, faults.after = method, at, after
                    faults.error, faults.raised = ERRORS[number % len(ERRORS)], 0
                    day = begin(executor, kind, faults, chunks)
                    day.run()
                    where = f"{method} call {at} {'after' if after else 'before'}"
                    assert faults.raised == 1, where
                    assert heard(day.others) == alone, where
                    if method != "Ear.on_event":  # a listener that fails may not hear its own end
                        assert day.asked.over, where
                        assert "error" in day.asked.reasons or heard([day.asked]) == right, where
                    assert (day.engine.requests, executor.pool.usage().used) == (0, 0), where
                    faults.method = ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled])
def test_an_interrupt_is_no_fault_of_a_request(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with closing(Store(Budget(1 << 24))) as store:
        faults = Faults(method="SamplingState.advance", at=2, error=error)
        faults.install(monkeypatch)
        day = begin(executor, "scored", faults, ChunkCache(executor, store))
        with pytest.raises(error):
            day.run()
        day.engine.fail_all(InputError("over"))
        assert executor.pool.usage().used == 0
