"""Conversations that the server keeps, seen from several browsers, and files of sessions with their KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from running import Running, until

pytestmark = pytest.mark.needs("chromium")

Start = Callable[..., Any]
Visiting = Callable[..., Any]


def kept(server: Running, words: str = "") -> list[dict[str, Any]]:
    return list(server.http().get("/v1/chats", params={"q": words}).json()["data"])


def written(server: Running, words: str) -> None:
    """Wait until one conversation on the server has all of these words: a page may write it several times."""
    until(lambda: len(kept(server, words)) == 1, f"the conversation with {words} on the server")


def test_a_link_works_in_another_browser_and_after_a_restart(start: Start, visiting: Visiting, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path) as server:
        visit = visiting(server)
        visit.script("12")
        page = visit.open().page
        visit.say("What is kept?")
        visit.answered("12")
        written(server, "12")
        until(
            lambda: page.evaluate("localStorage.getItem('kvilt.chat.' + location.hash.slice(6))") is None, "moving it"
        )
        link = page.url.removeprefix(server.url)
        other = visiting(server)
        other.page.goto(server.url + link)
        other.answered("12")
        expect(other.page.locator(".said")).to_have_text("What is kept?")
    with start(chats_dir=tmp_path) as server:
        again = visiting(server)
        again.page.goto(server.url + link)
        again.answered("12")
        again.page.get_by_label("Conversations", exact=True).first.click()
        expect(again.page.locator(".chat-title")).to_contain_text(["What is kept?"])
        expect(again.page.locator(".where")).to_contain_text("on the server")
        again.page.get_by_label("Rename What is kept?").click()
        again.page.get_by_label("Title").fill("Kept")
        again.page.keyboard.press("Enter")
        expect(again.page.locator(".chat-title", has_text="Kept")).to_have_count(1)
        again.page.get_by_label("Search conversations").fill("nothing like it")
        expect(again.page.locator(".chat-list")).to_contain_text("Nothing was found")
        again.page.get_by_label("Search conversations").fill("WHAT 12")
        expect(again.page.locator(".chat-title")).to_contain_text(["Kept"])
        again.page.get_by_label("Delete Kept").click()
        again.page.get_by_role("button", name="Delete", exact=True).click()
        expect(again.page.locator(".welcome")).to_be_visible()
        assert kept(server) == []
        again.page.goto(f"{server.url}/#chat=unknown")
        expect(again.page.locator("#notice")).to_contain_text("not kept here")


def test_two_browsers_write_one_conversation(start: Start, visiting: Visiting, tmp_path: Path) -> None:
    with start(chats_dir=tmp_path) as server:
        one, other = visiting(server), visiting(server)
        one.script("12", "56")
        other.script("34")
        one.open().say("First")
        one.answered("12")
        written(server, "12")
        other.page.goto(one.page.url)
        other.answered("12")
        other.say("From the other browser")
        other.answered("34")
        written(server, "12 34")
        one.page.get_by_label("Regenerate as a new branch").click()  # it has not seen that
        one.answered("56")
        written(server, "12 34 56")
        one.page.get_by_label("Previous branch").click()
        one.answered("34")
        expect(one.page.locator(".said").last).to_have_text("From the other browser")
        other.page.reload()
        expect(other.page.locator(".which").last).to_have_text("1/2")


def test_an_incomplete_copy_of_an_answer_never_replaces_the_complete_one(
    start: Start, visiting: Visiting, tmp_path: Path
) -> None:
    """A page that took in another page's answer while it streamed writes the conversation later."""
    question = {"id": "q", "parent": "root", "role": "user", "text": "First", "children": ["a"], "shown": 0}
    root = {"id": "root", "parent": None, "role": "root", "text": "", "children": ["q"], "shown": 0}

    def put(revision: int, text: str, state: str) -> None:
        answer = {"id": "a", "parent": "q", "role": "assistant", "text": text, "children": [], "shown": 0}
        nodes = [root, {**question, "state": "done"}, {**answer, "state": state}]
        body = {"title": "First", "conversation": json.dumps({"nodes": nodes}), "revision": revision}
        server.http().put("/v1/chats/both", json=body).raise_for_status()

    with start(chats_dir=tmp_path) as server:
        put(0, "1", "streaming")
        visit = visiting(server)
        visit.script("56")
        visit.page.goto(f"{server.url}/#chat=both")
        visit.answered("1")
        put(1, "1234", "done")
        visit.say("Go on")
        visit.answered("56")
        written(server, "1234 56")
        expect(visit.page.locator(".assistant .body > .md").first).to_have_text("1234")


def test_what_a_browser_had_moves_to_the_server_when_it_goes_on(
    start: Start, visiting: Visiting, tmp_path: Path, server: Running
) -> None:
    visit = visiting(server)
    visit.script("12")
    page = visit.open().page
    visit.say("In the browser")
    visit.answered("12")
    stored = page.evaluate("JSON.stringify(localStorage)")
    page.close()
    with start(chats_dir=tmp_path) as keeping:
        later = visiting(keeping)
        later.page.add_init_script(
            f"if (!sessionStorage.length) for (const [k, v] of Object.entries({stored})) localStorage.setItem(k, v)"
        )
        later.script("34")
        later.open()
        later.page.get_by_label("Conversations", exact=True).first.click()
        expect(later.page.locator(".chat-title")).to_contain_text(["in this browser only"])
        later.page.locator(".chat-title").click()
        later.answered("12")
        later.say("Go on")
        later.answered("34")
        until(lambda: [one["title"] for one in kept(keeping)] == ["In the browser"], "moving it")


def test_a_session_file_has_the_conversation_and_its_kv(start: Start, visiting: Visiting, tmp_path: Path) -> None:
    with start() as server:
        visit = visiting(server)
        visit.script("1234", "5678")
        page = visit.open().page
        visit.say("Count, please, slowly and with care.")
        visit.answered("1234")
        page.get_by_label("Regenerate as a new branch").click()
        visit.answered("5678")
        page.get_by_label("Conversations", exact=True).first.click()
        with page.expect_download() as got:
            page.get_by_label("with its KV").click()
        path = tmp_path / got.value.suggested_filename
        got.value.save_as(path)
        assert path.suffix == ".kvs"
        usage = page.evaluate("JSON.parse(sessionStorage.getItem('kvilt.chat')).nodes.at(-1).usage")
    with start() as server:
        server.llm.executor.prefixes.clear()
        again = visiting(server)
        again.script("90", "11")
        page = again.open().page
        page.get_by_label("Conversations", exact=True).first.click()
        page.get_by_label("A conversation to import").set_input_files(path)
        again.answered("5678")
        expect(page.locator(".which")).to_have_text("2/2")
        expect(page.locator("#chats [role=status]")).to_have_text("The KV of the file is used.")
        page.get_by_label("Close the conversations").click()
        again.say("Go on")
        again.answered("90")
        total = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        reused = page.evaluate(
            "JSON.parse(sessionStorage.getItem('kvilt.chat')).nodes.at(-1).usage.prompt_tokens_details.cached_tokens"
        )
        assert reused >= total - 1, "the answer's KV came with the file"
        again.say("And on")
        again.answered("11")
        (tmp_path / "bad.kvs").write_bytes(path.read_bytes()[:-3])
        page.get_by_label("Conversations", exact=True).first.click()
        page.get_by_label("A conversation to import").set_input_files(tmp_path / "bad.kvs")
        expect(page.locator("#chats [role=alert]")).to_contain_text("checksum")
