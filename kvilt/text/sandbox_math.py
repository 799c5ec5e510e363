"""Operators of chat templates, measured before they run: none can make a huge text, list or number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import TemplateError
from .budget import MAX_INT_BITS, TemplateBudget
from .sandbox_costs import read, search
from .sandbox_values import check_size, percent

_SEQUENCES = (str, list, tuple)


def _add(budget: TemplateBudget, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget.make(len(left) + len(right))
        return left + right
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        budget.hold(len(left) + len(right))
        return check_size(budget, operator.add(left, right))
    _check_bits(max(_bits(left), _bits(right)))
    return left + right


def _number(function: Callable[[Any, Any], Any]) -> Callable[[TemplateBudget, Any, Any], Any]:
    def apply(_budget: TemplateBudget, left: Any, right: Any) -> Any:
        _check_bits(max(_bits(left), _bits(right)))
        return function(left, right)

    return apply


def _multiply(budget: TemplateBudget, left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, _SEQUENCES) and isinstance(times, int):
            size = len(many) * max(0, times)
            if isinstance(many, str):
                budget.make(size)
                return many * times
            budget.hold(size)
            return check_size(budget, many * times)
    _check_bits(_bits(left) + _bits(right))
    return left * right


def _power(_budget: TemplateBudget, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(max(_bits(left), _bits(left) * abs(right)))
    return left**right


def _modulo(budget: TemplateBudget, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        return percent(budget, left, right)
    _check_bits(max(_bits(left), _bits(right)))
    return left % right


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise TemplateError(f"the chat template computes a number of more than {MAX_INT_BITS} bits")


OPERATORS: Mapping[str, Callable[[TemplateBudget, Any, Any], Any]] = {
    "+": _add,
    "-": _number(operator.sub),
    "*": _multiply,
    "/": _number(operator.truediv),
    "//": _number(operator.floordiv),
    "**": _power,
    "%": _modulo,
}

_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def compare(budget: TemplateBudget, name: str, left: Any, right: Any) -> Any:
    """A comparison by jinja2's name for it."""
    searches = name in ("in", "notin") and isinstance(right, str)
    budget.work(search(right, left) if searches else read(left, right))
    return _COMPARISONS[name](left, right)


def check_number(value: Any) -> None:
    """A number that a template or its values bring along."""
    _check_bits(_bits(value))
