"""Patterns of module names: against `re` on all they take, and by counted steps where `re` is slow."""

from __future__ import annotations

import re

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import Unsupported
from kvilt.weights.module_pattern import MAX_PATTERN_CHARS, MatchBudget, ModulePattern

NAMES = st.text("ab.1_-\n٣é", max_size=12)
ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "1", "_", "[ab]", "[^a.]", "[a-b1]", r"[\d_]", r"\-", ""])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(["({})", "(?:{})"]), inner, st.sampled_from(["", "*", "+", "?"])).map(
            lambda made: made[0].format(made[1]) + made[2]
        ),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "^"]), st.recursive(ATOMS, _grown, max_leaves=8), st.sampled_from(["", "$"])
).map("".join)


def searched(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@settings(max_examples=examples(600))
@given(pattern=PATTERNS, names=st.lists(NAMES, min_size=1, max_size=6))
def test_patterns_match_what_re_matches(pattern: str, names: list[str]) -> None:
    compiled = ModulePattern(pattern)
    for name in names:
        assert compiled.matches(name) == searched(pattern, name), (pattern, name)


@settings(max_examples=examples(600))
@given(pattern=st.text("ab.1()[]|*+?^$\\-dw{}:", max_size=10), name=NAMES)
def test_any_text_is_refused_or_matches_what_re_matches(pattern: str, name: str) -> None:
    try:
        compiled = ModulePattern(pattern)
    except Unsupported:
        return
    assert compiled.matches(name) == searched(pattern, name), pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)",
        "(?i)a",
        r"\1",
        r"\b",
        "a{2}",
        "a*?",
        "a++",
        "(a",
        "a)",
        "[",
        "[]",
        "[b-a]",
        "a$b",
        "b^",
        "*",
        "|*",
        "\\",
        "é",
    ],
)
def test_what_is_not_in_the_subset_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(Unsupported, match="pattern"):
        ModulePattern(pattern)


def test_a_long_pattern_is_refused() -> None:
    ModulePattern("a" * MAX_PATTERN_CHARS)
    with pytest.raises(Unsupported, match="characters"):
        ModulePattern("a" * (MAX_PATTERN_CHARS + 1))


@pytest.mark.parametrize("pattern", ["(.|.)" * 24 + "x", "(a+)+x", "(a|aa)*x", "a*a*a*a*a*a*x", "((a*)*)*x"])
def test_steps_grow_with_the_name_and_not_faster(pattern: str) -> None:
    compiled = ModulePattern(pattern)

    def steps(chars: int) -> int:
        visits = MatchBudget()
        before = visits.left
        assert not compiled.matches("a" * chars, visits)
        return before - visits.left

    assert steps(400) <= 5 * steps(100)
    assert steps(400) <= 400 * 6 * len(pattern)


def test_steps_for_one_name_are_bounded() -> None:
    with pytest.raises(Unsupported, match="steps"):
        ModulePattern("(.|.|.)*" * 30).matches("a" * 4000)
