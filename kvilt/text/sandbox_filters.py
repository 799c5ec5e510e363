"""The filters, tests and functions that chat templates use; everything else does not exist for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import filters as _filters
from jinja2 import pass_context, pass_environment
from jinja2 import tests as _tests
from jinja2.utils import _PassArg

from ..errors import TemplateError
from .budget import TemplateBudget
from .sandbox_costs import FILTERS, MAX_NUMBER_CHARS, TESTS, Cost, charge
from .sandbox_values import (
    TemplateNamespace,
    center,
    check_name,
    check_size,
    check_width,
    count_lines,
    join,
    kept,
    percent,
    replace,
    text_of,
    tojson,
)
from .user_text import marked

if TYPE_CHECKING:
    from .sandbox import TemplateEnvironment

_JINJA_FILTERS = (
    "abs capitalize count d default dictsort first items last length list lower map max min reject "
    "rejectattr reverse select selectattr sort title trim unique upper"
)
_JINJA_TESTS = (
    "boolean callable defined divisibleby eq equalto even false float ge greaterthan gt in integer iterable le "
    "lessthan lower lt mapping ne none number odd sameas sequence string true undefined upper == != > >= < <="
)
_LISTING = "list sort unique map select reject max min selectattr rejectattr"  # they take a text apart
_STRFTIME = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*\Z")


def _from_jinja(function: Any, cost: Cost | None) -> Callable[..., Any]:
    """A filter or test of jinja2, with its work and its result accounted for."""
    wants = _PassArg.from_obj(function)

    def given(context: Any) -> tuple[Any, ...]:
        match wants:
            case None:
                return ()
            case _PassArg.context:
                return (context,)
            case _PassArg.eval_context:
                return (context.eval_ctx,)
            case _PassArg.environment:
                return (context.environment,)

    @pass_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = context.environment.budget
        if isinstance(value, str):  # a text taken apart is a list of its characters
            budget.tick(1 + len(value) // 64)
        charge(budget, cost, value, (*args, *kwargs.values()))
        result = function(*given(context), value, *args, **kwargs)
        return kept(budget, marked(result, value, args, kwargs))

    return bounded


def _listing(function: Any, cost: Cost | None) -> Callable[..., Any]:
    """The same for a filter that takes its value apart at once."""
    inner = _from_jinja(function, cost)

    @pass_context
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, str):
            context.environment.budget.hold(len(value))
        return inner(context, value, *args, **kwargs)

    return bounded


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of ours, which takes the budget first."""

    @pass_environment
    def bounded(environment: TemplateEnvironment, value: Any, *args: Any, **kwargs: Any) -> Any:
        environment.budget.tick()
        return marked(function(environment.budget, value, *args, **kwargs), value, args, kwargs)

    return bounded


def _indent(budget: TemplateBudget, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = text_of(budget, text)
    check_width(len(width) if isinstance(width, str) else width)
    size = len(width) if isinstance(width, str) else width
    budget.make(len(text) + (count_lines(budget, text) + 2) * (size + 1))
    return str(_filters.do_indent(text, width, first, blank))


def _escape(budget: TemplateBudget, value: Any) -> str:
    text = text_of(budget, value)
    budget.make(len(text) * 2)
    for char, name in (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = replace(budget, text, char, name)
    return text


def _round(_budget: TemplateBudget, value: Any, precision: int = 0, method: Any = "common") -> float:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise TemplateError("the chat template rounds to more than 20 places")
    return _filters.do_round(value, precision, method)


def _int(_budget: TemplateBudget, value: Any, default: Any = 0, base: int = 10) -> Any:
    return _filters.do_int(_numeral(value), default, base)


def _float(_budget: TemplateBudget, value: Any, default: Any = 0.0) -> Any:
    return _filters.do_float(_numeral(value), default)


def _numeral(value: Any) -> Any:
    """A value that is not too long to be read as a number."""
    if isinstance(value, str) and len(value) > MAX_NUMBER_CHARS:
        raise TemplateError(f"the chat template reads a text of more than {MAX_NUMBER_CHARS} characters as a number")
    return value


def _sum(budget: TemplateBudget, values: Any, start: Any = 0) -> Any:
    total = start
    for value in values:
        budget.tick()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(total, (int, float)):
            raise TemplateError("the chat template sums something other than numbers")
        total += value
    return total


def _join(budget: TemplateBudget, values: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise TemplateError("the chat template joins by attribute; write map(attribute=...) before join")
    return join(budget, text_of(budget, d), values)


def _format(budget: TemplateBudget, text: Any, *args: Any, **kwargs: Any) -> str:
    return percent(budget, text_of(budget, text), kwargs or args)


def _replace(budget: TemplateBudget, text: Any, old: Any, new: Any, count: Any = None) -> str:
    return replace(budget, text_of(budget, text), old, new, count)


def _center(budget: TemplateBudget, text: Any, width: int = 80) -> Any:
    return center(budget, text_of(budget, text), width)


def allowed_filters() -> dict[str, Any]:
    """Filters by name."""
    table = {name: _from_jinja(_filters.FILTERS[name], FILTERS.get(name)) for name in _JINJA_FILTERS.split()}
    table |= {name: _listing(_filters.FILTERS[name], FILTERS.get(name)) for name in _LISTING.split()}
    own: Mapping[str, Callable[..., Any]] = {
        "center": _center,
        "e": _escape,
        "escape": _escape,
        "float": _float,
        "format": _format,
        "indent": _indent,
        "int": _int,
        "join": _join,
        "replace": _replace,
        "round": _round,
        "safe": text_of,
        "string": text_of,
        "sum": _sum,
        "tojson": tojson,
    }
    return table | {name: _own(function) for name, function in own.items()}


def allowed_tests() -> dict[str, Any]:
    """Tests by name."""
    return {name: _from_jinja(_tests.TESTS[name], TESTS.get(name)) for name in _JINJA_TESTS.split()}


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(message[:1000] if isinstance(message, str) else "the chat template refuses these messages")


def _strftime_now(format: Any) -> str:  # noqa: A002 - templates may name it
    if not isinstance(format, str) or len(format) > 100 or not _STRFTIME.match(format):
        raise TemplateError("the chat template formats the date in a way that is not allowed")
    return datetime.now().strftime(format)


@pass_environment
def _range(environment: TemplateEnvironment, *bounds: int) -> list[int]:
    if any(isinstance(bound, int) and abs(bound) > 1 << 31 for bound in bounds):
        environment.budget.hold(1 << 31)
    numbers = range(*bounds)
    environment.budget.hold(len(numbers))
    return list(numbers)


@pass_environment
def _dict(environment: TemplateEnvironment, *args: Any, **kwargs: Any) -> Any:
    return check_size(environment.budget, dict(*args, **kwargs))


@pass_environment
def _namespace(environment: TemplateEnvironment, *args: Any, **kwargs: Any) -> TemplateNamespace:
    values = check_size(environment.budget, dict(*args, **kwargs))
    for name in values:
        check_name(name)
    return TemplateNamespace(values)


def allowed_globals() -> dict[str, Any]:
    """Functions by name."""
    return {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "range": _range,
        "dict": _dict,
        "namespace": _namespace,
    }
