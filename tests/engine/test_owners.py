"""One owner writes: only the scheduler writes a sample, features write nothing that is not their own, and no object
sets a hook of another one: what an object calls arrives when it is made.

Proven on the syntax trees. The second half feeds the checker violations and sees each one noticed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from kvilt.engine.features.feature import Proposal
from kvilt.engine.scheduling.plan import BlendProgress, Sample
from kvilt.engine.sequence import Job, SequenceState

PACKAGE = Path(__file__).parents[2] / "kvilt"
SCHEDULER = {"scheduler.py", "schedule_state.py", "admission_policy.py"}
SETTERS = {"setattr", "delattr", "object.__setattr__", "object.__delattr__"}
PACKAGES = ("engine", "blend", "speculative", "llm")


def names(*types: Any) -> set[str]:
    return {field.name for one in types for field in fields(one)}


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes, one by one."""
    match node:
        case ast.Assign(targets=several) | ast.Delete(targets=several):
            open_ends = list(several)
        case ast.AugAssign(target=one) | ast.AnnAssign(target=one) | ast.For(target=one) | ast.NamedExpr(target=one):
            open_ends = [one]
        case ast.withitem(optional_vars=ast.expr() as one):
            open_ends = [one]
        case _:
            return
    while open_ends:
        match open_ends.pop():
            case ast.Tuple(elts=inner) | ast.List(elts=inner):
                open_ends += inner
            case ast.Starred(value=inner):
                open_ends.append(inner)
            case one:
                yield one


def writes(text: str, written: Callable[[str], bool], setters: bool = True) -> list[str]:
    """Places where a field of another object is written: by a statement, or by setattr under whatever name."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for target in targets(node):
            own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
            if isinstance(target, ast.Attribute) and written(target.attr) and not own:
                found.append(f"{target.lineno}: {ast.unparse(target)}")
        if not setters or not isinstance(node, ast.Call) or ast.unparse(node.func) not in SETTERS:
            continue
        if ast.unparse(node.args[0]) != "self":
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def is_hook(name: str) -> bool:
    return name.lstrip("_").startswith("on_") or "hook" in name or "callback" in name or name.endswith("_by")


def read(*folders: str) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))]
    return {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in paths}


def test_only_the_scheduler_writes_a_sample() -> None:
    sources = {name: text for name, text in read(*PACKAGES).items() if Path(name).name not in SCHEDULER}
    assert len(sources) > 60, "the walk found the packages"
    found = {name: writes(text, names(Sample).__contains__) for name, text in sources.items()}
    assert {name: places for name, places in found.items() if places} == {}


def test_features_write_no_field_of_a_sequence() -> None:
    sources = read("engine/features")
    assert len(sources) > 4, "the walk found the features"
    found = {name: writes(text, names(Sample, SequenceState, Job).__contains__) for name, text in sources.items()}
    assert {name: places for name, places in found.items() if places} == {}


def test_no_hook_is_set_after_construction() -> None:
    sources = read("")
    assert len(sources) > 300, "the walk found the package"
    found = {name: writes(text, is_hook, setters=False) for name, text in sources.items()}
    assert {name: places for name, places in found.items() if places} == {}


def test_proposals_are_frozen_values() -> None:
    assert len(get_args(Proposal)) > 4
    for one in (*get_args(Proposal), BlendProgress):
        assert one.__dataclass_params__.frozen, one


@pytest.mark.parametrize(
    "text",
    [
        "sample.held = True",
        "seq.sample.held, other = True, 1",
        "a = b = work.sample.computed = 3",
        "sample.known += 1",
        "seqs[0].sample.held: bool = True",
        "for seq.sample.known in range(3): pass",
        "with lock as sample.held: pass",
        "[*sample.keys] = ()",
        "del sample.awaited_page",
        "setattr(sample, name, 1)",
        "object.__setattr__(sample, 'held', 1)",
    ],
)
def test_a_write_is_noticed(text: str) -> None:
    assert writes(text, names(Sample).__contains__)


@pytest.mark.parametrize("text", ["index.on_evict = f", "engine._on_step = f", "engine.woken_by = f"])
def test_a_hook_that_is_set_late_is_noticed(text: str) -> None:
    assert writes(text, is_hook)


@pytest.mark.parametrize(
    "text", ["self.held = True", "held = sample.held", "sample.other = 1", "setattr(self, part, 1)", "f(held=True)"]
)
def test_other_statements_are_left_alone(text: str) -> None:
    assert writes(text, names(Sample).__contains__) == []
