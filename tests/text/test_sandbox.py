"""Templates from strangers: every attack ends soon, in a TemplateError, with bounded memory."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from kvilt.errors import TemplateError
from kvilt.text.budget import TemplateLimits
from kvilt.text.sandbox import CompiledTemplate

LIMITS = TemplateLimits(seconds=1.0)
MESSAGES = [{"role": "user", "content": "x"}]
GROW = "{% set ns = namespace(x=START) %}{% for i in range(1000) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


SIZE_ATTACKS = {
    "a large range": "{% for a in range(10**9) %}{% endfor %}",
    "an endless range": "{{ range(10**30) }}",
    "a repeated text": "{{ 'a' * 10**9 }}",
    "a repeated constant": "{{ 'a' * 1000000000 }}",
    "a repeated list": "{{ [0] * 1000000000 }}",
    "a high power": "{{ 10 ** (10 ** 10) }}",
    "a number that squares itself": grow("7", "ns.x * ns.x"),
    "doubling by tilde": grow("'a'", "ns.x ~ ns.x"),
    "doubling by plus": grow("'a'", "ns.x + ns.x"),
    "doubling by format": grow("'a'", "'%s%s' % (ns.x, ns.x)"),
    "doubling by braces": grow("'a'", "'{}{}'.format(ns.x, ns.x)"),
    "doubling by join": grow("'a'", "[ns.x, ns.x] | join"),
    "doubling by method join": grow("'a'", "ns.x.join([ns.x, ns.x])"),
    "doubling a list by plus": grow("[1]", "ns.x + ns.x"),
    "a list of itself twice": grow("[1]", "[ns.x, ns.x]"),
    "a tuple of itself twice": grow("(1,)", "(ns.x, ns.x)"),
    "a dict of itself twice": grow("{'a': 1}", "{'a': ns.x, 'b': ns.x}"),
    "a dict call of itself twice": grow("{'a': 1}", "dict(a=ns.x, b=ns.x)"),
    "a deep list": "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    "growth by replace": grow("'a'", "ns.x | replace('a', 'aaaaaaaaaa')"),
    "growth by method replace": grow("'a'", "ns.x.replace('a', 'aaaaaaaaaa')"),
    "growth by empty replace": grow("'a'", "ns.x.replace('', ns.x)"),
    "a replace bomb": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "a join bomb": "{{ ('x' * 1000000).join(range(90000) | map('string')) }}",
    "a wide number": "{{ '%1000000000d' % 1 }}",
    "a precise number": "{{ '%.1000000000f' % 1 }}",
    "a starred width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format filter": "{{ '%1000000000d' | format(1) }}",
    "a wide brace": "{{ '{:>1000000000}'.format(1) }}",
    "a nested brace": "{{ '{:{}}'.format(1, 1000000000) }}",
    "many wide fields": "{{ ('%s' * 100000) % (('a' * 1000000,) * 100000) }}",
    "ljust": "{{ ''.ljust(10**9) }}",
    "rjust": "{{ ''.rjust(10**9) }}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "method center": "{{ 'a'.center(1000000000) }}",
    "indent": "{{ ('a\n' * 1000000) | indent(900) }}",
    "wide indent": "{{ 'a\nb' | indent(1000000000) }}",
    "tojson indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "tojson of deep lists": grow("[1]", "[ns.x]")
    .replace("range(1000)", "range(90)")
    .replace("{{ ns.x }}", "{{ ([ns.x] * 900) | tojson(indent=16) }}"),
    "a text as a list": "{{ ('é' * 8000000) | list | length }}",
    "a split": "{{ ('a ' * 4000000).split(' ') | length }}",
    "lines": "{{ ('\n' * 8000000).splitlines() | length }}",
    "round": "{{ 1 | round(10000000) }}",
    "sum of lists": "{{ ([[1]] * 40000) | sum(start=[]) }}",
    "a wide date": "{{ strftime_now('%1000000000d') }}",
    "output": "{% for i in range(90000) %}" + "x" * 2000 + "{% endfor %}",
    "a set block": "{% set y %}{% for i in range(90000) %}" + "x" * 2000 + "{% endfor %}{% endset %}",
    "a macro's text": "{% macro m() %}{% for i in range(90000) %}" + "x" * 2000 + "{% endfor %}{% endmacro %}{{ m() }}",
    "a large source": "x" * 70_000,
}
TIME_ATTACKS = {
    "nested loops": "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
    "loops that filter": "{% set s = 'a' * 4000000 %}{% for i in range(90000) if 'b' in s %}{% endfor %}",
    "small outputs": "{% for j in range(90000) %}{% for i in range(90000) %}"
    + "{% if 1 %}x{% endif %}" * 2000
    + "{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a wide recursive loop": "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "sorting": "{% for i in range(90000) %}{% set x = range(90000) | sort %}{% endfor %}",
    "selecting": "{% for i in range(90000) %}{% set x = range(90000) | select('odd') | list %}{% endfor %}",
    "comparing": "{% set a = range(90000) %}{% set b = range(90000) %}"
    "{% for i in a %}{% if a == b %}{% endif %}{% endfor %}",
    "slicing": "{% set s = 'a' * 8000000 %}" + "{% set x = s[1:] %}" * 1500,
    "searching": "{% set s = 'a' * 4000000 %}{% for i in range(90000) %}{% set x = s.find('ab') %}{% endfor %}",
}
DEEP = {
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "negations": "{{ " + "not " * 10_000 + "1 }}",
    "sums": "{{ " + "1+" * 10_000 + "1 }}",
    "lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "attributes": "{{ a" + ".b" * 10_000 + " }}",
    "filters": "{{ 'a'" + "|upper" * 8000 + " }}",
    "open braces": "{{" * 30_000,
    "open comments": "{#" * 30_000,
    "open statements": "{%" * 30_000,
    "backslashes": "{{ '" + "\\" * 60_000,
}
ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ ['', 1] | sort(attribute='__class__') }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0[a]}'.format({'a': 1}) }}",
    "{{ '{x.__init__}'.format(x=namespace) }}",
    "{{ '{0}'.format_map }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ range.__self__ }}",
    "{{ strftime_now.__code__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{{ ns._Namespace__attrs }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace() %}{% set ns.x = ns %}",
    "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}",
    "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "{% macro f() %}{{ kwargs }}{% endmacro %}{{ f(a=1) }}",
    "{{ 'a'.upper }}",
    "{{ range }}",
    "{{ (1).real }}",
    "{{ (1).to_bytes(10, 'big') }}",
    "{{ 'a'.encode() }}",
    "{{ 'a'.translate({}) }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].setdefault('a', 1) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% block a %}{% endblock %}",
    "{{ 'x' | pprint }}",
    "{{ 'x' | xmlattr }}",
    "{{ 1 is filter }}",
    "{{ '1+1' | eval }}",
]


def attack(source: str) -> None:
    began = time.perf_counter()
    with pytest.raises(TemplateError) as caught:
        CompiledTemplate(source, LIMITS).render({"messages": MESSAGES})
    assert time.perf_counter() - began < 60  # one and a little on a quiet core
    assert "0x" not in str(caught.value)  # no addresses
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", SIZE_ATTACKS)
def test_nothing_can_be_made_large(name: str) -> None:
    tracemalloc.start()
    try:
        attack(SIZE_ATTACKS[name])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TIME_ATTACKS)
def test_nothing_can_take_long(name: str) -> None:
    attack(TIME_ATTACKS[name])


@pytest.mark.parametrize("name", DEEP)
def test_deep_or_broken_sources_are_refused(name: str) -> None:
    attack(DEEP[name])


@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out(source: str) -> None:
    attack(source)


def test_the_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    CompiledTemplate("{% set messages = messages + [1] %}{{ messages | length }}", TemplateLimits()).render(
        {"messages": messages}
    )
    assert messages == MESSAGES


def test_a_deadline_ends_a_loop_that_steps_would_allow() -> None:
    template = CompiledTemplate(
        "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3, TemplateLimits(steps=10**12, seconds=0.2)
    )
    began = time.perf_counter()
    with pytest.raises(TemplateError, match=r"0\.2 s"):
        template.render({})
    assert time.perf_counter() - began < 60  # hours without a deadline


def test_a_budget_belongs_to_one_rendering() -> None:
    template = CompiledTemplate("{% for i in range(1000) %}x{% endfor %}", TemplateLimits(steps=5000))
    for _ in range(20):
        assert template.render({}) == "x" * 1000
