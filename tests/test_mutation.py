"""The parts of the mutation run: what its operators change, what they leave alone, which tests it chooses."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the mutation run is a script beside the package, not part of it

from mutation.judge import Judge, RecordedTest  # noqa: E402
from mutation.operators import diff, mutants, mutated, unchanged  # noqa: E402
from mutation.run import files, follow_moved_lines, origins, sampled, summary  # noqa: E402


def changes(source: str) -> dict[str, list[str]]:
    """The new texts by operator."""
    found: dict[str, list[str]] = {}
    for mutant in mutants(source, "some.py"):
        found.setdefault(mutant.operator, []).append(mutant.new)
    return found


@pytest.mark.parametrize(
    ("source", "operator", "expected"),
    [
        ("a < b", "comparison", ["a <= b", "a >= b"]),
        ("a <= b is c", "comparison", ["a < b is c", "a > b is c", "a <= b is not c"]),
        ("a // b", "arithmetic", ["a * b"]),
        ("a += b", "arithmetic", ["a -= b"]),
        ("a += b", "statement", ["pass"]),
        ("a and b", "and/or", ["a or b"]),
        ("not a", "unary", ["a"]),
        ("x = (0, 1, 7, True, 'a', '')", "constant", ["1", "0", "2", "8", "False", "''", "'mutated'"]),
        ("def f():\n    return a", "return", ["return None"]),
        ("def f():\n    return None", "return", []),
        ("f(a)", "statement", ["pass"]),
        ("raise E('text')", "statement", ["pass"]),
        ("self.a = b", "statement", ["pass"]),
        ("a if b else c", "condition", ["a if True else c", "a if False else c"]),
        ("while a:\n    break", "loop", ["continue"]),
        ("max(a, key=b)", "min/max", ["min(a, key=b)"]),
        ("max(a, key=b)", "keyword", ["max(a)"]),
    ],
)
def test_an_operator_makes_its_changes(source: str, operator: str, expected: list[str]) -> None:
    assert changes(source).get(operator, []) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "a: int | None",
        "Pair = A | B",
        "from x import y",
        "assert a < 1",
        "__all__ = ['a']",
        "if TYPE_CHECKING:\n    import a",
        "class P(Protocol):\n    x: int = 1",
        "@dataclass(frozen=True)\nclass A:\n    ...",
        "def f() -> int: ...",
        "x = isinstance(a, Apple | Pear)",
        "log.info('text', 1)",
    ],
)
def test_what_no_behaviour_hangs_on_is_left_alone(source: str) -> None:
    assert changes(source) == {}


def test_texts_of_errors_stay() -> None:
    assert changes("from .errors import Bad\ndef f():\n    return Bad('text', 1)") == {"return": ["return None"]}
    assert changes("raise E('text', 1)") == {"statement": ["pass"]}


SOURCE = """\
def clamp(x, low, high):
    if x < low:
        return low
    return high if x > high else x
"""


def test_a_mutant_is_the_source_with_one_change() -> None:
    (boundary,) = [one for one in mutants(SOURCE, "clamp.py") if one.new == "x <= low"]
    assert (boundary.line, boundary.around, boundary.scope) == (2, (1, 4), "clamp")
    assert ast.unparse(mutated(SOURCE, boundary)) == ast.unparse(ast.parse(SOURCE.replace("x < low", "x <= low")))
    lines = diff(SOURCE, boundary).splitlines()
    assert [line for line in lines[2:] if line[0] in "+-"] == ["-    if x < low:", "+    if x <= low:"]


def test_keys_do_not_move_with_lines_and_name_one_mutant_each() -> None:
    before = [one.key for one in mutants(SOURCE, "clamp.py")]
    after = [one.key for one in mutants("import a\n\n\n" + SOURCE, "clamp.py")]
    assert before == after
    assert len(set(before)) == len(before)


def test_the_compiler_recognizes_some_mutants_that_change_nothing() -> None:
    source = "def f():\n    while False:\n        g()\n"
    found = {one.operator: unchanged(source, one) for one in mutants(source, "f.py")}
    assert found["condition"]
    assert not any(unchanged(SOURCE, one) for one in mutants(SOURCE, "clamp.py"))


def test_a_sample_depends_on_its_seed_and_stays_when_another_file_changes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(SOURCE)
    other.write_text("")
    small = [mutant.key for mutant in sampled([one, other], 1, 5)]
    other.write_text("x = 1\n")
    assert len({*small} & {mutant.key for mutant in sampled([one, other], 1, 5)}) >= 3
    assert small != [mutant.key for mutant in sampled([one, other], 2, 5)]


def test_tests_follow_the_lines_they_ran() -> None:
    assert origins(["a", "b", "c"], ["new", "a", "b", "more", "c"]) == [0, 1, 2, 2, 3]
    assert origins(["a", "b", "c"], ["a", "x", "c"]) == [1, 2, 3]
    assert origins(["a", "b", "c"], ["a", "c"]) == [1, 3]
    record = {"sources": {"f.py": "a\nb"}, "tests": {"t": {"lines": {"f.py": [2]}}}}
    follow_moved_lines(record, {"f.py": "new\na\nb"})
    assert record["tests"] == {"t": {"lines": {"f.py": [3]}}}


def test_quick_tests_of_the_line_come_first_up_to_the_limit() -> None:
    def test(name: str, seconds: float, *lines: int) -> RecordedTest:
        return RecordedTest(name, seconds, {"clamp.py": frozenset(lines)})

    tests = [test("long", 9.0, 2), test("too long", 90.0, 2), test("elsewhere", 0.1, 4), test("quick", 0.1, 2, 4)]
    (mutant,) = [one for one in mutants(SOURCE, "clamp.py") if one.new == "x <= low"]
    assert [[one.name for one in stage] for stage in Judge(tests, 20.0).stages(mutant)] == [["quick"], ["long"]]


def test_a_summary_counts_with_and_without_equivalent_mutants() -> None:
    def verdict(status: str) -> dict[str, str]:
        return {"key": status, "file": "kvilt/kv/row.py", "status": status}

    text = summary([verdict("killed"), verdict("killed"), verdict("killed"), verdict("survived")])
    assert text.splitlines()[-1] == "| all | 4 | 3 | 0 | 75.0% | 75.0% |"


def test_the_files_that_are_mutated_exist() -> None:
    assert len(files(("kvilt/kv/*.py",))) > 5
