"""Counters, gauges and histograms on an object that is passed in.

Names, help and buckets stand in declarations that an exporter can read; refuses to know exporters and formats.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .errors import ParamError

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Label values may come from requests: past the cap all new ones share this one.
OTHER = "other"

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_Key: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that is what it is now."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution, counted in buckets whose upper bounds are inclusive; a last one without bound is implied."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS_S


Declaration: TypeAlias = Counter | Gauge | Histogram


@dataclass(slots=True)
class _Spread:
    counts: list[int]  # [buckets + 1], not cumulative
    sum: float = 0.0


@dataclass(slots=True)
class _Series:
    """All label sets of one declaration; `numbers` or `spreads`, by its kind."""

    numbers: dict[_Key, float] = field(default_factory=dict)
    spreads: dict[_Key, _Spread] = field(default_factory=dict)


class Metrics:
    """The values of a fixed set of declarations; every method may be called from any thread."""

    def __init__(self, declarations: Sequence[Declaration], max_label_sets: int = 100) -> None:
        self._lock = threading.Lock()
        self._max_label_sets = max_label_sets
        self._series: dict[Declaration, _Series] = {}
        names: set[str] = set()
        for declaration in declarations:
            _check(declaration, names)
            names.add(declaration.name)
            self._series[declaration] = _Series()

    @property
    def declarations(self) -> tuple[Declaration, ...]:
        """What this object counts, in the order it was declared."""
        return tuple(self._series)

    def add(self, counter: Counter, amount: float = 1, /, **labels: str) -> None:
        """Let a counter grow by `amount`, which is not negative."""
        _check_kind(counter, Counter, "add")
        if not 0 <= amount < math.inf:
            raise ParamError(counter.name, f"a counter grows by a finite amount of at least 0, not {amount}")
        with self._lock:
            numbers = self._of(counter).numbers
            key = self._key(counter, numbers, labels)
            numbers[key] = numbers.get(key, 0) + amount

    def set(self, gauge: Gauge, value: float, /, **labels: str) -> None:
        """Say what a gauge is now."""
        _check_kind(gauge, Gauge, "set")
        with self._lock:
            numbers = self._of(gauge).numbers
            numbers[self._key(gauge, numbers, labels)] = value

    def observe(self, histogram: Histogram, value: float, /, **labels: str) -> None:
        """Count one value in its bucket."""
        self.observe_all(histogram, (value,), **labels)

    def observe_all(self, histogram: Histogram, values: Sequence[float], /, **labels: str) -> None:
        """Count several values, each in its bucket."""
        _check_kind(histogram, Histogram, "observe")
        if not values:
            return
        for value in values:
            if not math.isfinite(value):
                raise ParamError(histogram.name, f"a histogram takes finite values, not {value}")
        with self._lock:
            spreads = self._of(histogram).spreads
            key = self._key(histogram, spreads, labels)
            spread = spreads.setdefault(key, _Spread([0] * (len(histogram.buckets) + 1)))
            for value in values:
                spread.counts[bisect_left(histogram.buckets, value)] += 1
            spread.sum += sum(values)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Every metric by name, of one moment, as plain values that later changes do not touch."""
        with self._lock:
            return {declaration.name: _plain(declaration, series) for declaration, series in self._series.items()}

    def _of(self, declaration: Declaration) -> _Series:
        series = self._series.get(declaration)
        if series is None:
            raise ParamError(declaration.name, "is not declared here; pass its declaration to Metrics")
        return series

    def _key(self, declaration: Declaration, taken: dict[_Key, Any], labels: dict[str, str]) -> _Key:
        """The label values in declared order; all `other` once too many different ones were seen."""
        if not labels and not declaration.labels:
            return ()
        if labels.keys() != set(declaration.labels):
            wanted = ", ".join(declaration.labels) or "none"
            raise ParamError(declaration.name, f"takes the labels {wanted}, not {', '.join(sorted(labels)) or 'none'}")
        key = tuple(str(labels[name]) for name in declaration.labels)
        if key in taken or len(taken) < self._max_label_sets:
            return key
        return (OTHER,) * len(declaration.labels)


def _check(declaration: Declaration, names: set[str]) -> None:
    for name in (declaration.name, *declaration.labels):
        if not _NAME.fullmatch(name):
            raise ParamError(name, "is no metric or label name; use letters, digits and underscores")
    if declaration.name in names:
        raise ParamError(declaration.name, "is declared twice; give each metric its own name")
    if isinstance(declaration, Histogram):
        bounds = declaration.buckets
        if not bounds or any(not math.isfinite(bound) for bound in bounds) or list(bounds) != sorted(set(bounds)):
            raise ParamError(declaration.name, "buckets must be finite numbers in ascending order, at least one")


def _check_kind(declaration: Declaration, kind: type, verb: str) -> None:
    if not isinstance(declaration, kind):
        raise ParamError(declaration.name, f"{verb} takes a {kind.__name__}, not a {type(declaration).__name__}")


def _plain(declaration: Declaration, series: _Series) -> dict[str, Any]:
    if isinstance(declaration, Histogram):
        values = [(key, _plain_spread(declaration, spread)) for key, spread in series.spreads.items()]
    else:
        values = [(key, {"value": number}) for key, number in series.numbers.items()]
    return {
        "kind": type(declaration).__name__.lower(),
        "help": declaration.help,
        "series": [{"labels": dict(zip(declaration.labels, key, strict=True)), **value} for key, value in values],
    }


def _plain_spread(histogram: Histogram, spread: _Spread) -> dict[str, Any]:
    """Counts up to each bound, bounds included, as exporters want them."""
    total, buckets = 0, []
    for bound, count in zip((*histogram.buckets, math.inf), spread.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return {"buckets": buckets, "sum": spread.sum, "count": total}
