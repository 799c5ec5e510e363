"""The architecture page names files, classes and functions; each of them is where the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| \d+ \| `([\w/]+\.py)` `([\w.]+)` \| (.*) \|$", PAGE, re.M)


def names(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {node.name, *(f"{node.name}.{one.name}" for one in inner)}
    return found


def test_every_step_of_a_table_is_read() -> None:
    assert len(STEPS) == sum(bool(re.match(r"\| \d+ \|", line)) for line in PAGE.splitlines()) == 27


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, name, _ in STEPS])
def test_a_step_is_where_the_page_says(path: str, name: str) -> None:
    assert name in names(ROOT / "kvilt" / path)


def test_other_names_exist_too() -> None:
    package = set().union(*(names(path) for path in (ROOT / "kvilt").rglob("*.py")))
    given = {one for one in re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", PAGE) if one not in {"POST"}}
    assert {one for one in given if one not in package} == set()


def test_the_packages_are_those_of_the_layers() -> None:
    drawn = PAGE.split("```")[1]
    packages = {path.name for path in (ROOT / "kvilt").iterdir() if (path / "__init__.py").exists()}
    assert {name for name in packages if not re.search(rf"^ [\w |]*\b{name}\b", drawn, re.M)} == set()
