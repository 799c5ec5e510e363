"""Tools whose calls a user answers by hand on the page, and answers that follow a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from running import Running

pytestmark = pytest.mark.needs("chromium")

Visiting = Callable[..., Any]
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_a_call_is_answered_by_hand(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script(CALL, "Rain in Rome")
    page = visit.open().page
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Tools and JSON").click()
    page.fill("#tools", "[{")
    expect(page.locator("#settings [role=alert]")).to_contain_text("Tools:")
    page.fill("#tools", json.dumps(TOOLS))
    expect(page.locator("#settings [role=alert]")).to_be_empty()
    page.get_by_text("Done").click()
    visit.say("What is the weather?")
    card = page.locator(".call")
    expect(card).to_contain_text("weather")
    expect(card).to_contain_text('"city": "Rome"')
    visit.idle()
    page.get_by_label("Result of weather").fill("rain")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_text("Send the results").click()
    *_, called, result = asked.value.post_data_json["messages"]
    assert called["tool_calls"][0]["function"]["name"] == "weather"
    assert (result["role"], result["content"]) == ("tool", "rain")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    visit.answered("Rain in Rome")
    expect(page.locator(".message.tool")).to_contain_text("rain")
    expect(page.get_by_text("Send the results")).to_have_count(0)
    page.reload()
    visit.answered("Rain in Rome")
    expect(card).to_have_count(1)


def test_an_answer_follows_a_schema_and_the_page_checks_it(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.keep(schema=json.dumps(SCHEMA))
    page = visit.open().page
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.say("A number")
    assert asked.value.post_data_json["response_format"]["json_schema"]["schema"] == SCHEMA
    visit.idle()
    visit.script('{"n": 7}', '{"n": "x"}', "[1")
    for says in ("fits the schema", "answer.n is no integer", "no JSON"):
        page.get_by_label("Regenerate as a new branch").click()
        visit.idle()
        expect(page.locator(".facts").last).to_contain_text(says)
