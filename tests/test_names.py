"""One name, one class: no public class name stands for two classes of the package. Old names still lead to the new."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

from kvilt.kv.identity import Identity
from kvilt.store.address import Kind
from kvilt.store.store import Store

PACKAGE = Path(__file__).parent.parent / "kvilt"
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
