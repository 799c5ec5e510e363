"""A conversation on the page: answers, branches, stopping, keys of the keyboard, errors and what is kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gates import Gate
from playwright.sync_api import expect
from running import Running, until

from kvilt.config import EngineConfig
from kvilt.executor.protocol import Executor

pytestmark = pytest.mark.needs("chromium")

Start = Callable[..., Any]
Visiting = Callable[..., Any]
WHICH = ".which"


def test_a_conversation(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("1234567", "89")
    page = visit.open().page
    expect(page).to_have_title("tiny · kvilt")
    expect(page.locator("#prompt")).to_be_focused()
    visit.say("Count to seven.\nPlease.")
    visit.answered("1234567")
    expect(page.locator(".said")).to_have_text("Count to seven.\nPlease.")
    assert "tok/s" in visit.facts()
    assert "first token" in visit.facts()
    expect(page.locator("#gauge")).to_contain_text("/ 1,024 tokens")
    expect(page.locator("#gauge")).to_contain_text("8 written")
    visit.say("Go on")
    visit.answered("89")
    assert page.locator(".message").count() == 4
    expect(page.locator("#status")).to_have_text("Answer complete")


def test_shift_enter_is_a_new_line_and_blanks_are_not_sent(server: Running, visiting: Visiting) -> None:
    page = visiting(server).open().page
    expect(page.locator("#send")).to_be_disabled()
    page.locator("#prompt").press_sequentially("  ")
    page.press("#prompt", "Shift+Enter")
    page.press("#prompt", "Enter")
    assert page.input_value("#prompt") == "  \n"
    assert page.locator(".message").count() == 0


@pytest.fixture
def halfway(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """An answer comes this far, and no further before the gate is set."""
    gate = Gate(executor, monkeypatch)
    gate.last = 60
    yield gate
    gate.set()


def test_stopping_keeps_what_came(server: Running, visiting: Visiting, halfway: Gate) -> None:
    visit = visiting(server)
    visit.keep(maxTokens=900)
    page = visit.open().page
    visit.say("Talk for a long time.")
    expect(page.locator(".assistant .body > .md")).to_have_text(re.compile(".{20}", re.DOTALL))
    page.get_by_label("Stop", exact=True).click()
    visit.idle()
    halfway.set()
    expect(page.locator(".facts")).to_contain_text("stopped")
    assert len(page.locator(".assistant .body > .md").inner_text()) > 20
    assert "of " in visit.facts(), "the counts came while it ran"
    until(lambda: server.llm.engine.requests == 0, "the server's end of the request")
    visit.script("42")
    visit.say("And now?")
    visit.answered("42")


def test_regenerating_makes_a_branch_that_forks_the_prompt(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("111", "222", "333")
    page = visit.open().page
    visit.say("Say a number, any number that you like.")
    visit.answered("111")
    for said, which in (("222", "2/2"), ("333", "3/3")):
        page.get_by_label("Regenerate as a new branch").click()
        visit.answered(said)
        expect(page.locator(WHICH)).to_have_text(which)
        tokens = prompt_tokens(page)
        assert f"{tokens - 1} of {tokens} tokens reused" in visit.facts(), "all but the one that gives the logits"
        assert "Forked from KV handle" in page.locator(".reuse").get_attribute("title")
    page.get_by_label("Previous branch").click()
    page.get_by_label("Previous branch").click()
    visit.answered("111")
    expect(page.get_by_label("Previous branch")).to_be_disabled()
    expect(page.get_by_label("Answer, branch 1 of 3")).to_be_visible()


def prompt_tokens(page: Any) -> int:
    return int(page.evaluate("JSON.parse(sessionStorage.getItem('kvilt.chat')).nodes.at(-1).usage.prompt_tokens"))


def test_editing_forks_the_answer_before(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("1234", "56", "78")
    page = visit.open().page
    visit.say("Count, please, slowly and with care.")
    visit.answered("1234")
    first = handles(server)[-1]  # the last to be used
    assert first["tokens"] == prompt_tokens(page) + 4
    visit.say("Go on")
    visit.answered("56")
    assert f"{first['tokens']} of" in visit.facts()
    page.get_by_label("Edit as a new branch").last.click()
    page.locator(".rewrite").fill("Go on, faster")
    page.get_by_text("Send as a branch").click()
    visit.answered("78")
    assert f"{first['tokens']} of" in visit.facts()
    expect(page.locator(WHICH)).to_have_text("2/2")
    expect(page.locator(".said").last).to_have_text("Go on, faster")
    page.get_by_label("Previous branch").click()
    visit.answered("56")
    expect(page.locator(".said").last).to_have_text("Go on")


def handles(server: Running) -> list[dict[str, Any]]:
    return list(server.http().get("/v1/kv").json()["data"])


def test_a_handle_that_is_gone_is_no_error(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12", "34", "56")
    page = visit.open().page
    visit.say("One")
    visit.answered("12")
    for one in handles(server):
        server.http().delete(f"/v1/kv/{one['id']}")
    page.get_by_label("Regenerate as a new branch").click()
    visit.answered("34")
    visit.say("Two")
    visit.answered("56")
    expect(page.locator(".trouble:visible")).to_have_count(0)


def test_no_room_for_one_more_handle_is_no_error(start: Start, visiting: Visiting) -> None:
    with start(EngineConfig(max_handles=1)) as server:
        visit = visiting(server)
        visit.script("12", "34")
        page = visit.open().page
        visit.say("One")
        visit.answered("12")
        visit.say("Two")
        visit.answered("34")
        expect(page.locator(".trouble:visible")).to_have_count(0)
        assert len(handles(server)) == 1


def test_by_keyboard_alone(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("11", "22", "33")
    page = visit.open().page
    keys = page.keyboard
    keys.type("A number, please")
    keys.press("Enter")
    visit.answered("11")
    keys.press("ArrowUp")  # from the empty box to the last message
    expect(page.locator(".message.assistant")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    keys.press("r")
    visit.answered("22")
    keys.press("Alt+ArrowLeft")
    visit.answered("11")
    keys.press("ArrowRight")
    visit.answered("22")
    keys.press("ArrowUp")
    expect(page.locator(".message.user")).to_be_focused()
    keys.press("e")
    keys.type(" now")
    keys.press("Enter")
    visit.answered("33")
    expect(page.locator(".said")).to_have_text("A number, please now")
    keys.press("ArrowUp")
    keys.press("ArrowUp")
    keys.press("e")
    keys.press("Escape")
    expect(page.locator(".message.user")).to_be_focused()
    keys.press("Escape")
    expect(page.locator("#prompt")).to_be_focused()


def test_escape_stops_and_tab_reaches_everything(server: Running, visiting: Visiting, halfway: Gate) -> None:
    visit = visiting(server)
    visit.keep(maxTokens=900)
    page = visit.open().page
    visit.say("Talk for a long time.")
    expect(page.locator(".assistant .body > .md")).to_have_text(re.compile("."))
    page.keyboard.press("Escape")
    visit.idle()
    expect(page.locator(".facts")).to_contain_text("stopped")
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    wanted = {"New chat", "KV inspector", "Settings", "Dark theme", "Message"}
    assert wanted | {"Copy", "Regenerate as a new branch", "Edit as a new branch"} <= seen


def test_errors_say_what_to_do_and_can_be_tried_again(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.keep(system="far too much to read " * 400)
    page = visit.open().page
    visit.say("Hello")
    expect(page.locator(".assistant .trouble")).to_contain_text("Start a new chat, edit an earlier message")
    visit.idle()
    page.get_by_role("button", name="Settings").click()
    page.fill("#system", "You are brief.")
    page.get_by_text("Done").click()
    visit.script("7")
    page.locator(".assistant .trouble").get_by_role("button").click()
    visit.answered("7")
    expect(page.locator(".assistant .trouble")).to_be_hidden()
    expect(page.locator(WHICH)).to_have_count(0)


def test_a_server_that_cannot_be_reached(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    expect(page.locator(".model")).to_have_text("tiny")
    # Not set_offline: a connection that is open already may still carry a request.
    page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    visit.say("Hello")
    expect(page.locator(".assistant .trouble")).to_contain_text("Check that kvilt serve is running")
    page.unroute("**/v1/**")
    visit.script("7")
    page.locator(".assistant .trouble").get_by_role("button").click()
    visit.answered("7")


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("", "The connection was lost"),
        (
            'data: {"error": {"message": "ended by the server", "type": "server_error", "code": "cancelled"}}\n\n',
            "Ended by",
        ),
    ],
    ids=["dropped", "told"],
)
def test_a_stream_that_breaks_keeps_what_came(server: Running, visiting: Visiting, end: str, says: str) -> None:
    visit = visiting(server)
    part = 'data: {"choices": [{"index": 0, "delta": {"content": "As far as"}, "finish_reason": null}]}\n\n'
    page = visit.open().page
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=": keep-alive\n\n" + part + end, content_type="text/event-stream"),
    )
    visit.say("Hello")
    expect(page.locator(".assistant .trouble")).to_contain_text(says)
    expect(page.locator(".assistant .body > .md").last).to_have_text("As far as")
    visit.script("7")
    page.locator(".assistant .trouble").get_by_role("button").click()
    visit.answered("7")
    page.get_by_label("Previous branch").click()
    expect(page.locator(".assistant .body > .md").last).to_have_text("As far as")


def test_long_prompts_show_how_far_they_are_read(
    start: Start, visiting: Visiting, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, run, seen = threading.Event(), executor.run, []

    def held(batch: Any, *more: Any, **named: Any) -> Any:
        seen.append(batch)
        if len(seen) == 3:
            go_on.wait(300)
        return run(batch, *more, **named)

    executor.prefixes.clear()
    with start(EngineConfig(step_tokens=64, max_rows=8)) as server:
        visit = visiting(server)
        visit.keep(system="word after word after word " * 60)
        page = visit.open().page
        monkeypatch.setattr(executor, "run", held)
        visit.script("7")
        visit.say("Hello")
        try:
            bar = page.get_by_role("progressbar")
            expect(bar).to_have_attribute("aria-valuenow", "128")
            expect(page.locator(".waiting")).to_contain_text("Reading the prompt: 128 of")
        finally:
            go_on.set()
        visit.answered("7")
        expect(bar).to_have_count(0)


def test_a_reload_keeps_the_conversation_and_a_new_one_gives_its_kv_back(start: Start, visiting: Visiting) -> None:
    with start() as server:
        visit = visiting(server)
        visit.script("12", "34", "56", "78")
        page = visit.open().page
        visit.say("One")
        visit.answered("12")
        page.get_by_label("Regenerate as a new branch").click()
        visit.answered("34")
        page.reload()
        visit.answered("34")
        expect(page.locator(WHICH)).to_have_text("2/2")
        visit.say("Two")
        visit.answered("56")
        assert len(handles(server)) == 4
        page.get_by_label("New chat").click()
        expect(page.locator(".welcome")).to_be_visible()
        until(lambda: not handles(server), "giving everything back")
        page.get_by_text("Why is the sky blue?").click()
        visit.idle()
        expect(page.locator(".said")).to_have_text("Why is the sky blue?")


def test_settings_are_checked_kept_and_sent(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    page.get_by_role("button", name="Settings").click()
    page.fill("#system", "Be brief.")
    page.fill("#max-tokens", "3")
    page.locator("#temperature").fill("0")
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.say("Hello")
    body = asked.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0, 3)
    visit.idle()
    expect(page.locator(".facts")).to_contain_text("cut at max tokens")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    assert page.input_value("#max-tokens") == "3"
    page.fill("#max-tokens", "-5")
    page.get_by_text("Done").click()
    expect(page.locator("#max-tokens")).to_be_focused()  # the browser says what is wrong with it
    page.fill("#max-tokens", "")
    page.get_by_text("Done").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.script("7")
        visit.say("Hello")
    assert "max_tokens" not in asked.value.post_data_json
    visit.idle()
