"""Patterns: what they mean is what they mean in ECMA-262, and what the library cannot do is refused by name."""

from __future__ import annotations

import re

import pytest
from effort import examples
from grammars import byte_compiler, takes, takes_value
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from kvilt.sampling.constraint import JsonSchema, Regex
from kvilt.sampling.pattern import literal, search_in_string, whole_match

compiler = byte_compiler()

# Written so that Python's re, with re.ASCII, means the same: `$` and `.` and `\s` differ at line ends alone.
PLAIN = ["a", "b", "0", "-", "é", '"', "/", r"\\", r"\.", r"\x61", r"\n", r"\/", "."]
CLASSES = [
    "[ab]",
    "[^a]",
    "[a-c0-9]",
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"[\w-]",
    r"[^\d_]",
    '[^"]',
    r"[^\\]",
    r"[^\n]",
    r"[\n\"]",
]
CLASSES += [r"[^\"\\\n]", r"[\s\S]", r"[\x00-/]", r"[#-~]"]
atoms = st.sampled_from([*PLAIN, *CLASSES])
COUNTS = ["", "", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "{0}"]


def combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counted = st.tuples(inner, st.sampled_from(COUNTS)).map(lambda parts: f"(?:{parts[0]}){parts[1]}")
    chained = st.lists(counted | atoms, min_size=1, max_size=3).map("".join)
    either = st.lists(inner, min_size=2, max_size=3).map(lambda options: "(" + "|".join(options) + ")")
    return chained | either | inner.map(lambda one: f"(?<name>{one})")


bodies = st.recursive(atoms, combine, max_leaves=6)
patterns = st.tuples(st.sampled_from(["", "^"]), bodies, st.sampled_from(["", "$"])).map("".join)
patterns |= st.lists(patterns, min_size=2, max_size=3).map("|".join)
texts = st.text('ab0-_.é"\\/\n\t ', max_size=6)


def python(pattern: str) -> str:
    """The pattern for Python's re: names once only, and `$` where nothing follows."""
    numbers = iter(range(1000))
    named = re.sub(r"\(\?<name>", lambda _: f"(?P<n{next(numbers)}>", pattern)
    return re.sub(r"(?<!\\)\$", r"\\Z", named)


@settings(max_examples=examples(300))
@given(pattern=patterns, samples=st.lists(texts, max_size=8))
def test_a_pattern_matches_what_it_matches_elsewhere(pattern: str, samples: list[str]) -> None:
    grammar = compiler.compile(JsonSchema({"type": "string", "pattern": pattern}))
    for text in samples:
        assert takes_value(grammar, text) == bool(re.search(python(pattern), text, re.ASCII)), text


@settings(max_examples=examples(200))
@given(pattern=patterns, samples=st.lists(texts, max_size=8))
def test_a_regex_matches_whole_texts(pattern: str, samples: list[str]) -> None:
    try:
        grammar = compiler.compile(Regex(pattern))
    except GrammarError:
        assert not any(re.fullmatch(python(pattern), text, re.ASCII) for text in samples)
        return
    for text in samples:
        assert takes(grammar, text) == bool(re.fullmatch(python(pattern), text, re.ASCII)), text


@given(text=st.text(min_size=1, max_size=20))
def test_a_literal_matches_itself_and_nothing_else(text: str) -> None:
    grammar = compiler.compile(Regex("".join(f"\\u{{{ord(char):x}}}" for char in text)))
    assert takes(grammar, text) and not takes(grammar, text + "a") and not takes(grammar, text[:-1])
    assert whole_match("".join(f"\\u{{{ord(char):x}}}" for char in text)) == literal(text)


MEANINGS = [
    ("^.$", "a\u00e9\U0001f600\t", "\n\r\u2028\u2029"),
    (r"^\s$", "\t\n\f\r \u00a0\u1680\u2003\u2028\ufeff", "a\u0085\u200b\u180e"),
    (r"^\S$", "a\u0085\u200b", "\ufeff\u00a0 "),
    (r"^\d$", "07", "\u0663a"),
    (r"^\w$", "aZ_9", "\u00e9-"),
    (r"^\W$", "\u00e9-", "aZ_9"),
    (r"^[\s\S]$", "\na", ""),
    (r"^[\b]$", "\b", "b"),
    (r"^\p{Lu}$", "A\u00c9\u0416", "a1"),
    (r"^\P{Lu}$", "a1", "A\u00c9"),
    (r"^[^\p{L}\d]$", "- ", "a\u00e97"),
    (r"^\p{Script=Greek}$", "\u03b1", "a"),
    (r"^\ud83d\ude00$", "\U0001f600", "a"),
    (r"^[\u{1F600}-\u{1F64F}]$", "\U0001f601", "a"),
    (r"^\cJ$", "\n", "J"),
    ("^[[]$", "[", "]"),
    ("^[a&&b]$", "a&b", "c"),
    ("^[a-]$", "a-", "b"),
    (r"^[\w-.]$", "a-.", "/"),
    ("^{$", "{", "}"),
    ("^]$", "]", "["),
    ("^[+--]$", "+,-", "."),
    (r"^\/$", "/", "\\"),
    ('^[^"]$', "\\a\n", '"'),
    (r"^[^\\]$", '"a\n', "\\"),
    (r"^[^\p{L}\"]$", "\\\n1", 'a"'),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), MEANINGS, ids=[case[0] for case in MEANINGS])
def test_classes_mean_what_ecma_262_says(pattern: str, good: str, bad: str) -> None:
    grammar = compiler.compile(JsonSchema({"type": "string", "pattern": pattern}))
    assert [char for char in good if not takes_value(grammar, char)] == []
    assert [char for char in bad if takes_value(grammar, char)] == []


UNSUPPORTED = [
    "(?=a)",
    "(?!a)",
    "(?<=a)",
    "(?<!a)",
    r"\bword",
    r"\B",
    r"(a)\1",
    r"\k<n>",
    "(?i)a",
    "(?i:a)",
    "(?P<n>a)",
    "a{,2}",
    "[]",
    "[^]",
    r"\Z",
    r"\A",
    r"\a",
    r"\Q",
    r"\_",
    "x^a",
    "a$b",
    "(^a)b",
    "(?:^)*",
    r"\p{greek}",
    r"\p{Cc}",
]


@pytest.mark.parametrize("pattern", UNSUPPORTED)
def test_what_other_dialects_read_otherwise_is_refused_by_name(pattern: str) -> None:
    for read in (whole_match, search_in_string):
        with pytest.raises(GrammarUnsupported) as caught:
            read(pattern, "here")
        assert caught.value.keyword and caught.value.where == "here"


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "[a",
        "a**",
        "*",
        "a{2,1}",
        "[b-a]",
        r"\u12",
        r"\u{110000}",
        r"\ud800",
        "\\",
        "(?<1>a)",
        r"\p{",
        "a{99999999999}",
    ],
)
def test_a_broken_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        whole_match(pattern)
    assert not isinstance(caught.value, GrammarUnsupported)


@pytest.mark.parametrize("pattern", ["a{10001}", "(a{101}){101}", "(" * 70 + "a" + ")" * 70, "a" * 10_001])
def test_a_pattern_that_grows_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarTooLarge):
        whole_match(pattern)


def test_nested_repetition_costs_nothing_while_matching() -> None:
    grammar = compiler.compile(Regex("(a+)+b"))
    assert takes(grammar, "a" * 2_000 + "b") and not takes(grammar, "a" * 2_000)
