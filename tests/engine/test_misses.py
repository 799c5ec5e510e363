"""Why a prompt reused no more: every reason, what is shown of earlier prompts, and to which tenant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import Ear, load_hybrid, load_small

from kvilt.config import EngineConfig
from kvilt.engine.counters import MISSED, MISSES
from kvilt.engine.engine import Engine
from kvilt.engine.handles.handles import Handles
from kvilt.engine.misses.explain import ReuseFacts, explain
from kvilt.engine.misses.miss import PrefixMiss
from kvilt.engine.misses.past_prompts import (
    MAX_OWNERS,
    MAX_PROMPTS,
    PastPrompt,
    PastPrompts,
    PromptScope,
    continues_alike,
    shared_tokens,
    token_array,
)
from kvilt.engine.request import Request
from kvilt.executor.protocol import Executor
from kvilt.kv.owner import part_of
from kvilt.sampling.params import SamplingParams
from kvilt.store.address import tenant_of

TEXT = [i * 7 % 61 for i in range(90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), 40)


@pytest.fixture
def engine(executor: Executor) -> Engine:
    executor.prefixes.clear()
    return Engine(executor, EngineConfig(step_tokens=64, max_rows=8))


def ended(engine: Engine, prompt: Sequence[int], params: SamplingParams | None = GREEDY, **fields: object) -> Ear:
    ear = Ear()
    engine.add(engine.prepare(Request(list(prompt), params, **fields), ear))  # type: ignore[arg-type]
    while engine.ready:
        engine.step()
    return ear


def missed(
    engine: Engine, prompt: Sequence[int], params: SamplingParams | None = GREEDY, **fields: object
) -> PrefixMiss | None:
    end = ended(engine, prompt, params, **fields).ends[0]
    assert end is not None and end.error is None
    return end.miss


def test_the_first_prompt_was_not_stored(engine: Engine) -> None:
    miss = missed(engine, TEXT)
    assert miss == PrefixMiss("not_stored", 0, 0)


def test_a_prompt_that_is_sent_again_misses_less_than_a_page(engine: Engine) -> None:
    missed(engine, TEXT)
    miss = missed(engine, TEXT)
    assert miss is not None
    assert (miss.reason, miss.expected, miss.reused) == ("page_boundary", 89, 64)
    assert miss.first_different_token is None and miss.around is None
    assert [one.shared_tokens for one in miss.candidates] == [90]


def test_the_first_different_token_is_named_with_what_stands_around_it(engine: Engine) -> None:
    missed(engine, TEXT)
    edited = [*TEXT[:70], 60, *TEXT[71:]]
    miss = missed(engine, edited, id="second")
    assert miss is not None and miss.around is not None
    assert (miss.reason, miss.first_different_token, miss.expected, miss.reused) == ("tokens_differ", 70, 89, 64)
    assert miss.around.before == tuple(TEXT[58:70])
    assert miss.around.now == (60, *TEXT[71:82])
    assert miss.around.earlier == tuple(TEXT[70:82])
    assert miss.missed_tokens == 25


def test_a_volatile_first_line_is_found_though_no_page_is_shared(engine: Engine) -> None:
    missed(engine, [1, 2, 3, *TEXT])
    miss = missed(engine, [1, 2, 4, 5, *TEXT])
    assert miss is not None
    assert (miss.reason, miss.first_different_token, miss.reused) == ("tokens_differ", 2, 0)


def test_another_text_misses_nothing_of_the_earlier_ones(engine: Engine) -> None:
    missed(engine, TEXT)
    miss = missed(engine, [(i * 11 + 5) % 59 for i in range(80)])
    assert miss is not None and miss.reason == "not_stored" and miss.expected == 0


def test_evicted_pages_are_named(engine: Engine, executor: Executor) -> None:
    missed(engine, TEXT)
    executor.prefixes.clear()
    miss = missed(engine, TEXT)
    assert miss is not None
    assert (miss.reason, miss.expected, miss.reused) == ("evicted", 89, 0)


def test_what_was_kept_for_a_time_has_expired(executor: Executor) -> None:
    executor.prefixes.clear()
    past, now = PastPrompts(), [0.0]
    handles = Handles(executor, EngineConfig(), clock=lambda: now[0], on_expired=past.expire)
    engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), past_prompts=past)
    kept = ended(engine, TEXT, keep_kv=True).ends[0]
    assert kept is not None and kept.kv is not None
    handles.keep("", kept.kv, ttl_s=5)
    now[0] = 10.0
    assert handles.owned("") == []
    executor.prefixes.clear()
    miss = missed(engine, TEXT)
    assert miss is not None and miss.reason == "expired"


def test_a_scored_prompt_says_that_it_is_computed(engine: Engine) -> None:
    missed(engine, TEXT)
    miss = missed(engine, TEXT, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0))
    assert miss is not None and (miss.reason, miss.reused) == ("prompt_logprobs", 0)


def test_another_salt_is_named_only_where_the_whole_earlier_prompt_is_known(engine: Engine) -> None:
    missed(engine, TEXT, tenant=part_of("key", "one"))
    miss = missed(engine, [*TEXT, 1, 2], tenant=part_of("key", "two"))
    assert miss == PrefixMiss("other_salt", 90, 0)  # no candidate, no text
    engine = Engine(engine._executor, EngineConfig(step_tokens=64, max_rows=8))
    missed(engine, TEXT, tenant=part_of("key", "one"))
    for number, guess in enumerate(([*TEXT[:80], 60, 60, 60, 60, 60, 60], TEXT[:40])):
        miss = missed(engine, guess, tenant=part_of("key", f"guess {number}"))
        assert miss is None or (miss.reason == "not_stored" and not miss.candidates)


def test_another_key_is_never_seen(engine: Engine) -> None:
    missed(engine, TEXT, tenant="one")
    assert missed(engine, TEXT, tenant="two") == PrefixMiss("not_stored", 0, 0)


def test_a_request_that_shares_nothing_is_not_stored(engine: Engine) -> None:
    missed(engine, TEXT, reuse=False)
    miss = missed(engine, TEXT)
    assert miss is not None and (miss.reason, miss.expected) == ("not_stored", 89)


def test_recurrent_state_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    engine = Engine(load_hybrid(tmp_path, 40, 24, every=512), EngineConfig(step_tokens=64, max_rows=8))
    missed(engine, TEXT[:90])
    miss = missed(engine, [*TEXT[:50], 60, *TEXT[51:90]])
    assert miss is not None and miss.reason in ("state_checkpoint", "tokens_differ")
    assert miss.first_different_token == 50
    assert (miss.reason == "state_checkpoint") == (miss.reused < 32)


def test_misses_are_counted_by_reason(engine: Engine) -> None:
    missed(engine, TEXT)
    missed(engine, TEXT)
    shown = engine.metrics.snapshot()
    counts = {one["labels"]["reason"]: one["value"] for one in shown[MISSES.name]["series"]}
    tokens = {one["labels"]["reason"]: one["value"] for one in shown[MISSED.name]["series"]}
    assert counts == {"not_stored": 1, "page_boundary": 1}
    assert tokens == {"not_stored": 0, "page_boundary": 25}


SCOPE = PromptScope("key", "key", "base")
FACTS = ReuseFacts(0, 0, 32)


def past(ids: Sequence[int], scope: PromptScope = SCOPE, shared: str = "exact") -> PastPrompt:
    return PastPrompt("r", scope, token_array(ids), len(ids), shared, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("earlier", "reason"),
    [
        (past(TEXT, PromptScope("key", "key", "lora")), "other_adapter"),
        (past(TEXT, shared="blended"), "blended_not_shared"),
        (past(TEXT, PromptScope("key", "key/salt", "base")), "other_salt"),
    ],
)
def test_kv_that_may_not_be_shared(earlier: PastPrompt, reason: str) -> None:
    prompts = PastPrompts()
    prompts.add(earlier)
    miss = explain(prompts.compare(SCOPE, token_array(TEXT)), FACTS, 1.0)
    assert miss is not None and (miss.reason, miss.expected) == (reason, 89)


def test_pages_that_a_window_gave_back() -> None:
    prompts = PastPrompts()
    prompts.add(past(TEXT))
    miss = explain(prompts.compare(SCOPE, token_array(TEXT)), ReuseFacts(0, 96, 32), 1.0)
    assert miss is not None and miss.reason == "window"


def test_what_is_remembered_is_bounded() -> None:
    prompts = PastPrompts()
    for number in range(2 * MAX_PROMPTS):
        prompts.add(past([number, *TEXT]))
    assert len(prompts.compare(SCOPE, token_array(TEXT)).compared) == MAX_PROMPTS
    for number in range(MAX_OWNERS):
        prompts.add(past(TEXT, PromptScope(f"{number}", f"{number}", "base")))
    assert not prompts.compare(SCOPE, token_array(TEXT)).compared


def test_a_prompt_replaces_those_that_it_continues() -> None:
    prompts = PastPrompts()
    prompts.add(past(TEXT[:40]))
    comparison = prompts.compare(SCOPE, token_array(TEXT))
    prompts.add(past(TEXT), comparison.compared)
    assert [len(one.past.ids) for one in prompts.compare(SCOPE, token_array(TEXT)).compared] == [90]


def test_expired_kv_counts_for_its_tenant_only() -> None:
    prompts = PastPrompts()
    prompts.expire(tenant_of("other"), TEXT)
    assert prompts.compare(SCOPE, token_array(TEXT)).expired_tokens == 0
    prompts.expire(tenant_of("key"), TEXT[:50])
    assert prompts.compare(SCOPE, token_array(TEXT)).expired_tokens == 50


@given(st.lists(st.integers(0, 3), max_size=600), st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3)))
def test_shared_tokens_are_counted_exactly(head: list[int], one: list[int], other: list[int]) -> None:
    a, b = head + one, head + other
    pairs = zip(a, b, strict=False)
    expected = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
    assert shared_tokens(token_array(a), token_array(b)) == expected


def test_a_text_is_found_again_only_where_a_token_begins() -> None:
    tail = token_array([257 * 65793] * 40)
    assert continues_alike(np.concatenate([token_array([5]), tail]), np.concatenate([token_array([6]), tail]), 0)
    assert not continues_alike(token_array(range(100)), token_array(range(1000, 1100)), 0)
