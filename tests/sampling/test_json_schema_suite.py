"""The official suite of JSON Schema, all drafts: every schema is enforced or refused by name, and none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from absent import skip_without
from json_schema_suite import EARLIER, NEWEST, Absent, Verdict, cases, judge, summary, table

DOCS = Path(__file__).parents[2] / "docs" / "structured_output.md"
AGAIN = "run python tests/json_schema_suite.py and put its tables there"


@pytest.fixture(scope="module", params=[NEWEST, *EARLIER])
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def verdicts(draft: str) -> list[Verdict]:
    try:
        return [judge(case) for case in cases(draft)]
    except Absent:
        skip_without("json schema suite")


def test_no_schema_of_the_suite_is_enforced_wrongly(verdicts: list[Verdict]) -> None:
    wrong = [(verdict.case.file, verdict.case.description, verdict.wrong) for verdict in verdicts if verdict.wrong]
    assert wrong == []


def test_what_is_enforced_and_what_is_refused_stands_in_the_docs(draft: str, verdicts: list[Verdict]) -> None:
    page = DOCS.read_text()
    assert summary(draft, verdicts) in page, AGAIN
    assert draft != NEWEST or table(verdicts) in page, AGAIN


def test_valid_values_that_are_never_written_are_the_documented_ones(draft: str, verdicts: list[Verdict]) -> None:
    files = [verdict.case.file for verdict in verdicts for _ in verdict.by_policy]
    assert set(files) <= {"format", "optional/ecmascript-regex"}
    assert draft != NEWEST or len(files) == 15
