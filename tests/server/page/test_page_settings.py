"""What a user chooses on the page: the model or an adapter, presets of sampling, system prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_files import write_lora
from playwright.sync_api import expect
from running import Running

from kvilt.executor.protocol import Executor

pytestmark = pytest.mark.needs("chromium")

Start = Callable[..., Any]
Visiting = Callable[..., Any]


def body_of(page: Any, act: Callable[[], None]) -> dict[str, Any]:
    with page.expect_request("**/v1/chat/completions") as asked:
        act()
    return dict(asked.value.post_data_json)


@pytest.fixture
def adapted(start: Start, executor: Executor, tmp_path: Path) -> Iterator[Running]:
    write_lora(tmp_path / "french", 4, ("self_attn.q_proj", "mlp.up_proj"), 1)
    executor.load_lora(tmp_path / "french", "french")
    try:
        with start() as server:
            yield server
    finally:
        for info in executor.adapters.all():
            executor.unload_lora(info.id)


def test_an_adapter_is_chosen_and_its_kv_is_its_own(adapted: Running, visiting: Visiting) -> None:
    visit = visiting(adapted)
    visit.keep(maxTokens=4)
    page = visit.open().page
    choice = page.get_by_label("Model", exact=True).locator("visible=true").last
    expect(choice).to_have_value("tiny")
    visit.say("First")
    visit.idle()
    choice.select_option("french")
    expect(page).to_have_title("french · kvilt")
    body = body_of(page, lambda: visit.say("Second"))
    assert body["model"] == "french"
    assert "kv" not in body, "KV of the base model is not an adapter's"
    visit.idle()
    expect(page.locator(".trouble:visible")).to_have_count(0)
    body = body_of(page, page.get_by_label("Regenerate as a new branch").last.click)
    assert (body["model"], "kv" in body) == ("french", True)
    visit.idle()
    page.reload()
    expect(choice).to_have_value("french")
    choice.select_option("tiny")
    body = body_of(page, page.get_by_label("Regenerate as a new branch").last.click)
    assert body["model"] == "tiny"
    visit.idle()
    expect(page.locator(".trouble:visible")).to_have_count(0)
    files = page.get_by_label("Documents", exact=True).first
    choice.select_option("french")
    with page.expect_request("**/v1/kv/chunks") as warmed:
        files.set_input_files([{"name": "a.txt", "mimeType": "text/plain", "buffer": b"The Elbe ends in the sea."}])
    assert warmed.value.post_data_json["model"] == "french"


def test_presets_are_chosen_kept_and_deleted(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    presets = page.get_by_label("Presets of sampling")

    def settings() -> None:
        page.get_by_role("button", name="Settings").click()

    def done() -> None:
        page.get_by_text("Done").click()

    settings()
    expect(presets.locator("option:checked")).to_have_text("As the model asks for")
    presets.select_option(label="Balanced")
    expect(page.locator("#temperature")).to_have_value("0.7")
    done()
    visit.script("1", "2", "3")
    body = body_of(page, lambda: visit.say("One"))
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)
    visit.idle()
    settings()
    page.get_by_text("More of sampling").click()
    page.locator("#topK").fill("7")
    page.locator("#topK").blur()
    expect(presets.locator("option:checked")).to_have_text("Your own")
    page.get_by_label("Keep as a preset").click()
    page.get_by_label("Name of the preset").fill("Mine")
    page.keyboard.press("Enter")
    expect(presets.locator("option:checked")).to_have_text("Mine")
    presets.select_option(label="Exact")
    done()
    body = body_of(page, lambda: visit.say("Two"))
    assert body["temperature"] == 0
    assert "top_k" not in body
    visit.idle()
    page.reload()
    settings()
    expect(presets.locator("option:checked")).to_have_text("Exact")
    expect(page.get_by_label("Delete the preset")).to_be_hidden()
    presets.select_option(label="Mine")
    done()
    body = body_of(page, lambda: visit.say("Three"))
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 7)
    visit.idle()
    settings()
    page.get_by_label("Delete the preset").click()
    expect(presets.locator("option", has_text="Mine")).to_have_count(0)


def test_system_prompts_are_a_library(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    page.get_by_role("button", name="Settings").click()
    for name, text in (("Brief", "You are brief."), ("Poet", "You write verse.")):
        page.fill("#system", text)
        page.get_by_label("Keep as a system prompt").click()
        page.get_by_label("Name of the system prompt").fill(name)
        page.get_by_label("Keep as a system prompt").click()
    prompts = page.get_by_label("System prompts")
    expect(prompts.locator("option:checked")).to_have_text("Poet")
    prompts.select_option(label="Brief")
    expect(page.locator("#system")).to_have_value("You are brief.")
    page.get_by_text("Done").click()
    visit.script("1")
    body = body_of(page, lambda: visit.say("One"))
    assert body["messages"][0] == {"role": "system", "content": "You are brief."}
    visit.idle()
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(prompts.locator("option")).to_have_text(["Your own", "None", "Brief", "Poet"])
    page.get_by_label("Delete the system prompt").click()
    expect(prompts.locator("option")).to_have_text(["Your own", "None", "Poet"])
    prompts.select_option(label="None")
    expect(page.locator("#system")).to_have_value("")
