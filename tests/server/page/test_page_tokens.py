"""Inside an answer: probabilities of tokens, forks at one of them, several branches at once, answers gone on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from running import Running

pytestmark = pytest.mark.needs("chromium")

Visiting = Callable[..., Any]


def test_a_token_has_alternatives_and_one_of_them_forks_there(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12345")
    page = visit.open().page
    visit.say("Count, please.")
    visit.answered("12345")
    page.get_by_label("Token probabilities").click()
    tokens = page.locator(".token")
    assert tokens.count() in (5, 6), "the digits, and perhaps the token that ended the answer"
    tokens.nth(2).hover()
    popup = page.locator(".alternatives")
    expect(popup).to_be_visible()
    choice = popup.locator(".alternative:not(:disabled)").first
    chosen = str(choice.locator(".mono").inner_text())
    page.unroute_all()  # the model goes on as it likes
    with page.expect_request("**/v1/chat/completions") as asked:
        choice.click()
    body = asked.value.post_data_json
    assert body["messages"][-1]["role"] == "assistant"
    assert body["messages"][-1]["content"].startswith("12")
    assert body["continue_final_message"] is True
    assert "kv" in body, "the KV before the token is shared"
    visit.idle()
    expect(page.locator(".which")).to_have_text("2/2")
    assert len(chosen) >= 1
    assert page.locator(".assistant .body > .md").last.inner_text().startswith("12")


def test_tokens_by_keyboard(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("123")
    page = visit.open().page
    visit.say("Count")
    visit.answered("123")
    page.get_by_label("Token probabilities").click()
    page.mouse.move(0, 0)  # over a token it would show that one's alternatives
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".alternative:focus")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator(".alternatives")).to_be_hidden()
    page.get_by_label("Token probabilities").click()
    expect(page.locator(".token")).to_have_count(0)
    visit.answered("123")


def test_several_branches_at_once_are_compared_and_picked(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.keep(maxTokens=6, temperature=1.5)
    page = visit.open().page
    visit.say("Say something")
    visit.idle()
    page.get_by_label("Regenerate several branches at once").click()
    expect(page.get_by_label("Branches", exact=True)).to_have_value("3")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Branches", exact=True)).to_have_count(0)
    page.get_by_label("Regenerate several branches at once").click()
    page.get_by_label("Branches", exact=True).fill("4")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert asked.value.post_data_json["n"] == 4
    visit.idle()
    expect(page.locator(".which")).to_have_text("2/5")
    texts = page.evaluate("JSON.parse(sessionStorage.getItem('kvilt.chat')).nodes.slice(2).map((one) => one.text)")
    handles = page.evaluate("JSON.parse(sessionStorage.getItem('kvilt.chat')).nodes.slice(2).map((one) => one.kv.id)")
    assert len(texts) == 5
    assert len(set(handles)) == 5, "each branch has its own KV"
    page.get_by_label("Compare branches").click()
    dialog = page.locator("#compare")
    expect(dialog.locator(".compared")).to_have_count(2)
    page.get_by_label("Right branch").select_option("3")
    expect(dialog.locator(".compared").last).to_have_text(texts[3], use_inner_text=False)
    dialog.get_by_text("Show this one").last.click()
    expect(page.locator(".which")).to_have_text("4/5")


def test_an_answer_is_edited_and_continued(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12", "56", "78")
    page = visit.open().page
    visit.say("Count")
    visit.answered("12")
    page.get_by_label("Edit the answer and continue it").click()
    page.get_by_label("Edit the message").fill("one two ")
    page.get_by_text("Continue from here").click()
    visit.answered("one two 56")
    expect(page.locator(".which")).to_have_text("2/2")
    visit.say("More")
    visit.answered("78")
    page.get_by_label("Previous branch").click()
    visit.answered("12")
