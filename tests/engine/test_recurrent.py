"""Models with recurrent state in the engine: next turns, regenerated answers, drafts, preemption, stores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from small import Ask, Ear, asks, finish, load_hybrid, start, together
from tiny import VOCAB

from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.engine import Engine
from kvilt.executor.counters import TOKENS
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import PAGE_TOKENS
from kvilt.sampling.params import SamplingParams

EVERY = 64  # tokens between two checkpoints


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    """Pages for about six of the requests at a time."""
    return load_hybrid(tmp_path_factory.mktemp("hybrid"), 40, 40, EVERY, backend="native")


@pytest.fixture(scope="module")
def crowd(executor: ModelExecutor) -> list[tuple[Ask, list[int]]]:
    return [(ask, ask.alone(executor)) for ask in asks(20, seed=3, temperature=0.7)]


def computed(executor: ModelExecutor) -> int:
    """Tokens that went through the model so far."""
    return int(sum(point["value"] for point in executor.metrics.snapshot()[TOKENS.name]["series"]))


def words(count: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(count)]


def greedy(prompt: list[int], tokens: int = 20) -> Ask:
    return Ask(tuple(prompt), SamplingParams(max_tokens=tokens, temperature=0.0))


def say(executor: ModelExecutor, ask: Ask, **fields: Any) -> tuple[list[int], int]:
    """The answer of a fresh engine, and how many tokens it computed for it."""
    engine, before = Engine(executor), computed(executor)
    ear = start(engine, ask, **fields)
    finish(engine)
    assert ear.error is None
    return ear.tokens[0], computed(executor) - before


def is_clean(executor: ModelExecutor) -> bool:
    return executor.pool.usage().used == 0 and executor.pool.usage().used_states == 0


# Turns of a chat.


def test_the_second_turn_computes_its_new_tokens_and_at_most_one_interval(executor: ModelExecutor) -> None:
    executor.prefixes.clear()
    first = words(150, seed=1)
    answer, _ = say(executor, greedy(first))
    second = [*first, *answer, *words(30, seed=2)]
    again, tokens = say(executor, greedy(second))
    new = len(second) - (len(first) + len(answer) - 1)
    assert tokens <= new + PAGE_TOKENS + 20
    assert again == greedy(second).alone(executor)
    assert is_clean(executor)


def test_another_answer_to_the_same_prompt_computes_less_than_a_page_of_it(executor: ModelExecutor) -> None:
    executor.prefixes.clear()
    prompt = words(190, seed=4)
    say(executor, greedy(prompt, 70))
    again, tokens = say(executor, greedy(prompt, 10))
    assert tokens <= PAGE_TOKENS + 10
    assert again == greedy(prompt, 10).alone(executor)


def test_an_answer_that_is_left_out_of_the_next_turn_costs_less_than_a_page(executor: ModelExecutor) -> None:
    """Templates drop reasoning: the next prompt goes on right after the prompt before."""
    executor.prefixes.clear()
    prompt = words(170, seed=5)
    say(executor, greedy(prompt, 80))
    second = [*prompt, *words(25, seed=6)]
    _, tokens = say(executor, greedy(second, 5))
    assert tokens <= 25 + PAGE_TOKENS + 5


def test_going_back_in_a_conversation_computes_at_most_one_interval(executor: ModelExecutor) -> None:
    executor.prefixes.clear()
    prompt = words(300, seed=7)
    say(executor, greedy(prompt, 5))
    _, tokens = say(executor, greedy([*prompt[:250], *words(10, seed=8)], 5))
    assert tokens <= 10 + EVERY + 5


def test_a_borrowed_cache_that_was_cut_is_folded_again(executor: ModelExecutor) -> None:
    prompt = words(120, seed=9)
    with executor.create_kv_cache() as kv:
        executor.prefill(prompt, kv)
        for length in (1, 63, 64, 90, 119):
            cut = kv.fork()
            cut.truncate(length)
            ask = greedy([*prompt[:length], 5, 6], 8)
            answer, _ = say(executor, ask, borrowed=BorrowedKV(cut))
            assert answer == ask.alone(executor)


# Days.


@pytest.mark.parametrize("seed", range(6))
def test_every_survivor_says_what_it_says_alone(
    executor: ModelExecutor, crowd: list[tuple[Ask, list[int]]], seed: int
) -> None:
    dice = random.Random(seed)
    executor.prefixes.clear()
    config = EngineConfig(step_tokens=dice.choice([16, 33, 64, 200]), max_rows=dice.choice([4, 9, 16]))
    engine, ears = Engine(executor, config), {}
    order = dice.sample(range(len(crowd)), len(crowd))
    doomed = set(dice.sample(order, len(crowd) * 3 // 10))
    pages, states = dice.choice([0, 16, 24]), dice.choice([0, 12, 28])
    taken = executor.pool.take([pages], states=states)
    while order or engine.ready:
        for at in [order.pop() for _ in range(min(len(order), dice.choice([0, 1, 2, 8])))]:
            ears[at] = start(engine, crowd[at][0], id=str(at))
        for at in sorted(doomed & ears.keys()):
            if dice.random() < 0.05:
                engine.abort(str(at))
        engine.step()
    for group, each in enumerate(taken):
        executor.pool.drop(group, each)
    for at, ear in ears.items():
        (reason,), (said,), expected = ear.reasons, ear.tokens, crowd[at][1]
        if reason == "cancelled":
            assert said == expected[: len(said)]
        else:
            assert (reason, said) == ("length", expected), f"request {at}"
    assert is_clean(executor)


def test_few_pages_preempt_and_few_slots_make_requests_wait(tmp_path: Path) -> None:
    small = load_hybrid(tmp_path, 16, 8, EVERY, backend="native")
    many = [greedy(words(40 + 9 * i, seed=i), 40) for i in range(6)]
    engine = Engine(small)
    ears = [start(engine, ask, id=str(i)) for i, ask in enumerate(many)]
    finish(engine)
    assert [ear.tokens[0] for ear in ears] == [ask.alone(small) for ask in many]
    assert is_clean(small)


def test_samples_of_one_prompt_share_its_state(executor: ModelExecutor) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=5, n=4)
    engine = Engine(executor)
    ear = start(engine, Ask(tuple(words(77, seed=10)), params))
    finish(engine)
    for index, said in enumerate(ear.tokens):
        assert len(said) == 30, index
    assert len({tuple(said) for said in ear.tokens}) == 4
    assert is_clean(executor)


def test_prompt_logprobs_are_those_of_the_executor(executor: ModelExecutor) -> None:
    prompt = words(70, seed=11)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    ear = Ear()
    engine = Engine(executor)
    start(engine, Ask(tuple(prompt), params), ear=ear)
    finish(engine)
    found = [one.logprob for scored in ear.scored for one in scored.logprobs]
    assert found == executor.score(prompt).logprobs.tolist()


def test_all_at_once_equals_each_alone(executor: ModelExecutor, crowd: list[tuple[Ask, list[int]]]) -> None:
    ears = together(executor, [ask for ask, _ in crowd])
    assert [ear.tokens[0] for ear in ears] == [said for _, said in crowd]
