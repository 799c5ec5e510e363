"""Operators of chat templates, measured before they run: none can make a huge text, list or number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import TemplateError
from .budget import Budget
from .sandbox_values import MAX_INT_BITS, percent, weigh

_SEQUENCES = (str, list, tuple)


def _add(budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        budget.make(len(left) + len(right))
        return left + right
    if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
        budget.hold(len(left) + len(right))
        return weigh(budget, operator.add(left, right))
    return left + right


def _multiply(budget: Budget, left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, _SEQUENCES) and isinstance(times, int):
            size = len(many) * max(0, times)
            if isinstance(many, str):
                budget.make(size)
                return many * times
            budget.hold(size)
            return weigh(budget, many * times)
    _check_bits(_bits(left) + _bits(right))
    return left * right


def _power(_budget: Budget, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(_bits(left) * abs(right))
    return left**right


def _modulo(budget: Budget, left: Any, right: Any) -> Any:
    return percent(budget, left, right) if isinstance(left, str) else left % right


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise TemplateError(f"the chat template computes a number of more than {MAX_INT_BITS} bits")


def _plain(function: Callable[[Any, Any], Any]) -> Callable[[Budget, Any, Any], Any]:
    return lambda _budget, left, right: function(left, right)


OPERATORS: Mapping[str, Callable[[Budget, Any, Any], Any]] = {
    "+": _add,
    "-": _plain(operator.sub),
    "*": _multiply,
    "/": _plain(operator.truediv),
    "//": _plain(operator.floordiv),
    "**": _power,
    "%": _modulo,
}
