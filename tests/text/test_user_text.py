"""Text that knows what of it a caller wrote: str's results, with spans that follow every character."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.text.budget import TemplateBudget, TemplateLimits
from kvilt.text.sandbox import CompiledTemplate
from kvilt.text.sandbox_filters import allowed_filters
from kvilt.text.sandbox_values import _STR, brace, percent
from kvilt.text.user_text import UserText, joined, marked, plain, spans_of

# What the template writes is lower case, a user's is upper case; both have digits, spaces and line ends of their own.
TEMPLATE, USER = "ab1 \n\r", "AB2\t\x0b\u2028"
pieces = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12)
texts = pieces.map(lambda found: joined([UserText(USER[i]) if own else TEMPLATE[i] for own, i in found]))
short = st.text("aAb12 \n\t", max_size=2)
counts = st.integers(-1, 3)


def flags(text: str) -> list[bool]:
    """Whether each character is the user's, by the spans."""
    found = [False] * len(text)
    for start, end in spans_of(text):
        assert 0 <= start < end <= len(text)
        assert not any(found[start:end])
        found[start:end] = [True] * (end - start)
    return found


def right(text: str, template: str = TEMPLATE) -> None:
    """The spans hold what the user wrote, and nothing else."""
    assert flags(text) == [char not in template for char in text]
    assert all(left[1] < after[0] for left, after in zip(spans_of(text), spans_of(text)[1:], strict=False))


CUTS: list[Callable[[str, str, int], Any]] = [
    lambda text, sep, count: text.split(sep or None, count),
    lambda text, sep, count: text.rsplit(sep or None, count),
    lambda text, _sep, count: text.split(None, count),
    lambda text, _sep, count: text.rsplit(None, count),
    lambda text, sep, _count: text.partition(sep or "a"),
    lambda text, sep, _count: text.rpartition(sep or "a"),
    lambda text, _sep, count: text.splitlines(count > 0),
    lambda text, sep, _count: [text.strip(sep), text.lstrip(sep), text.rstrip(sep), text.strip()],
    lambda text, sep, _count: [text.removeprefix(sep), text.removesuffix(sep)],
    lambda text, _sep, count: [text[count:], text[:count], text[::-1], text[::2], text[count:-1:2]],
    lambda text, _sep, _count: list(text),
    lambda text, _sep, count: [text * count, count * text],
    lambda text, sep, count: [text.replace(sep, "b", count), text.replace(sep, "")],
    lambda text, sep, _count: ["a1" + text, text + "a1", text + text, text.replace(sep, text[:2])],
    lambda text, _sep, count: [text[count]] if -len(text) <= count < len(text) else [],
]


@settings(max_examples=examples(300))
@given(text=texts, sep=short, count=counts, which=st.integers(0, len(CUTS) - 1))
def test_results_are_those_of_str_and_spans_follow(text: str, sep: str, count: int, which: int) -> None:
    results, expected = CUTS[which](text, sep, count), CUTS[which](plain(text), sep, count)
    assert list(results) == list(expected)
    for result in results:
        right(result)


@settings(max_examples=examples(100))
@given(parts=st.lists(texts, max_size=5), separator=texts)
def test_joined_texts_keep_their_spans(parts: list[str], separator: str) -> None:
    whole = joined(parts, separator)
    assert whole == plain(separator).join(map(plain, parts))
    right(whole)


def test_adding_something_else_is_a_type_error() -> None:
    for wrong in (lambda: UserText("a") + 1, lambda: 1 + UserText("a")):  # type: ignore[operator]
        with pytest.raises(TypeError):
            wrong()


def test_case_keeps_spans_unless_the_length_changes() -> None:
    text = "ab" + UserText("cd")
    assert (text.upper(), spans_of(text.upper())) == ("ABCD", ((2, 4),))
    assert spans_of(text.capitalize()) == spans_of(text.lower()) == ((2, 4),)
    assert (("a" + UserText("ß")).upper(), spans_of(("a" + UserText("ß")).upper())) == ("ASS", ((0, 3),))


def budget() -> TemplateBudget:
    return TemplateBudget(TemplateLimits(seconds=600.0))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a%sb", UserText("A")),
        ("a%s%%b%5s1", (UserText("A"), "b")),
        ("%(a)sa%(b)s", {"a": UserText("A"), "b": "ab"}),
        ("%r", ("ab",)),
    ],
)
def test_percent_formats_mark_the_fields_of_a_user(text: str, values: Any) -> None:
    bare = text % values
    shown = percent(budget(), text, values)
    assert shown == bare
    right(shown, template="ab1%' ")


def test_brace_formats_mark_the_fields_of_a_user() -> None:
    user = UserText("A")
    for text, args, kwargs in [
        ("a{}b{}", (user, "a"), {}),
        ("{{a}}{0}{1}{0}", (user, "b"), {}),
        ("a{name}{b}", (), {"name": user, "b": "b"}),
    ]:
        shown = brace(budget(), text, *args, **kwargs)
        assert shown == text.format(*args, **kwargs)
        right(shown, template="ab{}")
    assert spans_of(brace(budget(), "{:>4}{!r}", user, user)) == ((0, 7),), "padding counts as the user's"


