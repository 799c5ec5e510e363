"""Text inside a chat template that knows which of its characters came from outside of the template.

A special token counts only where the template wrote all of it. `UserText` is a str to the template, which sees the
caller's text as it is, and every part that is cut or built from it knows its spans. What has no exact rule here is
marked as the caller's altogether (`marked`), so that a method without a rule can hide a special token, never make one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

Span = tuple[int, int]  # start and end


class UserText(str):
    """A str with the spans that the caller wrote: ascending, apart from each other, none of them empty."""

    spans: tuple[Span, ...]
    __slots__ = ("spans",)

    def __new__(cls, text: str, spans: Sequence[Span] | None = None) -> UserText:
        """All of `text` is the caller's unless `spans` say otherwise."""
        own = super().__new__(cls, text)
        own.spans = tuple(spans) if spans is not None else ((0, len(text)),) if text else ()
        return own

    def __str__(self) -> str:
        return self  # jinja2 asks for the str of every output

    def __repr__(self) -> str:
        return repr(plain(self))

    def __getitem__(self, key: SupportsIndex | slice) -> UserText:
        if not isinstance(key, slice):
            at = range(len(self))[key]
            return self._between(at, at + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return self._between(start, stop)
        return _spliced([self._between(at, at + 1) for at in range(start, stop, step)])

    def __iter__(self) -> Iterator[UserText]:
        return (self._between(at, at + 1) for at in range(len(self)))

    def __add__(self, other: str) -> UserText:
        return _spliced((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> UserText:
        return _spliced((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> UserText:
        return _spliced([self] * int(times))

    __rmul__ = __mul__

    def strip(self, chars: str | None = None, /) -> UserText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> UserText:
        return self._between(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> UserText:
        return self._between(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> UserText:
        return self._between(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str, /) -> UserText:
        return self._between(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def partition(self, sep: str, /) -> tuple[UserText, UserText, UserText]:
        return self._cut_at(self._places(super().partition(sep)))

    def rpartition(self, sep: str, /) -> tuple[UserText, UserText, UserText]:
        return self._cut_at(self._places(super().rpartition(sep)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # type: ignore[override]
        return self._found_again(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[UserText]:  # type: ignore[override]
        return self._found_again(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[UserText]:  # type: ignore[override]
        whole = self._places(super().splitlines(True))
        shown = super().splitlines(keepends)
        return [self._between(start, start + len(line)) for (start, _), line in zip(whole, shown, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> UserText:
        if not old:  # between all characters
            return _spread(self, new, int(count)) if new else self
        pieces: list[str] = []
        for part in self.split(old, count):
            pieces += [part, new]
        return _spliced(pieces[:-1])

    def lower(self) -> UserText:
        return self._same_places(super().lower())

    def upper(self) -> UserText:
        return self._same_places(super().upper())

    def capitalize(self) -> UserText:
        return self._same_places(super().capitalize())

    def _between(self, start: int, end: int) -> UserText:
        """This part, with what the spans are in it."""
        if end <= start:
            return UserText("", ())
        first = bisect_right(self.spans, (start, 0))
        first -= first > 0 and self.spans[first - 1][1] > start
        spans = []
        for left, right in self.spans[first:]:
            if left >= end:
                break
            spans.append((max(left, start) - start, min(right, end) - start))
        return UserText(super().__getitem__(slice(start, end)), spans)

    def _places(self, parts: Iterable[str]) -> list[Span]:
        """Where parts stand that follow each other without a gap."""
        places, at = [], 0
        for part in parts:
            places.append((at, at + len(part)))
            at += len(part)
        return places

    def _cut_at(self, places: Sequence[Span]) -> tuple[UserText, UserText, UserText]:
        first, second, third = (self._between(*place) for place in places)
        return first, second, third

    def _found_again(self, parts: Sequence[str], sep: str | None) -> list[UserText]:
        """Where the parts stand that a split gave."""
        found, at = [], 0
        for part in parts:
            at = at if sep is not None else self.find(part, at)  # between them is white space, with which none begins
            found.append(self._between(at, at + len(part)))
            at += len(part) + len(sep or "")
        return found

    def _same_places(self, text: str) -> UserText:
        """A text of the same characters in another case; where their number has changed it is all the caller's."""
        return UserText(text, self.spans if len(text) == len(self) else None)


def _spread(text: UserText, new: str, count: int) -> UserText:
    """`text` with `new` before each of its first characters and at its end, as str.replace does with an empty text."""
    times = len(text) + 1 if count < 0 else min(count, len(text) + 1)
    pieces: list[str] = []
    for at in range(len(text)):
        pieces += [new, text[at]] if at < times else [text[at]]
    return _spliced([*pieces, new] if times > len(text) else pieces)


def plain(text: str) -> str:
    """The same text without spans."""
    return str.__str__(text) if type(text) is not str else text


def spans_of(text: str) -> tuple[Span, ...]:
    """What of a text the caller wrote."""
    return text.spans if isinstance(text, UserText) else ()


def joined(parts: Sequence[str], separator: str = "") -> str:
    """`separator.join(parts)`; a UserText if any of them is one."""
    if not any(isinstance(part, UserText) for part in (*parts, separator)):
        return separator.join(parts)
    return _spliced(parts, separator)


def _spliced(parts: Sequence[str], separator: str = "") -> UserText:
    spans: list[Span] = []
    at = 0
    for index, part in enumerate(parts):
        for text in (separator, part) if index else (part,):
            for start, end in spans_of(text):
                if spans and spans[-1][1] == at + start:
                    spans[-1] = (spans[-1][0], at + end)
                else:
                    spans.append((at + start, at + end))
            at += len(text)
    return UserText(str.join(plain(separator), map(plain, parts)), spans)


def marked(result: Any, *given: Any) -> Any:
    """A result of something without a rule for spans: the caller's altogether if any text of the caller went in."""
    return UserText(result) if type(result) is str and any(map(has_user_text, given)) else result


def has_user_text(value: Any) -> bool:
    """Whether any text in a value has characters that the caller wrote."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, UserText) and part.spans:
            return True
        if isinstance(part, dict):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            stack += part
    return False
