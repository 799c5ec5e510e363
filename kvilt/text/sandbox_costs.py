"""What each thing that a chat template can do costs, in the budget's units of about a nanosecond.

A table: one entry for each filter, test and method whose time grows with its input. Costs are upper bounds for hostile
input, since one call into C runs to its end. Refuses to know template syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .budget import TemplateBudget

MAX_NUMBER_CHARS = 1024  # of a text that is read as a number
SPAN = 512  # of user text: carrying one over into a new text
_CASE, _CLASS, _TITLE, _COMPARE = 16, 4, 64, 48
Cost = Callable[..., int]  # (text, *args) -> units


def size(value: Any) -> int:
    """The length of a text or list; 1 for everything else."""
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 1


def search(text: Any, *args: Any) -> int:
    """Finding a text in another from the left: linear, however they repeat."""
    return 2 * (size(text) + sum(map(size, args)))


def search_back(text: Any, *args: Any) -> int:
    """Finding a text from the right: each place may look at all of it."""
    return size(text) * (1 + (size(args[0]) if args else 1) // 4)


def strip(text: Any, *args: Any) -> int:
    """Each character may be looked for among all that are to go."""
    return size(text) * (1 + (size(args[0]) if args and args[0] is not None else 1) // 4)


def case(text: Any, *_args: Any) -> int:
    """Upper and lower case."""
    return _CASE * size(text)


def title(text: Any, *_args: Any) -> int:
    """Case, word by word."""
    return _TITLE * size(text)


def classes(text: Any, *_args: Any) -> int:
    """Asking every character for its class."""
    return _CLASS * size(text)


def read(text: Any, *args: Any) -> int:
    """Reading, comparing or copying."""
    return size(text) + sum(map(size, args))


def sort(items: Any, *_args: Any) -> int:
    """Sorting so many items."""
    count = size(items)
    return _COMPARE * count * max(1, count.bit_length())


METHODS: Mapping[str, Cost] = {
    "strip": strip,
    "lstrip": strip,
    "rstrip": strip,
    "lower": case,
    "upper": case,
    "title": case,
    "capitalize": case,
    "startswith": read,
    "endswith": read,
    "find": search,
    "rfind": search_back,
    "index": search,
    "count": search,
    "partition": search,
    "rpartition": search_back,
    "isdigit": classes,
    "isalpha": classes,
    "isalnum": classes,
    "isspace": classes,
    "isupper": classes,
    "islower": classes,
    "isnumeric": classes,
    "isdecimal": classes,
    "removeprefix": read,
    "removesuffix": read,
    "split": search,
    "rsplit": search_back,
    "replace": lambda text, *args: 2 * search(text, *args[:1]),
}
FILTERS: Mapping[str, Cost] = {
    "capitalize": case,
    "lower": case,
    "upper": case,
    "title": title,
    "trim": strip,
    "dictsort": sort,
    "sort": sort,
    "unique": sort,
    "max": sort,
    "min": sort,
    "reverse": read,
}
TESTS: Mapping[str, Cost] = {
    "lower": classes,
    "upper": classes,
    "in": lambda item, within: search(within, item) if isinstance(within, str) else read(within, item),
}


def charge(budget: TemplateBudget, cost: Cost | None, value: Any, args: tuple[Any, ...]) -> None:
    """Account for one entry of the tables before it runs; those without an entry read their input."""
    budget.work((cost or read)(value, *args))
