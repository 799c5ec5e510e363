"""Which tests of a run show what about model families: `shows(column, row, detail)` in a test, collected as JSON.

`python -m tests.models.table` makes the table of docs/models.md of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import pytest

PROPERTY = "shows"


class Shows(Protocol):
    """That this test shows something: a column and a row of the table, and with what."""

    def __call__(self, column: str, row: str, detail: str = "") -> None: ...


class ModelResults:
    """A pytest plugin: column, row and detail of every test that shows something, and whether all of them passed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[tuple[str, str, str], bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        for name, value in report.user_properties:
            if name == PROPERTY:
                column, row, detail = str(value).split("\t")
                key = (column, row, detail)
                self._passed[key] = self._passed.get(key, True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # the process that started the workers has all reports
        found: dict[str, dict[str, dict[str, bool]]] = {}
        for (column, row, detail), passed in sorted(self._passed.items()):
            found.setdefault(column, {}).setdefault(row, {})[detail] = passed
        self._path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
