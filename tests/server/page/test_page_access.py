"""Accessibility of the page by axe-core: every part of it, in both themes. Not even small violations are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_core import violations
from playwright.sync_api import expect
from running import Running

pytestmark = pytest.mark.needs("chromium")

Visiting = Callable[..., Any]
RICH = "# T\n\n1. a\n- b\n\n| a | b |\n|---|---|\n| 1 | [x](https://example.com) |\n\n$x^2$\n\n```py\nreturn 1\n```"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(server: Running, visiting: Visiting, scheme: str) -> None:
    visit = visiting(server, color_scheme=scheme, reduced_motion="reduce", bypass_csp=False)
    page = visit.open().page
    expect(page.locator(".model")).to_have_text("tiny")
    found = {"empty": violations(page)}
    files = page.get_by_label("Documents", exact=True).first
    files.set_input_files([{"name": "a.txt", "mimeType": "text/plain", "buffer": b"The Elbe ends in the sea. " * 8}])
    expect(page.locator(".chip")).to_contain_text("warm")
    page.get_by_label("Which tokens are computed again").select_option("head")
    visit.say("Where does it end?")
    visit.idle()
    page.get_by_text("Which tokens of the documents were computed again").click()
    found["documents"] = violations(page)
    page.get_by_label("Remove a.txt").click()
    page.get_by_label("New chat").click()
    visit.script("12", RICH)
    visit.say("Hello")
    visit.answered("12")
    page.get_by_label("Regenerate as a new branch").click()
    visit.idle()
    found["answer"] = violations(page)
    page.get_by_label("Regenerate several branches at once").click()
    found["branches"] = violations(page)
    page.keyboard.press("Escape")
    page.get_by_label("Conversations", exact=True).first.click()
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator(".handle").first).to_be_visible()
    found["panels"] = violations(page)
    page.get_by_label("Previous branch").click()
    visit.answered("12")
    page.get_by_label("Token probabilities").click()
    page.locator(".token").first.hover()
    found["tokens"] = violations(page)
    page.get_by_label("Compare branches").click()
    found["compare"] = violations(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("More of sampling").click()
    page.get_by_text("Tools and JSON").click()
    page.fill("#system", "You are brief.")
    page.get_by_label("Keep as a system prompt").click()
    found["settings"] = violations(page)
    assert found == {name: {} for name in found}
