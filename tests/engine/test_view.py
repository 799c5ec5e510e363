"""What an engine shows of itself: true at every moment, one tenant's own, and without a trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from small import PAGES, Ask, asks, finish, start

from kvilt.config import EngineConfig
from kvilt.engine.engine import Engine
from kvilt.executor.protocol import Executor
from kvilt.kv import prefix_branches
from kvilt.sampling.params import SamplingParams

LONG = Ask(tuple(i * 7 % 61 for i in range(90)), SamplingParams(max_tokens=12))

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_request_is_seen_from_its_arrival_to_its_end(executor: Executor, engine: Engine) -> None:
    groups, size = len(executor.layout.groups), executor.layout.page_tokens
    assert (engine.view("").samples, engine.view("").prefixes) == ((), ())
    start(engine, LONG, id="one", priority=2)
    (seen,) = engine.view("").samples
    assert (seen.request, seen.state, seen.priority, seen.tokens, seen.pages) == ("one", "waiting", 2, 90, 0)
    engine.step()
    (seen,) = engine.view("").samples
    assert (seen.state, seen.computed, seen.cached, seen.prompt_tokens) == ("running", 32, 0, 90)
    assert (seen.pages, seen.shared_pages) == (groups * -(-32 // size), 0)
    engine.hold("one")
    engine.drain_inbox()
    assert engine.view("").samples[0].state == "held"
    engine.resume("one")
    pages = engine.view("").pages
    assert (pages.total, pages.used + pages.free) == (PAGES * groups, PAGES * groups)
    assert pages.used == seen.pages
    finish(engine)
    after = engine.view("")
    assert (after.samples, after.pages.used) == ((), 0)
    (known,) = after.prefixes
    assert known.tokens == (*LONG.prompt, *LONG.alone(executor))[: len(known.tokens)]
    assert after.pages.kept == known.pages


def test_samples_of_one_prompt_share_its_pages(executor: Executor, engine: Engine) -> None:
    start(engine, Ask(LONG.prompt[:64], SamplingParams(max_tokens=9, n=3)))
    while len(engine.view("").samples) < 3:
        engine.step()
    view = engine.view("")
    assert [one.index for one in view.samples] == [0, 1, 2]
    assert all(0 < one.shared_pages <= one.pages for one in view.samples)
    assert view.pages.shared > 0
    assert max(branch.caches for branch in view.prefixes) == 3
    finish(engine)
    again = start(engine, LONG)
    finish(engine)
    assert again.reasons == ["length"]
    assert engine.view("").prefixes[0].hits == 1


def test_a_tenant_sees_its_own(engine: Engine) -> None:
    start(engine, LONG, tenant="a")
    engine.step()
    mine, other = engine.view("a"), engine.view("b")
    assert (len(mine.samples), len(mine.prefixes)) == (1, 1)
    assert (other.samples, other.prefixes) == ((), ())
    assert mine.pages == other.pages
    finish(engine)


def test_looking_while_others_step_sees_no_nonsense_and_changes_nothing(executor: Executor) -> None:
    engine = Engine(executor, EngineConfig(step_tokens=48, max_rows=8))
    many, stop, seen, wrong = asks(24, seed=3), threading.Event(), [0], []

    def watch() -> None:
        while not stop.is_set():
            try:
                view = engine.view("")
                seen[0] += len(view.samples)
                assert all(0 <= one.shared_pages <= one.pages for one in view.samples)
                assert 0 <= view.pages.used <= view.pages.total
            except BaseException as error:
                wrong.append(error)
                return

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    stop.set()
    for watcher in watchers:
        watcher.join()
    assert not wrong and seen[0] > 0
    assert [ear.tokens[0] for ear in ears] == [ask.alone(executor) for ask in many]


def test_a_view_holds_the_pool_only_to_count(
    executor: Executor, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are read without the lock that steps need, and other tenants' prefixes are not even looked at."""
    for tenant in ("", "other"):
        start(engine, LONG, tenant=tenant)
        finish(engine)
    read, tokens = [], prefix_branches.tokens_of

    def reading(nodes: Any, page_tokens: int) -> Any:
        read.append((len(nodes), executor.pool.lock._is_owned()))
        return tokens(nodes, page_tokens)

    monkeypatch.setattr(prefix_branches, "tokens_of", reading)
    (branch,) = engine.view("").prefixes
    assert read == [(len(branch.tokens) // executor.layout.page_tokens, False)]
    assert engine.view("nobody").prefixes == ()
    assert len(read) == 1


def test_a_view_shows_no_more_than_it_is_asked_for(executor: Executor, engine: Engine) -> None:
    for n in range(4):
        start(engine, Ask(tuple(range(n, n + 40)), SamplingParams(max_tokens=1)))
        finish(engine)
    for n in range(4):
        start(engine, LONG, id=f"waits-{n}")
    whole, some = engine.view(""), engine.view("", most=3)
    assert (len(whole.prefixes), len(whole.samples), whole.omitted) == (4, 4, 0)
    assert (some.prefixes, some.samples) == (whole.prefixes[:3], whole.samples[:3])
    assert some.omitted == 2
    for n in range(4):
        engine.abort(f"waits-{n}")
    engine.drain_inbox()
