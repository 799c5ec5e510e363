"""One name, one class: no public class name stands for two classes of the package.

The glossary names only what the package has. Old names still lead to the new.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

from kvilt.kv.identity import Identity
from kvilt.store.address import Kind
from kvilt.store.store import Store

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvilt"
GLOSSARY = ROOT / "docs" / "glossary.md"
RENAMED = [
    ("kvilt.sampling.grammar", "Limits", "GrammarLimits"),
    ("kvilt.store.store", "Limits", "StoreLimits"),
]


def classes() -> dict[str, list[str]]:
    """Public classes by name, with the modules that define them, also inside of functions and classes."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_no_public_class_name_is_used_twice() -> None:
    twice = {name: places for name, places in classes().items() if len(places) > 1}
    assert twice == {}


def defined_names() -> set[str]:
    """Names of classes, functions, fields and parameters, and the words that the package writes as string literals."""
    found: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name):
                    found.add(name)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    found.add(text)
    return found


def glossary_rows() -> list[list[str]]:
    """The cells of every table row of the glossary; heads of tables are left out."""
    lines = [line.strip("| ").split(" | ") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [cells for cells in lines if cells[0] != "kvilt"]


def test_the_glossary_names_only_what_exists() -> None:
    cells = [cell for row in glossary_rows() for cell in row[:2]]
    named = {part for cell in cells for name in re.findall(r"`([^`]+)`", cell) for part in name.split(".")}
    assert len(named) > 60
    assert named - defined_names() == set()
    assert {name for name in named if name[0].isupper()} - classes().keys() == set()


def test_the_glossary_explains_each_word_once_and_in_one_line() -> None:
    rows = glossary_rows()
    words = [row[0].split(",")[0].split(" (")[0] for row in rows]
    assert len(words) == len(set(words))
    assert [row for row in rows if len(row) != 5 or not all(row)] == []


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_leads_to_the_new_one_with_a_warning(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = found.NoSuchName


def test_old_methods_of_a_store_lead_to_the_new_ones_with_a_warning() -> None:
    with Store() as store:
        with pytest.warns(DeprecationWarning, match="count_leading"):
            assert store.reach([]) == 0
        with pytest.warns(DeprecationWarning, match="stored_tokens"):
            assert list(store.stored(Kind.CHUNK, Identity("model", "numerics"))) == []
