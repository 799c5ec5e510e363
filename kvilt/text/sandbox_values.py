"""The values a chat template may use: their size, their text, and the methods they offer.

Every function that can make something large asks the budget first. Refuses to know template syntax.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2.runtime import Undefined
from jinja2.utils import Namespace

from ..errors import TemplateError
from .budget import TemplateBudget
from .sandbox_costs import METHODS, SPAN, charge, sort
from .user_text import UserText, has_user_text, joined, marked, spans_of

MAX_WIDTH = 1000  # of padding, indentation and number formats
Bounded = Callable[..., Any]  # (budget, value, *args, **kwargs)

_SCALARS = (str, int, float, bool, type(None), Undefined)
_PERCENT = re.compile(r"[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?.?", re.DOTALL)
_SHOWN_CHAR, _SHOWN_ITEM = 10, 64  # units of work for writing out a list; a character may take ten
_JSON_CHAR = 12
_FIELD = re.compile(r"\w*\Z")
_SPEC = re.compile(r"[^{}]*\Z")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class TemplateNamespace(Namespace):
    """`namespace()` of a template: holds values, never other namespaces, so that nothing can contain itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        if isinstance(value, Namespace):
            raise TemplateError("the chat template puts a namespace into a namespace, which is not allowed")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def check_name(name: Any) -> None:
    """Names with a leading underscore lead out of the sandbox."""
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"the chat template uses {name[:40]!r}, which is not allowed")


@dataclass(frozen=True, slots=True)
class ValueSize:
    """The size of a value, counted as a tree."""

    items: int
    chars: int
    longest: int  # of its texts


