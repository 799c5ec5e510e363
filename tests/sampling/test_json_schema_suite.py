"""The official suite of JSON Schema (draft 2020-12): every schema is enforced or refused by name, and none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from absent import skip_without
from json_schema_suite import Absent, Verdict, cases, judge, table

DOCS = Path(__file__).parents[2] / "docs" / "structured_output.md"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    try:
        return [judge(case) for case in cases()]
    except Absent:
        skip_without("json schema suite")


def test_no_schema_of_the_suite_is_enforced_wrongly(verdicts: list[Verdict]) -> None:
    wrong = [(verdict.case.file, verdict.case.description, verdict.wrong) for verdict in verdicts if verdict.wrong]
    assert wrong == []


def test_what_is_enforced_and_what_is_refused_stands_in_the_docs(verdicts: list[Verdict]) -> None:
    assert table(verdicts) in DOCS.read_text(), "run python tests/json_schema_suite.py and put its table there"


def test_valid_values_that_are_never_written_are_the_documented_ones(verdicts: list[Verdict]) -> None:
    files = [verdict.case.file for verdict in verdicts for _ in verdict.by_policy]
    assert sorted(set(files)) == ["format", "optional/ecmascript-regex"]
    assert len(files) == 15
