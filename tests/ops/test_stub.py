"""The stub of the native module says what the module has: names, members of enums, numbers of arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import _kvilt_native
import pytest

STUB = Path(__file__).parents[2] / "csrc" / "_kvilt_native.pyi"
TREE = ast.parse(STUB.read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
ENUMS = [name for name, node in CLASSES.items() if any(isinstance(b, ast.Name) and b.id == "Enum" for b in node.bases)]


def public(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def arguments(function: Any) -> int:
    """How many a bound function takes, by the signature that nanobind keeps; `self` is not one of them."""
    (signature, *_), *others = function.__nb_signature__
    assert not others, "one signature for each function"
    return len(set(re.findall(r"\barg\d*\b", signature)))


def members(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def test_the_module_has_the_names_of_its_stub() -> None:
    constants = {node.target.id for node in TREE.body if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")}
    assert public(_kvilt_native) == set(CLASSES) | set(FUNCTIONS) | constants


@pytest.mark.parametrize("name", ENUMS)
def test_an_enum_has_the_members_of_its_stub(name: str) -> None:
    stated = {}
    for node in CLASSES[name].body:
        assert isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        stated[node.targets[0].id] = ast.literal_eval(node.value)
    assert {one.name: one.value for one in getattr(_kvilt_native, name)} == stated


@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(ENUMS)))
def test_a_class_has_the_methods_of_its_stub(name: str) -> None:
    bound, stated = getattr(_kvilt_native, name), members(CLASSES[name])
    assert public(bound) == {one for one in stated if one != "__init__"}
    for method, node in stated.items():
        if not node.decorator_list:
            assert arguments(getattr(bound, method)) == len(node.args.posonlyargs or node.args.args) - 1, method


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_the_arguments_of_its_stub(name: str) -> None:
    assert arguments(getattr(_kvilt_native, name)) == len(FUNCTIONS[name].args.posonlyargs)
