"""Lines of a text that look as if they change from request to request: dates, times, ids and headers of clients.

A line that changes near the beginning of a prompt makes all KV behind it useless. Refuses to know prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LINES = 4096  # of a text that are looked at
_MAX_CHARS = 2048  # of a line

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_KINDS = {
    "header": re.compile(r"^\s*x-[a-z0-9-]*(?:billing|request|trace|session)[a-z0-9-]*\s*:", re.I),
    "date": re.compile(rf"\b\d{{4}}-\d{{2}}-\d{{2}}\b|\b\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}\b|"
                       rf"\b{_MONTH}\s+\d{{1,2}}\b|\b\d{{1,2}}\.?\s+{_MONTH}(?=\W|$)|"
                       r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b", re.I),
    "time": re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?\b"),
    "id": re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|"
                     r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{16,}\b|\b\d{10}(?:\d{3})?\b", re.I),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VolatileLine:
    """A line that looks volatile, and why."""

    number: int  # from 0 on
    text: str
    kind: str


def volatile_lines(text: str) -> list[VolatileLine]:
    """The lines of a text that look volatile."""
    found = []
    for number, line in enumerate(text.split("\n", MAX_LINES)[:MAX_LINES]):
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(line[:_MAX_CHARS])), None)
        if kind is not None:
            found.append(VolatileLine(number, line, kind))
    return found
