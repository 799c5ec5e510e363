"""What features propose about the schedule. The scheduler alone applies it, and alone writes the state of samples.

Frozen values in counts, never tensors or pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .plan import BlendProgress, Sample


@dataclass(frozen=True, slots=True)
class WantDrafts:
    """How many drafts samples would like to have in the next step. A sample that is not named wants none."""

    counts: Mapping[Sample, int]


@dataclass(frozen=True, slots=True)
class WaitForStore:
    """Whether a sample waits for a store: it gets no row until the store has answered, or took too long."""

    sample: Sample
    waits: bool


@dataclass(frozen=True, slots=True)
class AdvanceBlend:
    """What is left of the blended part of a prompt."""

    sample: Sample
    progress: BlendProgress


@dataclass(frozen=True, slots=True)
class HoldRows:
    """Whether a sample gets no row until it is resumed."""

    sample: Sample
    held: bool


ScheduleProposal = WantDrafts | WaitForStore | AdvanceBlend | HoldRows
