"""How much a run tries: a few examples of each law by default, all of them with --slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# No law depends on how fast the machine is.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def load(slow: bool) -> None:
    """Choose for the whole run, before any test module is imported."""
    settings.register_profile("slow", max_examples=100, **UNTIMED)
    settings.register_profile("brief", max_examples=examples(100), **UNTIMED)
    settings.load_profile("slow" if slow else "brief")


def examples(full: int) -> int:
    """So many examples with --slow, a fifth of them otherwise, but ten at least."""
    return full if settings.get_current_profile_name() == "slow" else min(full, max(10, full // 5))


def some(values: Iterable[Any], keep: int = 1) -> list[Any]:
    """Parameters of which the default run takes the first few, and --slow the others; a tuple is a set of several."""
    sets = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=[pytest.mark.slow] * (at >= keep)) for at, each in enumerate(sets)]
