"""Conversations on the page: a list that is kept, links to them, files, handles of closed tabs; what new users met."""

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


def handles(server: Running) -> list[dict[str, Any]]:
    return list(server.http().get("/v1/kv").json()["data"])


def test_conversations_are_listed_searched_renamed_and_deleted(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12", "34")
    page = visit.open().page
    visit.say("First question about rivers")
    visit.answered("12")
    page.get_by_label("New chat").click()
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#to-end")).to_be_hidden()
    visit.say("Second question about mountains")
    visit.answered("34")
    page.get_by_label("Conversations", exact=True).first.click()
    titles = page.locator(".chat-title")
    expect(titles).to_have_count(2)
    expect(titles.first).to_contain_text("mountains")
    page.get_by_label("Search conversations").fill("RIVERS 12")  # words of questions and answers
    expect(titles).to_have_count(1)
    titles.first.click()
    visit.answered("12")
    expect(page.locator(".said")).to_have_text("First question about rivers")
    page.get_by_label("Search conversations").fill("")
    page.get_by_label("Rename First question about rivers").click()
    page.get_by_label("Title").fill("Rivers")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-title", has_text="Rivers")).to_have_count(1)
    page.get_by_label("Delete Second question about mountains").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    visit.script("56")
    visit.say("Go on")
    visit.answered("56")
    page.get_by_label("Conversations", exact=True).first.click()
    expect(titles).to_contain_text(["Rivers"])


def test_a_link_opens_its_conversation_in_a_new_tab(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12")
    page = visit.open().page
    visit.say("What is kept?")
    visit.answered("12")
    assert "#chat=" in page.url
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".assistant .body > .md").last).to_have_text("12")
    other.goto(server.url)
    expect(other.locator(".message")).to_have_count(2)  # this tab had it
    other.close()


def test_conversations_are_files(server: Running, visiting: Visiting, tmp_path: Path) -> None:
    visit = visiting(server)
    visit.script("12", "34")
    page = visit.open().page
    visit.say("Which number?")
    visit.answered("12")
    page.get_by_label("Regenerate as a new branch").click()
    visit.answered("34")
    page.get_by_label("Conversations", exact=True).first.click()
    with page.expect_download() as got:
        page.get_by_label("Export Which number? as JSON").click()
    path = tmp_path / got.value.suggested_filename
    got.value.save_as(path)
    assert path.name == "Which-number.json"
    saved = json.loads(path.read_text())
    assert [node["text"] for node in saved["nodes"]] == ["", "Which number?", "12", "34"]
    assert not any("kv" in node for node in saved["nodes"]), "handles are this server's"
    with page.expect_download() as got:
        page.get_by_label("Export Which number? as Markdown").click()
    got.value.save_as(tmp_path / "chat.md")
    assert (tmp_path / "chat.md").read_text() == "# Which number?\n\n## You\n\nWhich number?\n\n## Answer\n\n34\n"
    page.get_by_label("Delete Which number?").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".welcome")).to_be_visible()
    page.get_by_label("A conversation to import").set_input_files(path)
    visit.answered("34")
    expect(page.locator(".which")).to_have_text("2/2")
    (tmp_path / "bad.json").write_text('{"format": "other"}')
    page.get_by_label("A conversation to import").set_input_files(tmp_path / "bad.json")
    expect(page.locator("#chats [role=alert]")).to_contain_text("no conversation of kvilt")


def test_handles_of_a_closed_tab_are_given_back(start: Start, visiting: Visiting) -> None:
    with start() as server:
        visit = visiting(server)
        visit.script("12")
        page = visit.open().page
        visit.say("One")
        visit.answered("12")
        assert len(handles(server)) == 1
        context = page.context
        page.close()
        context.new_page().goto(server.url)
        until(lambda: not handles(server), "giving back what the closed tab held")


def test_an_edited_first_message_reuses_what_it_shares(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("12", "34")
    page = visit.open().page
    visit.say("Tell me a number that you like.")
    visit.answered("12")
    page.get_by_label("Edit as a new branch").click()
    page.locator(".rewrite").fill("Tell me a number that you love.")
    page.get_by_text("Send as a branch").click()
    visit.answered("34")
    reused, total = (int(part.split()[at]) for part, at in zip(visit.facts().split(" of ")[-2:], (-1, 0), strict=True))
    assert reused > total - 12, "all but the last word and the end of the template"


def test_the_page_samples_as_the_terminal_does(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    expect(page.locator(".model")).to_have_text("tiny")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.say("Hello")
    body = asked.value.post_data_json
    assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0.2, 0.9, 1.1)
    visit.idle()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("output")).to_contain_text("top p 0.9")
    page.locator("#temperature").fill("0.5")
    expect(page.locator("#usual")).not_to_be_checked()
    page.keyboard.press("Escape")


def test_the_inspector_leaves_the_chat_in_sight_on_a_tablet(server: Running, visiting: Visiting) -> None:
    visit = visiting(server, viewport={"width": 820, "height": 1100})
    visit.script("12")
    page = visit.open().page
    visit.say("Hello")
    visit.answered("12")
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator(".handle").first).to_be_visible()
    chat, panel = page.locator(".chat").bounding_box(), page.locator("#inspector").bounding_box()
    assert chat["height"] > 500
    assert panel["y"] >= chat["y"] + chat["height"] - 1
    expect(page.locator(".message.assistant")).to_be_in_viewport()


RICH = """1. one
2. two

- bullet

| a | b |
|:-:|--:|
| `x\\|y` | **2** |

See [the docs](https://example.com/a?b=1) and https://example.org/x. ![pic](https://example.com/p.png)

$$\\frac{a_1}{\\sqrt{b}} \\leq \\sum_{i=1}^n x^2$$

It costs $5 and $6, but $e^{i\\pi}$ is math. ~~gone~~

```python
def f(x):  # comment
    return "text" + 42
```

مرحبا بالعالم
"""


def test_markdown_is_complete_and_safe(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    page.evaluate(
        """async (text) => {
            const { update } = await import(`${location.origin}/js/markdown.js`);
            const holder = document.createElement('div');
            holder.className = 'md';
            document.body.append(holder);
            update(holder, text);
        }""",
        RICH,
    )
    md = page.locator(".md")
    expect(md.locator("ol > li")).to_have_text(["one", "two"])
    expect(md.locator("ul > li")).to_have_text(["bullet"])
    expect(md.locator("th")).to_have_text(["a", "b"])
    expect(md.locator("td")).to_have_text(["x|y", "2"])
    expect(md.locator("td.end strong")).to_have_text("2")
    expect(md.locator("a")).to_have_text(["the docs", "https://example.org/x", "pic"])
    assert md.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert md.locator("img").count() == 0, "nothing is loaded"
    expect(md.locator("math")).to_have_count(2)
    expect(md.locator("math mfrac msqrt")).to_have_count(1)
    expect(md).to_contain_text("It costs $5 and $6")
    expect(md.locator("del")).to_have_text("gone")
    expect(md.locator(".tok-keyword")).to_have_text(["def", "return"])
    expect(md.locator(".tok-comment")).to_have_text("# comment")
    expect(md.locator(".tok-string")).to_have_text('"text"')
    arabic = md.locator("p").last
    assert arabic.evaluate("e => [e.dir, getComputedStyle(e).direction].join()") == "auto,rtl"
    md.locator("a").first.click()
    dialog = page.locator("#leave")
    expect(dialog).to_contain_text("https://example.com/a?b=1")
    dialog.get_by_text("Stay").click()
    expect(dialog).to_be_hidden()
    assert len(page.context.pages) == 1
