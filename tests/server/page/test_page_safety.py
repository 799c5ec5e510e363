"""What the page must withstand and how it must look: hostile text, keys, themes, a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from running import KEY, Running

pytestmark = pytest.mark.needs("chromium")

Start = Callable[..., Any]
Visiting = Callable[..., Any]
HOSTILE = (
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [go](javascript:alert(3)) **<b onclick=alert(4)>** "
    "<svg/onload=alert(5)> `<iframe srcdoc='<script>alert(6)</script>'>`\n\n- <style>*{display:none}</style>\n\n"
    "```html\n</code></pre><script>alert(7)</script>\n```\n\n# <a href=javascript:alert(8)>x</a>"
)
NAME = "<img src=x onerror=alert(9)>"


def test_markup_from_models_and_names_stays_text(start: Start, visiting: Visiting) -> None:
    with start(names=(NAME, '"><script>alert(10)</script>')) as server:
        visit = visiting(server)
        visit.script(HOSTILE)
        page = visit.open().page
        before = page.locator("img, script, style, svg, iframe, a, b").count()
        expect(page.locator(".model option").first).to_have_text(NAME)
        expect(page).to_have_title(f"{NAME} · kvilt")
        page.get_by_label("KV inspector", exact=True).first.click()
        visit.say(HOSTILE)
        visit.idle()
        expect(page.locator(".cells")).to_contain_text("onerror=alert(1)")
        answer = page.locator(".assistant .body > .md").last
        for part in (
            "<img src=x onerror=alert(1)>",
            "</code></pre><script>alert(7)</script>",
            "[go](javascript:alert(3))",
        ):
            assert part in answer.inner_text()
        assert page.locator(".said").inner_text() == HOSTILE
        made = page.locator(".md img, .md script, .md style, .md iframe, .md a, .md b, .said *, .cells img")
        assert made.count() == 0
        # Icons of the new buttons aside, nothing of these kinds was added.
        assert page.locator("img, script, style, iframe, a, b").count() <= before
        attributes = page.evaluate(
            "[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()).filter((n) => /^on/.test(n))"
        )
        assert attributes == []


def test_the_browser_refuses_markup_too(server: Running, visiting: Visiting) -> None:
    visit = visiting(server)
    page = visit.open().page
    expect(page.locator(".model")).to_have_text("tiny")
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.createElement('iframe').srcdoc = '<b>x</b>'",
        "document.createElement('script').text = 'alert(1)'",
        "trustedTypes.createPolicy('mine', {createHTML: (x) => x})",
    ):
        refused = page.evaluate(f"(() => {{ try {{ {attempt}; return null }} catch (e) {{ return e.name }} }})()")
        assert refused == "TypeError", attempt
    assert all("Trusted" in wrong for wrong in visit.wrongs)
    visit.wrongs.clear()  # it said so each time
    policy = page.request.get(server.url).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(start: Start, visiting: Visiting) -> None:
    with start(api_keys=(KEY,)) as server:
        visit = visiting(server)
        visit.script("7", "7")
        page = visit.open().page
        dialog = page.locator("#key")
        expect(dialog).to_be_visible()
        page.get_by_text("Not now").click()
        expect(page.locator("#notice")).to_contain_text("Enter a key")
        page.locator("#notice").get_by_role("button").click()
        page.get_by_label("API key").fill("sk-wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("this key is not known")
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator(".model")).to_have_text("tiny")
        expect(page.locator("#notice")).to_be_hidden()
        visit.say("Hello")
        visit.answered("7")
        page.reload()
        expect(page.locator(".model")).to_have_text("tiny")
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        assert KEY in page.evaluate("sessionStorage.getItem('kvilt.key')")
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.locator("#key")).to_be_visible()
        other.close()
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("Forget the key").click()
        page.keyboard.press("Escape")
        assert page.evaluate("sessionStorage.getItem('kvilt.key')") is None
        visit.say("Hello?")
        expect(dialog).to_be_visible()


MARKDOWN = [
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    (
        "**b** *i* `c*d` __b__ _i_ 2*3*4 a_b_c",
        "<p><strong>b</strong> <em>i</em> <code>c*d</code> <strong>b</strong> <em>i</em> 2<em>3</em>4 a_b_c</p>",
    ),
    ("- a\n- b\n  - c\n\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("# H\ntext", "<h3>H</h3><p>text</p>"),
    ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
    ("---", "<hr>"),
    ("**open", "<p>**open</p>"),
    ("* not *", "<ul><li>not *</li></ul>"),
    (r"\*a\*", "<p>*a*</p>"),
    ("a & <b>", "<p>a &amp; &lt;b&gt;</p>"),
]


def test_markdown(server: Running, visiting: Visiting) -> None:
    page = visiting(server).open().page
    parsed = """async (texts) => {
        const { update } = await import(`${location.origin}/js/markdown.js`);
        return texts.map((text) => { const d = document.createElement('div'); update(d, text); return d.innerHTML; });
    }"""
    made = page.evaluate(parsed, [text for text, _ in MARKDOWN])
    assert made == [wanted for _, wanted in MARKDOWN]
    (code,) = page.evaluate(parsed, ["```py\na < b\n```"])
    assert '<pre tabindex="0" aria-label="Code, py"><code>a &lt; b</code></pre>' in code
    # Nothing takes long or fails, however odd; and growing text ends as if it had come at once.
    odd = [
        "*a " * 5000,
        "`" * 9001,
        "_*" * 4000,
        "> " * 3000,
        "- " * 3000,
        "  " * 500 + "- x",
        "```\n" * 999,
        "\u2028- x",
    ]
    assert all(page.evaluate(parsed, odd))
    grown = """async (text) => {
        const { update } = await import(`${location.origin}/js/markdown.js`);
        const [slow, once] = [document.createElement('div'), document.createElement('div')];
        for (let n = 1; n <= text.length; n += 1) update(slow, text.slice(0, n));
        update(once, text);
        return [slow.innerHTML, once.innerHTML];
    }"""
    slow, once = page.evaluate(grown, "\n\n".join(text for text, _ in MARKDOWN) + "\n```\ncode\n```\nend")
    assert slow == once


CONTRAST = """() => {
    const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgb = (colour) => { probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
        return [...probe.getImageData(0, 0, 1, 1).data]; };
    const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
        if (c[3] === 255) return c; } return [255, 255, 255, 255]; };
    const found = {};
    for (const e of document.querySelectorAll('body *')) {
        const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!text || !e.checkVisibility() || e.closest('.unseen, .skip, :disabled')) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
        found[`${e.tagName}.${e.className}`] = (a + 0.05) / (b + 0.05);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_follow_the_system_and_the_button(server: Running, visiting: Visiting, scheme: Any) -> None:
    visit = visiting(server, color_scheme=scheme, reduced_motion="reduce")
    visit.script("# T\n\n> q\n\n- `code`\n\n```py\nx\n```", "7")
    page = visit.open().page
    visit.say("Hello")
    visit.idle()
    page.get_by_label("Regenerate as a new branch").click()
    visit.answered("7")
    page.get_by_label("Previous branch").click()
    page.get_by_label("KV inspector", exact=True).first.click()
    expect(page.locator(".handle").first).to_be_visible()
    other = {"light": "dark", "dark": "light"}[scheme]
    for shown in (scheme, other):
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")) > 384
        assert bright == (shown == "light")
        weak = {name: ratio for name, ratio in page.evaluate(CONTRAST).items() if ratio < 4.5}
        assert weak == {}, "text that is hard to read"
        if shown == scheme:
            page.get_by_label(f"{other.capitalize()} theme").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == other


def test_on_a_phone(server: Running, visiting: Visiting) -> None:
    visit = visiting(server, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    visit.script("w" * 60 + "\n\n```py\n" + "x = 1; " * 20 + "\n```", "7")
    page = visit.open().page

    def fits() -> bool:
        return bool(page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"))

    assert fits()
    visit.say("v" * 200)
    visit.idle()
    page.get_by_label("Regenerate as a new branch").tap()
    visit.answered("7")
    page.get_by_label("Previous branch").tap()
    expect(page.locator(".code")).to_be_visible()
    assert fits()
    boxes = [one.bounding_box() for one in page.locator("button:visible").all()]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in boxes)
    assert all(min(box["width"], box["height"]) >= 28 for box in boxes), "large enough for a thumb"
    page.get_by_label("KV inspector", exact=True).first.tap()
    expect(page.locator(".handle").first).to_be_visible()
    assert page.locator("#inspector").bounding_box()["width"] == 360
    assert fits()
    page.get_by_label("Close the inspector").tap()
    expect(page.locator("#prompt")).to_be_in_viewport()
