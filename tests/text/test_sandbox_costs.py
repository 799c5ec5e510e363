"""Every filter, test, method and operator of chat templates is charged before it runs: work is counted, not seconds."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.sandbox import SandboxedEnvironment

from kvilt.errors import TemplateError
from kvilt.text import budget as budgets
from kvilt.text.budget import TemplateBudget, TemplateLimits
from kvilt.text.chat import ChatTemplate
from kvilt.text.sandbox import CompiledTemplate, TemplateEnvironment
from kvilt.text.sandbox_math import OPERATORS
from kvilt.text.sandbox_values import methods_of

LONG = 3000
TEXT = "aB c" * (LONG // 4)
VALUES: dict[str, Any] = {
    "t": TEXT,
    "l": [f"item {i}" for i in range(LONG)],
    "d": {f"key {i}": i for i in range(LONG)},
    "n": 123,
}

# Entries whose time grows with their input, each with a long one; the others look at one item or none.
_WITH_TEXT = (
    "strip lstrip rstrip startswith endswith find rfind index count removeprefix removesuffix partition rpartition "
    "split rsplit"
)
_BARE = "lower upper title capitalize isdigit isalpha isalnum isspace isupper islower isnumeric isdecimal splitlines"
_OF_TEXTS, _OF_LISTS = "capitalize lower upper title trim reverse escape e indent tojson", "sort max min string"
METHODS = {
    **{name: f"t.{name}('c')" for name in _WITH_TEXT.split()},
    **{name: f"t.{name}()" for name in _BARE.split()},
    "replace": "t.replace('c', 'x')",
    "format": "(t ~ '{}').format(1)",
}
FILTERS = {
    **{name: f"t|{name}" for name in _OF_TEXTS.split()},
    **{name: f"l|{name}" for name in _OF_LISTS.split()},
    "unique": "l|unique|list",
    "dictsort": "d|dictsort",
    "replace": "t|replace('c', 'x')",
    "format": "(t ~ '%s')|format(1)",
}
TESTS = {"lower": "t is lower", "upper": "t is upper", "in": "'zz' is in(t)", "eq": "t is eq(t)"}
OPERATIONS = {
    "%": "(t ~ '%s') % (1,)",
    "in": "'zz' in t",
    "not in": "'zz' not in t",
    "==": "t == t",
    "list": "l == l",
    "~": "l ~ ''",
}
# Their result is measured as a text or a list before it is made, or they look at a bounded part.
MEASURED_METHODS = "join center ljust rjust zfill"
MEASURED_FILTERS = (
    "abs center count d default first float int items join last length list map reject rejectattr round safe select "
    "selectattr sum"
)
CHARGED = [*METHODS.values(), *FILTERS.values(), *TESTS.values(), *OPERATIONS.values()]


def test_the_tables_name_everything_a_template_can_do() -> None:
    assert set(methods_of("")) == {*METHODS, *MEASURED_METHODS.split()}
    assert set(TemplateEnvironment().filters) == {*FILTERS, *MEASURED_FILTERS.split()}
    assert set(OPERATORS) == {"+", "-", "*", "/", "//", "**", "%"}


def rendered(source: str, limits: TemplateLimits | None = None, **values: Any) -> str:
    return CompiledTemplate(source, limits or TemplateLimits()).render({**VALUES, **values})


@pytest.mark.parametrize("expression", CHARGED)
def test_results_are_those_of_jinja(expression: str) -> None:
    expected = SandboxedEnvironment().from_string("{{ " + expression + " }}").render(VALUES)
    if "tojson" in expression or "escape" in expression or "|e" in expression:
        return  # those are ours on purpose
    assert rendered("{{ " + expression + " }}") == expected


@pytest.mark.parametrize("expression", CHARGED)
def test_work_is_charged_before_it_is_done(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []
    work = TemplateBudget.work

    def counted(self: TemplateBudget, units: int, call: int | None = None) -> None:
        spent.append(units)
        work(self, units, call)

    monkeypatch.setattr(budgets.TemplateBudget, "work", counted)
    source = "{% if " + expression + " %}{% endif %}"  # nothing is written, so nothing else is charged
    rendered(source)
    assert max(spent) >= LONG // 4
    with pytest.raises(TemplateError, match="too long"):
        rendered(source, TemplateLimits(call_work=LONG // 4 - 1))
    with pytest.raises(TemplateError, match="too long"):
        rendered(source, TemplateLimits(work=LONG // 4 - 1))


HOSTILE = {
    "a number of many digits": "{{ t|int(0, 16) // 3 }}",
    "a float of many digits": "{{ t|float }}",
    "a literal of many digits": "{{ 0x" + "f" * 50_000 + " // 3 }}",
    "doubling": "{% set ns = namespace(x=1) %}{% for i in range(9000) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "names without an end": "{{ ('%(' * 500000) % {} }}",
    "parentheses in names": "{{ '%((a))s' % {'(a)': 1} }}",
    "a search from the right": "{{ t.rfind('b' ~ 'a' * 100000) }}",
    "a split from the right": "{{ t.rsplit('b' ~ 'a' * 100000) }}",
    "a partition from the right": "{{ t.rpartition('b' ~ 'a' * 100000) }}",
    "many characters to strip": "{{ t.strip('b' * 100000 ~ 'a') }}",
    "many characters to trim": "{{ t|trim('b' * 100000 ~ 'a') }}",
    "upper case of a long text": "{{ (t * 4).upper() }}",
    "titles of a long text": "{{ t|title }}",
    "sorting many": "{{ range(100000)|list|sort }}",
    "writing out a long list": "{{ [t ~ t, t] ~ '' }}",
    "JSON of a long text": "{{ (t ~ t)|tojson }}",
    "JSON with long separators": "{{ range(1000)|list|tojson(separators=(t, t)) }}",
    "the largest of a text": "{{ t|max }}",
    "lines of a long text": "{{ ('\\n' * 200000)|indent }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_single_call_takes_long(name: str) -> None:
    """Each of these took seconds in one call that neither the budget nor another thread could interrupt."""
    with pytest.raises(TemplateError):
        rendered(HOSTILE[name], TemplateLimits(seconds=1e9), t="a" * 1_000_000)


def test_large_numbers_in_messages_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, {})
    template.render([{"role": "user", "content": 2**4000}])
    with pytest.raises(TemplateError, match="4096 bits"):
        template.render([{"role": "user", "content": 2**5000}])


def test_comparisons_may_be_chained() -> None:
    assert rendered("{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 >= 2 != 1 }} {{ 'a' in 'ab' }}") == "True False True True"


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [("%s%%", (1,), "1%"), ("%5.2f|%-4d|%x", (1.5, 2, 255), " 1.50|2   |ff"), ("%(a)s %(b)s", {"a": 1, "b": 2}, "1 2")],
)
def test_formats_are_those_of_python(text: str, values: Any, expected: str) -> None:
    assert rendered("{{ text % values }}", text=text, values=values) == expected == text % values


@pytest.mark.parametrize(
    "text", ["%*d", "%.*f", "%99999d", "%(a)99999s", "%%%99999d", "%(a)%%99999d", "%.99999f", "%(a"]
)
def test_wide_formats_are_refused(text: str) -> None:
    with pytest.raises(TemplateError):
        rendered("{{ text % values }}", text=text, values={"a": 1})
