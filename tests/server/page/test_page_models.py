"""A page of a server with several models: everything that it asks is about the model that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from routers import Routed, router_of
from running import running

from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

pytestmark = pytest.mark.needs("chromium")


@pytest.fixture
def routed(executor: Executor, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        models = {name: stack.enter_context(running(executor, tokenizer, names=(name,))) for name in ("alpha", "beta")}
        yield stack.enter_context(router_of(models, tmp_path))


def held(routed: Routed, model: str) -> int:
    """Handles in the process of a model."""
    return len(httpx.get(f"{routed.models[model].url}/v1/kv", timeout=60).json()["data"])


def test_another_model_answers_and_its_kv_is_shown(routed: Routed, visiting: Callable[..., Any]) -> None:
    visit = visiting(routed)
    visit.keep(maxTokens=4)
    page = visit.open().page
    choice = page.get_by_label("Model", exact=True).locator("visible=true").last
    expect(choice).to_have_value("alpha")
    visit.say("First")
    visit.idle()
    assert (held(routed, "alpha"), held(routed, "beta")) == (1, 0)
    choice.select_option("beta")
    with page.expect_request("**/v1/kv/state?model=beta"):
        page.get_by_label("KV inspector", exact=True).first.click()
    visit.say("Second")
    visit.idle()
    expect(page.locator(".trouble:visible")).to_have_count(0)
    assert held(routed, "beta") == 1
    assert routed.started == ["alpha", "beta"]
