"""The strict comparison of the tensors that a model needs with those of a checkpoint.

Knows no family: the caller says which checkpoint name and shape belongs to each of the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from ..errors import WeightError
from .source import TensorSource

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor a model asks of a checkpoint."""

    name: str  # as the checkpoint calls it
    shape: tuple[int, ...]  # torch order
    optional: bool = False
    loose: bool = False  # dimensions of one do not count
    flat: bool = False  # only the number of elements counts

    def fits(self, shape: tuple[int, ...]) -> bool:
        if self.flat:
            return prod(shape) == prod(self.shape)
        if self.loose:
            return [n for n in shape if n != 1] == [n for n in self.shape if n != 1]
        return shape == self.shape


def match(
    needed: Mapping[str, ExpectedTensor], source: TensorSource, ignored: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """Canonical name to checkpoint name for every tensor present; raises one report of all that does not fit.

    `ignored` are patterns (as in fnmatch) of tensors that may lie in the checkpoint unused.
    """
    present = source.names()
    held = frozenset(present)
    found = {canonical: need.name for canonical, need in needed.items() if need.name in held}
    missing = [need.name for need in needed.values() if need.name not in held and not need.optional]
    asked = {need.name for need in needed.values()}
    unexpected = [name for name in present if name not in asked and not _ignored(name, ignored)]
    misshapen = [
        f"{need.name} is {list(source.shape(need.name))} instead of {list(need.shape)}"
        for need in needed.values()
        if need.name in held and not need.fits(source.shape(need.name))
    ]
    if missing or unexpected or misshapen:
        raise WeightError("tensors", _report(missing, unexpected, misshapen))
    return found


def _ignored(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _report(missing: list[str], unexpected: list[str], misshapen: list[str]) -> str:
    parts = [
        f"{len(names)} {what} ({_some(names)})"
        for names, what in ((missing, "missing"), (unexpected, "unexpected"), (misshapen, "of another shape"))
        if names
    ]
    return f"the checkpoint does not fit its model: {'; '.join(parts)}"


def _some(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
