"""Models with recurrent state in the engine: next turns, regenerated answers, drafts, preemption, stores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import Free, Oracle
from safetensors.torch import save_file
from small import Ask, Ear, asks, finish, load_hybrid, run, start, together
from tiny import VOCAB

from kvilt.batch import Adapted
from kvilt.blend.chunk import ChunkCache
from kvilt.compat.facts import capabilities_of
from kvilt.config import EngineConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.counters import ACCEPTED
from kvilt.engine.engine import Engine
from kvilt.engine.features.drafting import Drafting
from kvilt.errors import InputError
from kvilt.executor.counters import TOKENS
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import PAGE_TOKENS
from kvilt.sampling.params import SamplingParams
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

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


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
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


# Drafts, adapters, stores.


@pytest.mark.parametrize(("truth", "states"), [(1.0, 40), (0.6, 40), (0.6, 12), (0.0, 40)])
def test_drafts_change_no_token(
    executor: ModelExecutor, crowd: list[tuple[Ask, list[int]]], truth: float, states: int
) -> None:
    """A rejected draft leaves the state after the last token that was accepted."""
    answers = {ask.prompt: said for ask, said in crowd[:8]}
    executor.prefixes.clear()
    drafting = Drafting(Oracle(answers, truth, VOCAB), VOCAB, Free())
    engine = Engine(executor, features=[drafting])
    taken = executor.pool.take([0], states=executor.pool.state_slots - states)
    ears = [start(engine, ask) for ask, _ in crowd[:8]]
    finish(engine)
    for group, each in enumerate(taken):
        executor.pool.drop(group, each)
    assert [ear.tokens[0] for ear in ears] == [said for _, said in crowd[:8]]
    accepted = sum(point["value"] for point in engine.metrics.snapshot()[ACCEPTED.name]["series"])
    assert accepted > 0 or not truth
    assert is_clean(executor)


def test_an_adapter_has_states_of_its_own(executor: ModelExecutor, tmp_path: Path) -> None:
    rank, at = 2, "base_model.model.model.layers.0.linear_attn.out_proj"
    tensors = {f"{at}.lora_A.weight": torch.ones(rank, 32) * 0.3, f"{at}.lora_B.weight": torch.ones(24, rank) * 0.2}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["out_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    lora_id = executor.load_lora(tmp_path)
    executor.prefixes.clear()
    ask = greedy(words(130, seed=12), 12)
    base, _ = say(executor, ask)
    adapted, tokens = say(executor, ask, adapter=Adapted(lora_id))
    assert tokens >= 130  # nothing of the base model's was taken
    again, tokens = say(executor, ask, adapter=Adapted(lora_id))
    assert tokens <= PAGE_TOKENS + 12
    assert adapted == again != base
    executor.unload_lora(lora_id)


def test_prefixes_come_back_from_a_store_with_their_states(executor: ModelExecutor, tmp_path: Path) -> None:
    executor.prefixes.clear()
    ask = greedy(words(150, seed=13), 6)
    expected = ask.alone(executor)
    with Store(
        None, [Disk(tmp_path, Budget(1 << 28))], limits=StoreLimits(lookup_s=300, layer_s=300, close_s=300)
    ) as store:
        engine = Engine(executor, store=store)
        ear = start(engine, ask)
        run(engine, lambda: ear.over)
        engine.close()
        assert store.flush(300)
        executor.prefixes.clear()
        before = computed(executor)
        engine = Engine(executor, store=store)
        ear = start(engine, ask)
        run(engine, lambda: ear.over)
        assert ear.tokens[0] == expected
        assert computed(executor) - before <= PAGE_TOKENS + 6
        engine.close()
    executor.prefixes.clear()
    assert is_clean(executor)


def test_a_saved_cache_goes_on_where_it_was(executor: ModelExecutor, tmp_path: Path) -> None:
    prompt = words(100, seed=14)
    with executor.create_kv_cache() as kv:
        executor.prefill(prompt, kv)
        kv.save(tmp_path / "kv")
        expected = executor.step([3], kv)
    before = computed(executor)
    with executor.open_kv_cache(tmp_path / "kv") as again:
        assert torch.equal(executor.step([3], again), expected)
    assert computed(executor) - before == 1


def test_documents_are_refused_by_name(executor: ModelExecutor, tmp_path: Path) -> None:
    with Store(None, [Disk(tmp_path, Budget(1 << 20))]) as store, pytest.raises(InputError, match="recurrent state"):
        ChunkCache(executor, store)


def test_capabilities_say_what_is_different(executor: ModelExecutor) -> None:
    found = capabilities_of(executor)
    assert found.layer_groups == ("full", "recurrent")
    assert not found.blending
    assert any("recurrent state" in note for note in found.notes)
