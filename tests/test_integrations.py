"""The examples of integrations are short, listed on their page, and have pinned packages; CI runs them itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
EXAMPLES = sorted((HERE / "examples" / "integrations").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_on_the_page(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40
    assert f"`{example.name}`" in (HERE / "docs" / "integrations.md").read_text(encoding="utf-8")


def test_the_page_lists_no_example_that_is_not_there() -> None:
    page = (HERE / "docs" / "integrations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+\.py)` \|", page)) == {path.name for path in EXAMPLES}


def test_packages_are_pinned() -> None:
    lines = (HERE / "examples" / "integrations" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(EXAMPLES)
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", line) for line in lines)


def test_settings_of_llm_are_those_of_the_example() -> None:
    page = (HERE / "docs" / "integrations.md").read_text(encoding="utf-8")
    program = (HERE / "examples" / "integrations" / "llm_command.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (written,) = re.findall(r'MODELS = """\\\n(.*?)"""', program, re.DOTALL)
    assert written.format(url="http://127.0.0.1:8000") == shown
