"""The page in Debian's Chromium, against a real server over the tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from absent import skip_without
from playwright.sync_api import expect, sync_playwright

PATIENT_MS = 300_000  # machines that test may be slow, or stand still; nothing here depends on how fast they are


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for a module: while playwright runs, its thread can run no event loop of anybody else."""
    path = shutil.which("chromium")
    if path is None:
        skip_without("chromium")
    expect.set_options(timeout=PATIENT_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@dataclass
class Visit:
    """A tab, and everything that it did which a good page does not."""

    page: Any
    url: str
    wrongs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENT_MS)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.wrongs.append(f"error: {error}"))
        self.page.on("dialog", self._opened)
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        # Chromium reports every answer of 4xx and 5xx here; what the page makes of those is tested elsewhere.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.wrongs.append(f"console: {message.text}")

    def _opened(self, dialog: Any) -> None:
        self.wrongs.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.wrongs.append(f"asked {request.url}")

    # What people do.

    def open(self) -> Visit:
        self.page.goto(self.url)
        return self

    def say(self, text: str) -> None:
        """Send a message from the box."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answered(self, text: str) -> None:
        """Wait for a whole answer that says this."""
        expect(self.page.locator(".assistant .body > .md").last).to_have_text(text)
        self.idle()

    def idle(self) -> None:
        self.page.wait_for_selector("#send[aria-label=Send]")

    def script(self, *answers: str) -> None:
        """Make the model say these, one after the other: its grammar leaves it nothing else."""
        Script(list(answers)).install(self.page)

    def keep(self, **settings: Any) -> None:
        """Settings as if they had been made before."""
        made = json.dumps({"temperature": 0.7, "maxTokens": 512, "system": "", **settings})
        self.page.add_init_script(f"localStorage.setItem('kvilt.settings', {json.dumps(made)})")

    def facts(self) -> str:
        """The line under the last answer."""
        return str(self.page.locator(".message.assistant .facts").last.inner_text())


@dataclass
class Script:
    """Answers that are forced upon the model, request by request."""

    answers: list[str]
    last: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    def install(self, page: Any) -> None:
        page.unroute_all()
        page.route("**/v1/chat/completions", self.answer)

    def answer(self, route: Any) -> None:
        body = route.request.post_data_json
        # The page asks again without a handle that did not fit: that is the same question.
        again = "kv" in self.last and body.get("kv") != self.last["kv"] and body["messages"] == self.last["messages"]
        if not again:
            self.said = self.answers.pop(0)
        self.last = dict(body)
        body["response_format"] = {"type": "choice", "choice": [self.said]}
        route.continue_(post_data=json.dumps(body))


Visiting = Callable[..., Visit]


@pytest.fixture
def visiting(browser: Any) -> Iterator[Visiting]:
    """Tabs of browsers that know nothing yet; each must have done nothing wrong when the test ends."""
    contexts, visits = [], []

    def visit(server: Any, **options: Any) -> Visit:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        contexts.append(context)
        visits.append(one := Visit(context.new_page(), server.url))
        return one

    yield visit
    for context in contexts:
        context.close()
    assert [wrong for one in visits for wrong in one.wrongs] == []
