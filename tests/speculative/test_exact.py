"""Law 10, end to end: with drafts, good or bad, a request says what it says without, token for token."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from drafters import Broken, Free, Oracle
from effort import some
from small import Ask, Ear, asks, finish, load_mixed, load_small, start
from tiny import VOCAB

from kvilt.config import EngineConfig
from kvilt.engine.counters import ACCEPTED, ACCEPTED_AT, DRAFTED, PREEMPTIONS
from kvilt.engine.engine import Engine
from kvilt.engine.event import Event, TokenEvent
from kvilt.engine.features.drafting import Drafting
from kvilt.executor.protocol import Executor
from kvilt.metrics import Metrics
from kvilt.sampling.params import SamplingParams
from kvilt.speculative.drafter import Drafter
from kvilt.speculative.model import ModelDrafter
from kvilt.speculative.ngram import NgramDrafter

# What may change what is drawn, a temperature beside it.
PARAMS: dict[str, dict[str, object]] = {
    "greedy": {},
    "plain": {"temperature": 0.9},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    "greedy penalties": {"repetition_penalty": 1.5},
    "bans": {"temperature": 0.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 5]], "min_tokens": 5},
    "bias": {"logit_bias": {7: 4.0, 9: -3.0}, "temperature": 0.8},
    "stops": {"temperature": 1.0, "stop_token_ids": [*range(0, VOCAB, 9)], "min_tokens": 3},
}


@pytest.fixture(scope="module", params=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """Pages for a few of the requests at a time."""
    return load_small(tmp_path_factory.mktemp("drafted"), 30, 40 if request.param == "window" else None, "native")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """The same weights again, as a draft model that is always right."""
    return load_small(tmp_path_factory.mktemp("twin"), 200, None, "native")


def count(metrics: Metrics, name: str) -> int:
    return int(sum(point["value"] for point in metrics.snapshot()[name]["series"]))


def with_drafts(executor: Executor, drafter: Drafter, config: EngineConfig | None = None) -> Engine:
    return Engine(executor, config, features=[Drafting(drafter, VOCAB, Free())])


def crowd(executor: Executor, name: str, seed: int, size: int = 10) -> list[tuple[Ask, list[int]]]:
    """Requests, each with what it says alone and without drafts."""
    many = [
        Ask(
            ask.prompt,
            SamplingParams.of(ask.params, **{"max_tokens": max(8, ask.params.max_tokens or 0), **PARAMS[name]}),
        )
        for ask in asks(size, seed)
    ]
    return [(ask, ask.alone(executor)) for ask in many]


@pytest.mark.parametrize("truth", some([0.6, 0.0, 1.0]))
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_change_no_token(executor: Executor, name: str, truth: float) -> None:
    many = crowd(executor, name, seed=len(name))
    drafter = Oracle({ask.prompt: said for ask, said in many}, truth, VOCAB, most=1 + len(name) % 7)
    engine = with_drafts(executor, drafter, EngineConfig(step_tokens=100, max_rows=7))
    ears = [start(engine, ask) for ask, _ in many]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [said for _, said in many]
    assert drafter.live == 0
    assert executor.pool.usage().used == 0
    drafted, accepted = count(engine.metrics, DRAFTED.name), count(engine.metrics, ACCEPTED.name)
    assert drafted > 20
    assert accepted == count(engine.metrics, ACCEPTED_AT.name)
    assert accepted == drafted if truth == 1 else accepted < drafted
    ends = [ear.ends[0].drafts for ear in ears if ear.ends[0] is not None]
    assert (sum(one.drafted for one in ends), sum(one.accepted for one in ends)) == (drafted, accepted)


@pytest.mark.parametrize("seed", range(2))
def test_eventful_days(executor: Executor, twin: Executor, seed: int) -> None:
    assert day(executor, twin, seed)["accepted"] > 0


@pytest.mark.slow
def test_many_eventful_days(executor: Executor, twin: Executor) -> None:
    tally = sum((day(executor, twin, seed) for seed in range(2, 16)), Counter())
    assert min(tally["cancelled"], tally["accepted"], tally["rejected"]) > 50
    assert tally["preempted"] > 10


def day(executor: Executor, twin: Executor, seed: int) -> Counter[str]:
    """Small pools, aborts, chunks of any size, all kinds of drafters and params, several samples of a prompt."""
    dice = random.Random(seed)
    executor.prefixes.clear()
    many = [one for name in dice.sample(list(PARAMS), 4) for one in crowd(executor, name, seed, 5)]
    answers = {ask.prompt: said for ask, said in many}
    kinds: list[Drafter] = [Oracle(answers, 0.7, VOCAB, 9), NgramDrafter(5), ModelDrafter(twin, 4)]
    engine = with_drafts(
        executor,
        kinds[seed % 3],
        EngineConfig(step_tokens=dice.choice([16, 40, 200]), max_rows=dice.choice([3, 9, 16])),
    )
    order, ears = dice.sample(range(len(many)), len(many)), dict[int, Ear]()
    taken = executor.pool.take([dice.choice([0, 8, 14])] * len(executor.layout.groups))
    while order or engine.ready:
        for at in [order.pop() for _ in range(min(len(order), dice.choice([0, 1, 4])))]:
            ears[at] = start(engine, many[at][0], id=str(at))
        if dice.random() < 0.1 and ears:
            engine.abort(str(dice.choice(list(ears))))
        engine.step()
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    for at, ear in ears.items():
        (reason,), (said,), expected = ear.reasons, ear.tokens, many[at][1]
        assert said == (expected[: len(said)] if reason == "cancelled" else expected), f"request {at}: {reason}"
    assert executor.pool.usage().used == 0
    assert twin.pool.usage().used == 0
    accepted = count(engine.metrics, ACCEPTED.name)
    return Counter(
        cancelled=sum(ear.reasons == ["cancelled"] for ear in ears.values()),
        preempted=count(engine.metrics, PREEMPTIONS.name),
        accepted=accepted,
        rejected=count(engine.metrics, DRAFTED.name) - accepted,
    )


def test_a_draft_model_with_few_pages_for_windows_reads_long_prompts(tmp_path: Path) -> None:
    """Step by step, as the large model does: its window group has a third of the pages that the prompt fills."""
    executor, twin = (load_mixed(tmp_path, (80, 26), 4096, "native") for _ in range(2))
    ask = Ask(tuple((7 * i + i // 5) % VOCAB for i in range(2000)), SamplingParams(max_tokens=40, temperature=0.0))
    engine = with_drafts(executor, ModelDrafter(twin, 5))
    ear = start(engine, ask)
    finish(engine)
    assert ear.tokens[0] == ask.alone(load_mixed(tmp_path, (80, 80), 4096, "native"))
    assert count(engine.metrics, ACCEPTED.name) == count(engine.metrics, DRAFTED.name) > 10
    assert twin.pool.usage().used == 0


def test_the_same_model_as_its_own_draft_is_always_right(twin: Executor, tmp_path: Path) -> None:
    """Since it draws with the same noise (law 10) and gets the same bits however its tokens were cut (law 5)."""
    executor = load_small(tmp_path, 60, None, "native")
    for name in ("plain", "penalties", "bans", "top_p"):
        many = crowd(executor, name, 3)
        engine = with_drafts(executor, ModelDrafter(twin, 5))
        ears = [start(engine, ask) for ask, _ in many]
        finish(engine)
        assert [ear.tokens[0] for ear in ears] == [said for _, said in many]
        assert count(engine.metrics, DRAFTED.name) == count(engine.metrics, ACCEPTED.name) > 100
        assert twin.pool.usage().used == 0


def test_samples_of_one_prompt_have_drafts_of_their_own(executor: Executor, twin: Executor) -> None:
    prompt = asks(1, 5)[0].prompt
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, n=4)
    plain = Engine(executor)
    expected = start(plain, Ask(prompt, params))
    finish(plain)
    for drafter in (NgramDrafter(4), ModelDrafter(twin, 4)):
        engine = with_drafts(executor, drafter)
        ear = start(engine, Ask(prompt, params))
        finish(engine)
        assert ear.tokens == expected.tokens
        assert count(engine.metrics, DRAFTED.name) > 0
    assert twin.pool.usage().used == 0


class Content(Ear):
    """Stops at a token, wherever in a run it comes."""

    def on_event(self, event: Event) -> bool:
        super().on_event(event)
        return isinstance(event, TokenEvent) and len(self.tokens[0]) >= 7


def test_a_stop_inside_accepted_drafts_ends_there_and_the_kv_too(executor: Executor) -> None:
    ask = Ask(asks(3, 8)[2].prompt, SamplingParams(max_tokens=30, temperature=0.8, seed=1))
    said = ask.alone(executor)
    engine = with_drafts(executor, Oracle({ask.prompt: said}, 1.0, VOCAB, 25))
    ear = start(engine, ask, ear=Content(), keep_kv=True)
    steps = finish(engine)
    assert steps < 7
    assert ear.tokens[0] == said[:7]
    assert ear.reasons == ["stop"]
    assert ear.ends[0] is not None
    kv = ear.ends[0].kv
    assert kv is not None
    assert kv.tokens() == [*ask.prompt, *said[:6]]
    with kv:  # and it goes on as if nothing had been drafted
        again = executor.sample_tokens(5, [said[6]], kv, params=SamplingParams(temperature=0.8, seed=1))
    assert again == [said[7:12]]


def test_logprobs_are_those_of_plain_decoding(executor: Executor) -> None:
    ask = Ask(asks(4, 2)[1].prompt, SamplingParams(max_tokens=20, temperature=0.9, seed=2, logprobs=3))

    class Noting(Ear):
        def on_event(self, event: Event) -> bool:
            if isinstance(event, TokenEvent):
                noted.append(event.logprobs)
            return super().on_event(event)

    results = []
    for features in ([], [Drafting(NgramDrafter(6), VOCAB, Free())], []):
        noted: list[object] = []
        engine = Engine(executor, features=features)
        ear = start(engine, ask, ear=Noting())
        finish(engine)
        results.append((ear.tokens, noted))
        if not features:
            features = [Drafting(Oracle({ask.prompt: ear.tokens[0]}, 0.8, VOCAB), VOCAB, Free())]
            engine = Engine(executor, features=features)
            noted = []
            ear = start(engine, ask, ear=Noting())
            finish(engine)
            results.append((ear.tokens, noted))
    assert all(one == results[0] for one in results)


def test_a_request_may_want_no_drafts_or_few(executor: Executor) -> None:
    params = SamplingParams(max_tokens=40)
    prompt = asks(1, 5)[0].prompt
    said = Ask(prompt, params).alone(executor)
    for most in (0, 1, 3):
        engine = with_drafts(executor, Oracle({prompt: said}, 1.0, VOCAB, 9))
        ear = start(engine, Ask(prompt, SamplingParams.of(params, draft_tokens=most)))
        finish(engine)
        assert ear.tokens == [said]
        assert ear.ends[0] is not None
        assert len(ear.ends[0].drafts.places) == most
        assert (ear.ends[0].drafts.drafted > 0) == (most > 0)


def test_a_drafter_that_fails_costs_its_drafts_and_nothing_else(executor: Executor) -> None:
    many = crowd(executor, "plain", 4, 4)
    engine = with_drafts(executor, Broken({}, 1.0, VOCAB))
    ears = [start(engine, ask) for ask, _ in many]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [said for _, said in many]


def test_drafts_never_take_pages_that_others_need(executor: Executor) -> None:
    """A pool that just holds everybody: without drafts nobody is preempted, so with drafts nobody is either."""
    many = [(ask, ask.alone(executor)) for ask in asks(6, 6, temperature=0.5)]
    executor.prefixes.clear()
    size = executor.layout.page_tokens
    need = sum(-(-(len(ask.prompt) + len(said)) // size) for ask, said in many)
    taken = executor.pool.take([max(0, executor.pool.pages - need)] * len(executor.layout.groups))
    engine = with_drafts(executor, Oracle({ask.prompt: said for ask, said in many}, 0.5, VOCAB, 20))
    ears = [start(engine, ask) for ask, _ in many]
    finish(engine)
    for group, pages in enumerate(taken):
        executor.pool.drop(group, pages)
    assert [ear.tokens[0] for ear in ears] == [said for _, said in many]
    assert count(engine.metrics, PREEMPTIONS.name) == 0
