"""Documents on the page: chips, blended answers, the recipe, and the check against a whole prefill."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from pdf_file import one_page
from playwright.sync_api import expect
from running import Running

pytestmark = pytest.mark.needs("chromium")

Visiting = Callable[..., Any]
RIVER = "The Elbe rises in the mountains and ends in the sea. " * 3
PAGE = "<html><style>b{}</style><body><h1>Rhine</h1><p>Flows &amp; ends.<script>alert(1)</script></p></body></html>"


def given(name: str, text: str, kind: str = "text/plain") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": text.encode()}


def test_documents_are_blended_and_an_answer_is_checked(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.keep(maxTokens=8)
    page = visit.open().page
    files = page.get_by_label("Documents", exact=True).first
    files.set_input_files([given("elbe.txt", RIVER), given("rhine.html", PAGE, "text/html")])
    chips = page.locator(".chip")
    expect(chips).to_have_count(2)
    expect(chips.first).to_contain_text(re.compile(r"\d+ tokens, (was )?warm"))
    expect(chips.last).to_contain_text(re.compile(r"\d+ tokens, (was )?warm"))
    page.get_by_label("Share of the documents that is computed again").fill("30")
    page.get_by_label("Which tokens are computed again").select_option("head")
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.say("Where does it end?")
    body = asked.value.post_data_json
    assert [one["title"] for one in body["documents"]] == ["elbe.txt", "rhine.html"]
    assert body["documents"][1]["text"] == "Rhine\nFlows & ends.", "scripts and styles are no text"
    assert body["blend"] == {"ratio": 0.3, "strategy": "head"}
    visit.idle()
    expect(page.locator(".facts")).to_contain_text(re.compile(r"\d+ of \d+ tokens of documents reused"))
    page.get_by_text("Which tokens of the documents were computed again").click()
    shown = page.locator(".blend-map section")
    expect(shown).to_have_count(2)
    expect(shown.first).to_contain_text(re.compile(r"elbe.txt \d+ of \d+ tokens computed again"))
    # By `head` the first tokens of each document are computed again: one piece of either kind, and all of its text.
    expect(shown.first.locator("mark")).to_have_count(1)
    pieces = shown.first.locator(".cell").all_inner_texts()
    assert len(pieces) == 2
    assert pieces[0].startswith("elbe.txt\nThe Elbe rises"), "a document begins with its title"
    assert "".join(shown.first.locator(".cells").all_text_contents()) == f"elbe.txt\n{RIVER.strip()}"
    page.get_by_label("KV inspector", exact=True).first.click()
    prompt = page.locator("#inspector .blend-map")
    expect(prompt.locator("section")).to_have_count(2)  # the last prompt has its documents
    expect(page.locator("#inspector")).to_contain_text(re.compile(r"Last prompt[1-9]\d* reused[1-9]\d* computed"))
    page.get_by_label("Close the inspector").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_label("Check this answer").click()
    again = asked.value.post_data_json
    assert (again["blend"]["ratio"], again["seed"]) == (1, body["seed"])
    visit.idle()
    note = page.locator(".check-note")
    expect(note).to_contain_text("Computed as a whole: first token after")
    expect(note).to_contain_text(re.compile(r"KL of the first token \d+\.\d{3}"))
    expect(note).to_contain_text(re.compile("the same text|the texts part after"))
    page.reload()
    expect(chips).to_have_count(2)
    expect(note).to_be_visible()
    page.get_by_label("Remove elbe.txt").click()
    expect(chips).to_have_count(1)


def test_files_that_are_no_text_are_refused(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    files = page.get_by_label("Documents", exact=True).first
    for name, text, says in (
        ("a.pdf", "%PDF-1.7", "cannot be read"),
        ("b.txt", "  ", "empty"),
        ("c.bin", "a\0", "no text"),
    ):
        files.set_input_files([given(name, text)])
        expect(page.locator("#notice")).to_contain_text(says)
    expect(page.locator(".chip")).to_have_count(0)


def test_a_pdf_is_a_document(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    visit.script("7")
    page = visit.open().page
    file = {"name": "elbe.pdf", "mimeType": "application/pdf", "buffer": one_page("The Elbe ends in the sea.")}
    page.get_by_label("Documents", exact=True).first.set_input_files([file])
    expect(page.locator(".chip")).to_contain_text(re.compile(r"\d+ tokens, (was )?warm"))
    with page.expect_request("**/v1/chat/completions") as asked:
        visit.say("Where does it end?")
    assert asked.value.post_data_json["documents"] == [{"title": "elbe.pdf", "text": "The Elbe ends in the sea."}]
    visit.idle()


def test_a_dropped_file_is_a_document(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    page.evaluate(
        """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], 'dropped.md', { type: 'text/markdown' }));
            document.querySelector('.chat').dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true }));
        }""",
        RIVER,
    )
    expect(page.locator(".chip")).to_contain_text("dropped.md")
    expect(page.locator(".chip")).to_contain_text("warm")
