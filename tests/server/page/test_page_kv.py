"""The inspector on the page: whose KV there is, who shares it, what a prompt took, and the verbs as buttons."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from running import Running

from kvilt.executor.protocol import Executor

pytestmark = pytest.mark.needs("chromium")

Start = Callable[..., Any]
Visiting = Callable[..., Any]
QUESTION = "Please tell me a number, any number that you like, as long as it is one that you really like."


@pytest.fixture
def fresh(start: Start, executor: Executor) -> Any:
    executor.prefixes.clear()
    with start() as server:
        yield server


def handles(server: Running) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in server.http().get("/v1/kv").json()["data"]}


def test_handles_hang_below_the_prefix_that_they_share(fresh: Running) -> None:
    http = fresh.http()
    made = http.post("/v1/kv", json={"prompt": QUESTION * 8}).json()
    twin = http.post(f"/v1/kv/{made['id']}/fork", json={}).json()
    short = http.post("/v1/kv", json={"prompt": "Hi"}).json()
    state = http.get("/v1/kv/state").json()
    size = state["pages"]["page_tokens"]
    prefixes = {one["id"]: one for one in state["prefixes"]}
    leaf = {one["id"]: one["prefix"] for one in state["handles"]}
    assert leaf[made["id"]] == leaf[twin["id"]]
    assert prefixes[leaf[made["id"]]]["tokens"] == made["tokens"] // size * size
    assert leaf[short["id"]] is None, "less than a page is in no index"
    other = http.post("/v1/kv", json={"prompt": QUESTION * 3 + "But no other, thank you, never. " * 4}).json()
    state = http.get("/v1/kv/state").json()
    prefixes = {one["id"]: one for one in state["prefixes"]}
    leaf = {one["id"]: one["prefix"] for one in state["handles"]}
    assert leaf[other["id"]] != leaf[made["id"]]
    assert prefixes[leaf[other["id"]]]["parent"] == prefixes[leaf[made["id"]]]["parent"] is not None


def test_the_strip_and_the_tree(fresh: Running, visiting: Visiting) -> None:
    visit = visiting(fresh)
    visit.script("12", "34", "ü")
    page = visit.open().page
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator("#inspector")).to_contain_text("Nothing is held for this key.")
    visit.say(QUESTION)
    visit.answered("12")
    expect(page.locator(".cell.reused")).to_have_count(0)
    expect(page.locator(".cell.computed")).not_to_have_count(0)  # the page draws when it has the state
    total = page.locator(".cell.computed").count()
    assert f"0 of {total} tokens reused" in visit.facts()
    page.get_by_label("Regenerate as a new branch").click()
    visit.answered("34")
    expect(page.locator(".cell.reused")).to_have_count(total - 1)
    expect(page.locator(".cell.computed")).to_have_count(1)
    expect(page.locator(".cells")).to_contain_text("that you really like.")
    for name in ("answer 1.1", "answer 1.2", "question 1"):
        expect(page.locator(".handle", has_text=name)).to_have_count(1)
    # All three hang below one prefix, and it says so.
    expect(page.locator(".prefix").first).to_contain_text("shared by 3")
    expect(page.locator(".forest > li").first.locator("> .handle")).to_have_count(3)
    expect(page.locator(".prefix").first).to_contain_text(re.compile("Please tell me a number"))
    visit.say("Grüße")
    visit.answered("ü")
    expect(page.locator(".cells")).to_contain_text("Grüße")
    page.keyboard.press("Tab")
    page.get_by_label("Close the inspector").click()
    expect(page.locator("#inspector")).to_be_hidden()
    expect(page.locator("#inspect")).to_be_focused()


def test_the_verbs_are_buttons(fresh: Running, visiting: Visiting) -> None:
    visit = visiting(fresh)
    visit.script("12", "34")
    page = visit.open().page
    visit.say(QUESTION)
    visit.answered("12")
    (only,) = handles(fresh)
    page.get_by_label("KV inspector", exact=True).first.click()
    page.get_by_label(f"Fork {only[:8]}").click()
    expect(page.locator(".handle")).to_have_count(2)
    (twin,) = set(handles(fresh)) - {only}
    page.get_by_label(f"Truncate {twin[:8]}").click()
    page.get_by_label("Tokens to keep").fill("5")
    page.get_by_text("Cut", exact=True).click()
    expect(page.locator(f"[data-handle='{twin}']")).to_contain_text("5 tokens")
    assert handles(fresh)[twin]["tokens"] == 5
    page.get_by_label(f"Pin {twin[:8]} for an hour").click()
    expect(page.locator(f"[data-handle='{twin}']")).to_contain_text("pinned")
    for one in (twin, only):
        page.get_by_label(f"Delete {one[:8]}").click()
        expect(page.locator(f"[data-handle='{one}']")).to_have_count(0)
    assert handles(fresh) == {}
    visit.say("Go on")
    visit.answered("34")
    expect(page.locator(".handle")).to_have_count(1)
    unanswered: list[Any] = []
    page.route("**/v1/kv/state", lambda route: unanswered.append(route))  # from here on the page shows what it has
    page.get_by_label("Close the inspector").click()  # the stream that is open already goes on until then
    page.get_by_label("KV inspector", exact=True).first.click()
    while not unanswered:
        page.wait_for_timeout(50)
    fresh.http().delete(f"/v1/kv/{next(iter(handles(fresh)))}")
    page.locator(".handle").get_by_label(re.compile("^Pin")).click()
    expect(page.locator("#inspector [role=alert]")).to_contain_text("handle")


def test_the_pool_is_a_map_and_the_prefixes_are_drawn(fresh: Running, visiting: Visiting) -> None:
    visit = visiting(fresh)
    visit.script("12", "34")
    page = visit.open().page
    page.get_by_label("KV inspector", exact=True).first.click()
    visit.say(QUESTION)
    visit.answered("12")
    state = fresh.http().get("/v1/kv/state").json()
    cells = page.locator(".pool-map i")
    expect(page.locator(".pool-map [class^=hue]").first).to_have_attribute("title", re.compile("tokens 0–"))
    assert 0 < cells.count() <= 620
    assert state["pages"]["used"] > 0
    expect(page.locator(".pool-map")).to_have_attribute("aria-label", re.compile(r"Map of [\d,]+ pages"))
    expect(page.locator(".drawing .node-box")).not_to_have_count(0)
    box = page.locator(".drawing .node-box").first
    assert "32 tokens: " in (box.get_attribute("title") or "")


def test_handles_are_saved_restored_and_changed(
    start: Start, executor: Executor, visiting: Visiting, tmp_path: Any
) -> None:
    executor.prefixes.clear()
    with start(kv_dir=tmp_path) as server:
        visit = visiting(server)
        visit.script("12")
        page = visit.open().page
        visit.say(QUESTION)
        visit.answered("12")
        (only,) = handles(server)
        page.get_by_label("KV inspector", exact=True).first.click()
        page.get_by_label(f"Save {only[:8]}").click()
        page.get_by_label("Name of the file").fill("mine")
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_label("Restore mine").click()
        expect(page.locator("[data-handle]")).to_have_count(2)
        page.get_by_label(f"Replace tokens of {only[:8]}").click()
        page.get_by_label("First token").fill("2")
        page.get_by_label("Token behind the last").fill("4")
        page.get_by_role("button", name="Replace", exact=True).click()
        expect(page.locator("[data-handle]")).to_have_count(3)
        tokens = handles(server)[only]["tokens"]
        expect(page.locator("[data-handle]", has_text=f"{tokens - 2} tokens")).to_have_count(1)
        page.get_by_label("Delete mine").click()
        expect(page.get_by_label("Restore mine")).to_have_count(0)


def test_what_quality_checks_found_is_shown(fresh: Running, visiting: Visiting) -> None:
    visit = visiting(fresh)
    page = visit.open().page
    found = {"strategy": "query", "ratio": 0.15, "falls_back": False, "count": 9, "mean_kl": 0.073, "agreement": 0.89}
    page.route("**/v1/kv/certificates", lambda route: route.fulfill(json={"object": "list", "data": [found]}))
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator("#inspector")).to_contain_text("query 15 %")
    expect(page.locator("#inspector")).to_contain_text("mean KL 0.073, first token agrees in 89 %")


def test_steps_and_tiers_of_the_store(fresh: Running, visiting: Visiting) -> None:
    http = fresh.http()
    state = http.get("/v1/kv/state").json()
    tiers = [
        {"tier": "memory", "records": 3, "bytes": 2048, "hits": 6, "up": 1},
        {"tier": "disk", "records": 9, "bytes": 4096, "hits": 2, "up": 0, "refused": 5, "dropped": 1}
        | {"last_failure": {"message": "disk_full: the disk tier cannot go on", "at_s": 1.0}},
    ]
    counts = {"steps": 4, "rows": 6, "computed_tokens": 30, "generated_tokens": 10, "lookups": 8}
    counts |= {"drafted_tokens": 8, "accepted_tokens": 5}
    seen = [{**state, "totals": {"tiers": tiers, **dict.fromkeys(counts, 0)}}]
    seen += [{**state, "totals": {"tiers": tiers, **counts}}]
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in seen)

    def answer(route: Any) -> None:
        if "event-stream" in route.request.headers.get("accept", ""):
            route.fulfill(body=body, content_type="text/event-stream")
        else:
            route.continue_()

    page = visiting(fresh).open().page
    page.route("**/v1/kv/state", answer)
    page.get_by_label("KV inspector", exact=True).first.click()
    panel = page.locator("#inspector")
    expect(panel).to_contain_text("4 steps of 6 rows, 5 of 8 drafts accepted")
    said = page.locator(".second").first.get_attribute("title")
    assert said == "4 steps of 6 rows: 20 tokens of prompts, 10 of answers, 5 of 8 drafts accepted"
    expect(panel).to_contain_text("6 hits, 75 % of lookups")
    expect(panel).to_contain_text("5 not used, 1 not written")
    expect(panel.locator(".last-failure")).to_contain_text("disk_full: the disk tier cannot go on")
    expect(panel).to_contain_text("left alone after errors")


def test_the_inspector_is_live_over_one_stream(fresh: Running, visiting: Visiting) -> None:
    visit = visiting(fresh)
    visit.script("12")
    page = visit.open().page
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request))
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator(".timeline")).to_be_attached()
    visit.say(QUESTION)
    visit.answered("12")
    expect(page.locator(".timeline")).to_have_attribute("aria-label", re.compile(r"[1-9]\d* tokens of prompts"))
    made = fresh.http().post("/v1/kv", json={"prompt": QUESTION * 4}).json()
    # Another client made it; it is seen without a question.
    expect(page.locator(f"[data-handle='{made['id']}']")).to_be_visible()
    accepted = [one.headers.get("accept", "") for one in asked if one.url.endswith("/v1/kv/state")]
    assert accepted.count("text/event-stream") == 1
    page.get_by_label("Close the inspector").click()
