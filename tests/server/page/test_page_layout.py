"""The page on a phone, a tablet and a desktop: nothing overlaps, regions stand where they should, colours are the same.

Machines have different fonts, so letters are not compared: text is made transparent, numbers that change are hidden,
and what is left (panels, boxes, colours) is compared with a reference in blocks of 10 pixels. Where the height of a
panel follows its text, only the boxes of regions are compared. To renew a reference in `layouts/`, delete it and run
the test twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from running import Running

pytestmark = pytest.mark.needs("chromium")

Visiting = Callable[..., Any]
LAYOUTS = Path(__file__).parent / "layouts"
SIZES = {"desktop": (1280, 800), "tablet": (820, 1100), "phone": (390, 840)}
BLOCK = 10  # pixels
LEVELS = 6  # of 255, by which a block may differ
SHARE = 0.1  # of the blocks may differ more: a pill is wider, a line of text breaks elsewhere
COMPARED = ("empty", "answer", "inspector")  # states whose height does not follow their text
LETTERS = """
*, *::placeholder { color: transparent !important; caret-color: transparent !important; }
*, *::before, *::after { animation: none !important; transition: none !important; }
svg, .facts, .starters, .inspector .part, .chat-title small, .gauge { visibility: hidden !important; }
"""
REGIONS = (".top", ".chat", ".composer", "#scroll", "#chats", "#inspector", "dialog[open]")
OVERLAPS = """() => {
    const shown = [...document.querySelectorAll('button, select, input, textarea')].filter((one) => {
        const box = one.getBoundingClientRect();
        const top = document.querySelector('dialog[open]');
        return box.width > 0 && box.height > 0 && one.checkVisibility() && (!top || top.contains(one));
    });
    const seen = shown.map((one) => [one, one.getBoundingClientRect()]).filter(([one, box]) => {
        const over = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return over && (one.contains(over) || over.contains(one));
    });
    const wrong = [];
    const named = (one) => one.id || one.ariaLabel || one.textContent;
    for (const [one, a] of seen) {
        if (a.left < -0.5 || a.right > innerWidth + 0.5) wrong.push(`${named(one)} leaves the window`);
        for (const [other, b] of seen) {
            const beside = a.right <= b.left + 1 || b.right <= a.left + 1;
            const apart = beside || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
            if (one !== other && !apart) wrong.push(`${named(one)} overlaps ${named(other)}`);
        }
    }
    if (document.scrollingElement.scrollWidth > innerWidth) wrong.push('the page is wider than the window');
    return wrong;
}"""


def boxes(page: Any) -> dict[str, list[int]]:
    """Where the regions are."""
    found = {name: page.locator(name) for name in REGIONS}
    shown = {name: one.bounding_box() for name, one in found.items() if one.count() and one.is_visible()}
    return {name: [round(box[side]) for side in ("x", "y", "width", "height")] for name, box in shown.items()}


def looks_like(page: Any, name: str) -> str:
    """What is wrong with the looks of a page, or nothing."""
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    seen = shot.resize((shot.width // BLOCK, shot.height // BLOCK), Image.Resampling.BOX)
    path = LAYOUTS / f"{name}.png"
    if not path.exists():
        LAYOUTS.mkdir(exist_ok=True)
        seen.save(path)
        return f"{path.name} was not there and is written; look at it, and run the test again"
    wanted = np.asarray(Image.open(path).convert("RGB"), dtype=np.int16)
    now = np.asarray(seen, dtype=np.int16)
    if now.shape != wanted.shape:
        return f"{name}: {now.shape} is not {wanted.shape}"
    share = float((np.abs(now - wanted).max(axis=2) > LEVELS).mean())
    return "" if share <= SHARE else f"{name}: {share:.1%} of the blocks differ"


@pytest.mark.parametrize("size", SIZES)
def test_the_layout(server: Running, visiting: Visiting, size: str) -> None:
    width, height = SIZES[size]
    regions: dict[str, dict[str, list[int]]] = {}
    wrong: dict[str, Any] = {}
    for scheme in ("light", "dark"):
        visit = visiting(
            server, viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = visit.open().page

        def look(state: str, page: Any = page, scheme: str = scheme) -> None:
            looks = looks_like(page, f"{size}-{state}-{scheme}") if state in COMPARED else ""
            wrong[f"{scheme} {state}"] = [*page.evaluate(OVERLAPS), looks]
            regions.setdefault(state, boxes(page))
            assert boxes(page) == regions[state], "both themes stand alike"

        page.evaluate(STYLE, LETTERS)
        expect(page.locator(".model")).to_have_text("tiny")
        look("empty")
        visit.script("12", "34")
        visit.say("Hello")
        visit.answered("12")
        page.get_by_label("Regenerate as a new branch").click()
        visit.answered("34")
        page.mouse.move(0, 0)
        look("answer")
        page.get_by_label("KV inspector", exact=True).first.click()
        expect(page.locator(".handle").first).to_be_attached()
        look("inspector")
        page.get_by_label("Close the inspector").click()
        page.get_by_label("Conversations", exact=True).first.click()
        expect(page.locator(".chat-title")).to_have_count(1)
        look("chats")
        page.get_by_label("Close the conversations").click()
        page.get_by_role("button", name="Settings").click()
        look("settings")
        page.keyboard.press("Escape")
    assert wrong == {state: [""] for state in wrong}
    check_regions(size, width, height, regions)


# The page refuses inline styles too; a constructed sheet is none.
STYLE = """(text) => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(text);
    document.adoptedStyleSheets = [sheet];
}"""


def check_regions(size: str, width: int, height: int, regions: dict[str, dict[str, list[int]]]) -> None:
    """The chat stays in sight beside a panel, except on a phone, where a panel covers it."""
    for state, found in regions.items():
        for name, (x, y, wide, high) in found.items():
            assert x >= 0 and y >= 0 and x + wide <= width and y + high <= height, (state, name)
    inspector, chats = regions["inspector"]["#inspector"], regions["chats"]["#chats"]
    composer = regions["inspector"][".composer"]
    if size == "desktop":
        assert composer[0] + composer[2] <= inspector[0], "beside"
        assert chats[0] + chats[2] <= regions["chats"][".composer"][0]
    elif size == "tablet":
        assert composer[1] + composer[3] <= inspector[1], "below"
        assert inspector[2] == width
    else:
        assert inspector[2] == chats[2] == width, "over it"
    assert regions["settings"]["dialog[open]"][2] <= width - 16