def test_what_has_no_rule_is_the_users_altogether() -> None:
    assert spans_of(marked("abc", [{"x": UserText("q")}])) == ((0, 3),)
    assert spans_of(marked("abc", {UserText("q"): 1})) == ((0, 3),)
    assert type(marked("abc", ["q", 1, None])) is str
    assert marked(3, UserText("q")) == 3


ARGUMENTS: dict[str, list[str]] = {
    "center": ["30"],
    "ljust": ["30"],
    "rjust": ["30"],
    "zfill": ["30"],
    "replace": ["'a', 'c'", "'A', 'c'", "'', 'c'", "'a', x"],
    "split": ["", "'a'", "'A'"],
    "rsplit": ["", "'a'", "'A'"],
    "partition": ["'A'", "'a'"],
    "rpartition": ["'A'", "'a'"],
    "removeprefix": ["'a'"],
    "removesuffix": ["'A'"],
    "startswith": ["'a'"],
    "endswith": ["'a'"],
    "find": ["'a'"],
    "rfind": ["'a'"],
    "index": ["'A'"],
    "count": ["'a'"],
    "join": ["['b', x]", "[x, x]"],
    "format": ["", "x"],
}
FILTER_ARGUMENTS: dict[str, list[str]] = {
    "replace": ARGUMENTS["replace"],
    "join": ["", "x"],
    "default": ["x"],
    "d": ["x"],
    "round": [],
    "sum": [],
    "abs": [],
    "dictsort": [],
    "items": [],
    "map": ["'upper'"],
    "select": ["'string'"],
    "reject": ["'none'"],
    "selectattr": [],
    "rejectattr": [],
    "indent": ["2, true"],
    "center": ["30"],
    "float": [],
    "int": [],
}
VALUES = ["x", "'a' + x", "x + 'a'", "'b' ~ x ~ 'b'"]


def outputs(source: str, text: str) -> str:
    return CompiledTemplate(source, TemplateLimits(seconds=600.0)).render({"x": UserText(text)})


def every_character(shown: str) -> Iterable[tuple[str, bool]]:
    return zip(plain(shown), flags(shown), strict=True)


@pytest.mark.parametrize("value", VALUES)
def test_no_method_or_filter_loses_what_a_user_wrote(value: str) -> None:
    """Every one that the sandbox has, so that one that is added has to be safe as well."""
    calls = [f"({value}).{name}({args})" for name in _STR for args in ARGUMENTS.get(name, [""])]
    calls += [f"({value}) | {name}({args})" for name in allowed_filters() for args in FILTER_ARGUMENTS.get(name, [""])]
    calls += [f"({value}) | list | {name}" for name in ("first", "last", "join", "sort", "unique", "tojson", "string")]
    calls += [f"[{value}] | string", f"{{'k': {value}}} | tojson", f"strftime_now({value})", f"({value}) * 2"]
    calls += [f"'%s' % ({value})", f"'{{}}'.format({value})", f"({value})[::-1]", f"({value})[1:]", f"({value})[0]"]
    calls += [f"'c'.join([{value}, 'c'])", f"namespace(y={value}).y", f"dict(y={value}).y", f"{{'y': {value}}}['y']"]
    for call in calls:
        shown = outputs(f"{{{{ {call} }}}}", "QAQ")
        assert all(own for char, own in every_character(shown) if char in "Qq"), call


def test_blocks_macros_and_loops_carry_spans() -> None:
    for source in (
        "{% set y %}a{{ x }}a{% endset %}{{ y }}",
        "{% macro m(v) %}a{{ v }}{% endmacro %}{{ m(x) }}",
        "{% macro m() %}a{{ caller() }}{% endmacro %}{% call m() %}{{ x }}{% endcall %}",
        "{% filter trim %} {{ x }}a {% endfilter %}",
        "{% for c in x %}a{{ c }}{% endfor %}",
        "{% for c in x recursive %}a{{ c }}{{ loop('') }}{% endfor %}",
    ):
        shown = outputs(source, "QAQ")
        assert [own for _, own in every_character(shown)] == [char in "QA" for char in shown], source


def test_a_macro_that_is_given_user_text_may_write_special_tokens() -> None:
    shown = outputs("{% macro m(v) %}{% if v %}a{% endif %}{% endmacro %}{{ m(x) }}", "QAQ")
    assert (shown, spans_of(shown)) == ("a", ())


def test_nothing_has_no_spans() -> None:
    text = "a" + UserText("QQ")
    assert [spans_of(part) for part in (text[2:2], text[2:1], text.strip("aQ"), text.partition("Q")[1])] == [
        (),
        (),
        (),
        ((0, 1),),
    ]