def measure(budget: TemplateBudget, value: Any) -> ValueSize:
    """Measure a value; TemplateError if all that it contains is over the limits."""
    limits = budget.limits
    stack: list[tuple[Any, int]] = [(value, 0)]
    items = chars = longest = 0
    while stack:
        part, depth = stack.pop()
        if isinstance(part, str):
            chars += len(part)
            longest = max(longest, len(part))
        elif isinstance(part, (list, tuple, dict)):
            items += len(part)
            if items > limits.items or depth > limits.depth:
                raise TemplateError("the chat template makes a value that is too large or too deeply nested")
            inside = part if not isinstance(part, dict) else [*part.keys(), *part.values()]
            stack.extend((inner, depth + 1) for inner in inside)
        elif not isinstance(part, _SCALARS):
            raise TemplateError(f"the chat template puts a {type(part).__name__} into a list, which is not allowed")
    budget.tick(1 + items // 8)
    if chars > limits.text_chars:
        raise TemplateError(f"the chat template makes a value of more than {limits.text_chars} characters")
    return ValueSize(items, chars, longest)


def check_size(budget: TemplateBudget, value: Any) -> Any:
    """Return `value` if all that it contains is within the limits."""
    measure(budget, value)
    return value


def kept(budget: TemplateBudget, value: Any) -> Any:
    """A result of a filter or method for the template: measured, and never lazy."""
    if isinstance(value, str):
        budget.make(len(value))
        budget.work(SPAN * len(spans_of(value)))
        return value
    if isinstance(value, (list, tuple, dict)):
        return check_size(budget, value)
    if isinstance(value, (*_SCALARS, Namespace)):
        budget.tick()
        return value
    if hasattr(value, "__next__"):
        return check_size(budget, _listed(budget, value))
    raise TemplateError(f"the chat template gets a {type(value).__name__}, which is not allowed")


def _listed(budget: TemplateBudget, values: Any) -> list[Any]:
    found = []
    for value in values:
        budget.tick()
        found.append(value)
        if len(found) > budget.limits.items:
            budget.hold(len(found))
    return found


def text_of(budget: TemplateBudget, value: Any) -> str:
    """How a value reads in the output."""
    if isinstance(value, str):
        return value
    if isinstance(value, _SCALARS):
        return str(value)
    if isinstance(value, (list, tuple, dict)):
        weight = measure(budget, value)
        budget.work(_SHOWN_ITEM * weight.items + _SHOWN_CHAR * weight.chars)
        return cast(str, marked(str(value), value))
    raise TemplateError(f"the chat template writes out a {type(value).__name__}, which is not allowed")


def concat(budget: TemplateBudget, parts: Any) -> str:
    """The texts of `parts` joined, after their length was accounted for."""
    texts = [text_of(budget, part) for part in parts]
    budget.make(sum(map(len, texts)))
    return spliced(budget, texts)


def join(budget: TemplateBudget, separator: str, values: Any) -> str:
    """`separator.join` over the texts of `values`."""
    if isinstance(values, str):
        budget.hold(len(values))
    texts = [text_of(budget, value) for value in values]
    budget.make(sum(map(len, texts)) + len(separator) * len(texts))
    return spliced(budget, texts, separator)


def spliced(budget: TemplateBudget, texts: Sequence[str], separator: str = "") -> str:
    """Texts joined whose characters were accounted for; their spans are work too."""
    budget.work(SPAN * (sum(len(spans_of(text)) for text in texts) + len(spans_of(separator)) * len(texts)))
    return joined(texts, separator)


def replace(budget: TemplateBudget, text: str, old: str, new: str, count: int = -1) -> str:
    """`str.replace`, its result measured beforehand."""
    old, new = text_of(budget, old), text_of(budget, new)
    charge(budget, METHODS["replace"], text, (old,))
    places = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    budget.make(len(text) + max(0, places * (len(new) - len(old))))
    text = text if not isinstance(new, UserText) or isinstance(text, UserText) else UserText(text, ())
    budget.work(SPAN * (len(spans_of(text)) + places * len(spans_of(new))))
    return text.replace(old, new, -1 if count is None else count)


def split(
    budget: TemplateBudget, text: str, sep: str | None = None, maxsplit: int = -1, *, right: bool = False
) -> list[str]:
    """`str.split` or `str.rsplit` into a bounded number of parts."""
    charge(budget, METHODS["rsplit" if right else "split"], text, () if sep is None else (sep,))
    most = budget.limits.items if maxsplit < 0 else min(maxsplit, budget.limits.items)
    budget.work(SPAN * len(spans_of(text)))
    parts = text.rsplit(sep, most) if right else text.split(sep, most)
    budget.hold(len(parts))
    budget.make(len(text))
    return parts


def rsplit(budget: TemplateBudget, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    """`str.rsplit` into a bounded number of parts."""
    return split(budget, text, sep, maxsplit, right=True)


def splitlines(budget: TemplateBudget, text: str, keepends: bool = False) -> list[str]:
    """`str.splitlines` into a bounded number of lines."""
    count_lines(budget, text)
    budget.make(len(text))
    budget.work(SPAN * len(spans_of(text)))
    return text.splitlines(keepends)


def count_lines(budget: TemplateBudget, text: str) -> int:
    """The lines of a text, which may not be more than a list holds."""
    budget.work(len(_LINE_ENDS) * len(text) // 4)
    lines = sum(text.count(end) for end in _LINE_ENDS) + 1
    budget.hold(lines)
    return lines


def _padded(method: Callable[..., str]) -> Bounded:
    def pad(budget: TemplateBudget, text: str, width: int = 80, *fill: str) -> str:
        check_width(width)
        budget.make(max(len(text), width))
        return method(text, width, *fill)

    return pad


center, ljust, rjust, zfill = (_padded(method) for method in (str.center, str.ljust, str.rjust, str.zfill))


def check_width(width: Any) -> None:
    """Widths come from templates; a wide one is an attack."""
    if not isinstance(width, int) or width > MAX_WIDTH:
        raise TemplateError(f"the chat template asks for a width of more than {MAX_WIDTH}")


def percent(budget: TemplateBudget, text: str, values: Any) -> str:
    """`text % values` with bounded widths."""
    budget.work(2 * len(text))
    fields = []
    for field, sizes in _percent_fields(text):
        fields.append(field)
        budget.tick()
        if "*" in sizes or any(len(n) > 4 or int(n or 0) > MAX_WIDTH for n in sizes):
            raise TemplateError(f"the chat template asks for a width of more than {MAX_WIDTH}")
    budget.make(len(text) + len(fields) * (MAX_WIDTH + _widest(budget, values)))
    whole = str(text % values)
    if isinstance(text, UserText) or not has_user_text(values):
        return whole
    return spliced(budget, list(_percent_pieces(text, fields, values)))


def _percent_pieces(text: str, fields: Sequence[tuple[int, int]], values: Any) -> Iterator[str]:
    """What `text % values` writes, with each field by itself."""
    following = iter(values if isinstance(values, tuple) else (values,))
    at = 0
    for start, end in fields:
        field = text[start:end]
        yield text[at:start]
        if field.endswith("%"):
            yield "%"
        elif field.startswith("%("):
            yield marked(field % values, values[field[2 : field.index(")")]])
        else:
            value = next(following)
            yield marked(field % (value,), value)
        at = end
    yield text[at:]


def _percent_fields(text: str) -> Iterator[tuple[tuple[int, int], tuple[str, str]]]:
    """The place of each field, and its width and precision; every character is looked at once."""
    at = text.find("%")
    while at >= 0:
        start = at
        if text.startswith("(", at + 1):
            close = text.find(")", at)
            if close < 0 or "(" in text[at + 2 : close]:
                raise TemplateError("the chat template formats by a name without an end, or with parentheses in it")
            at = close
        field = _PERCENT.match(text, at + 1)
        assert field is not None, "it matches nothing at least"
        yield (start, field.end()), (field[1] or "", field[2] or "")
        at = text.find("%", max(field.end(), at + 2))


def brace(budget: TemplateBudget, text: str, *args: Any, **kwargs: Any) -> str:
    """`text.format(...)` with plain field names and bounded widths."""
    budget.work(4 * len(text))
    fields = 0
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is None:
            continue
        fields += 1
        budget.tick()
        if not _FIELD.match(name) or not _SPEC.match(spec or ""):
            raise TemplateError("the chat template uses a format field that is more than a name")
        if any(len(n) > 4 or int(n) > MAX_WIDTH for n in re.findall(r"\d+", spec or "")):
            raise TemplateError(f"the chat template asks for a width of more than {MAX_WIDTH}")
    budget.make(len(text) + fields * (MAX_WIDTH + _widest(budget, (*args, *kwargs.values()))))
    whole = text.format(*args, **kwargs)
    if isinstance(text, UserText) or not has_user_text((args, kwargs)):
        return whole
    return spliced(budget, list(_brace_pieces(text, args, kwargs)))


def _brace_pieces(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """What `text.format` writes, with each field by itself."""
    following = iter(args)
    for literal, name, spec, conversion in string.Formatter().parse(text):
        yield literal
        if name is not None:
            value = next(following) if not name else args[int(name)] if name.isdigit() else kwargs[name]
            field = "{0" + (f"!{conversion}" if conversion else "") + f":{spec}}}"
            yield marked(field.format(value), value)


def _widest(budget: TemplateBudget, values: Any) -> int:
    """The most characters that one of the values can take in a format."""
    if isinstance(values, dict):
        values = tuple(values.values())
    shown = (text_of(budget, value) for value in (values if isinstance(values, tuple) else (values,)))
    return max(map(len, shown), default=0)


def tojson(
    budget: TemplateBudget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise TemplateError("the chat template asks tojson for an indent of more than 16")
    separators = None if separators is None else tuple(separators)
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    weight = measure(budget, value)
    budget.work(_JSON_CHAR * weight.chars, call=_JSON_CHAR * weight.longest)
    if sort_keys:
        budget.work(sort([None] * weight.items))
    parts, chars = [], 0
    for part in encoder.iterencode(value):
        chars += len(part)
        budget.make(chars if chars > budget.limits.text_chars else len(part))
        parts.append(part)
    return "".join(parts)


def _plain(name: str, kind: type = str) -> Bounded:
    cost = METHODS.get(name) if kind is str else None

    def call(budget: TemplateBudget, value: Any, *args: Any, **kwargs: Any) -> Any:
        charge(budget, cost, value, (*args, *kwargs.values()))
        return kept(budget, getattr(value, name)(*args, **kwargs))

    return call


def _view(method: Callable[[dict[Any, Any]], Any]) -> Bounded:
    return lambda budget, value: check_size(budget, list(method(value)))


_STR_PLAIN = (
    "strip lstrip rstrip lower upper title capitalize startswith endswith find rfind index count isdigit isalpha "
    "isalnum isspace isupper islower isnumeric isdecimal removeprefix removesuffix partition rpartition"
)
_STR: Mapping[str, Bounded] = {
    **{name: _plain(name) for name in _STR_PLAIN.split()},
    "split": split,
    "rsplit": rsplit,
    "splitlines": splitlines,
    "replace": replace,
    "join": join,
    "format": brace,
    "center": center,
    "ljust": ljust,
    "rjust": rjust,
    "zfill": zfill,
}
_DICT: Mapping[str, Bounded] = {
    "items": _view(dict.items),
    "keys": _view(dict.keys),
    "values": _view(dict.values),
    "get": lambda _budget, value, *args: dict.get(value, *args),
    "copy": _plain("copy", dict),
}
_LIST: Mapping[str, Bounded] = {name: _plain(name, list) for name in ("index", "count", "copy")}
_TUPLE: Mapping[str, Bounded] = {name: _plain(name, tuple) for name in ("index", "count")}


def methods_of(value: Any) -> Mapping[str, Bounded]:
    """The methods a template may call on `value`."""
    for kind, table in ((str, _STR), (dict, _DICT), (list, _LIST), (tuple, _TUPLE)):
        if isinstance(value, kind):
            return table
    return {}
