"""Screenshots of the page for the docs, from a running server with the default model: python bench/page_screenshots.py

Three sizes, light and dark. Needs playwright and the program chromium; the default model answers.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZES = {"": (1280, 800), "-tablet": (820, 1100), "-phone": (390, 844)}
QUESTIONS = ("What is the capital of Germany?", "Which river flows through it?")
SETTINGS = '{"temperature": 0, "maxTokens": 64, "system": "", "probabilities": true}'


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "kvilt", "serve", "--port", str(port), "--log-level", "error"])
    url = f"http://127.0.0.1:{port}/"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()  # the first request of a process is slow
        urllib.request.urlopen(
            urllib.request.Request(f"{url}v1/completions", body, {"content-type": "application/json"})
        )
        yield url
    finally:
        process.terminate()
        process.wait()


def say(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send[aria-label=Send]")


def picture(browser: Any, url: str, name: str, scheme: str) -> None:
    """A conversation with a branch, and the inspector where there is room."""
    width, height = SIZES[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.add_init_script(f"localStorage.setItem('kvilt.settings', {SETTINGS!r})")
    page.goto(url)
    if name != "-phone":
        page.get_by_label("KV inspector", exact=True).first.click()
    for question in QUESTIONS:
        say(page, question)
    page.get_by_label("Regenerate as a new branch").last.click()
    page.wait_for_selector("#send[aria-label=Send]")
    if name != "-phone":
        expect(page.locator(".handle").first).to_be_visible(timeout=120_000)
        page.wait_for_timeout(3000)  # for the timeline: it has a bar for each second
    page.screenshot(path=IMAGES / f"page{name}{'' if scheme == 'light' else '-dark'}.png")
    page.get_by_label("New chat").click()
    context.close()


def main() -> None:
    chromium = shutil.which("chromium")
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for name in SIZES:
            for scheme in ("light", "dark"):
                picture(browser, url, name, scheme)
        browser.close()


if __name__ == "__main__":
    main()
