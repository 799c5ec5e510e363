"""What every drafter is: it is told of samples, and proposes what they may draw next.

A draft is accepted only where it is what the sample draws anyway, so a drafter can make nothing wrong, only slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..sampling.sampler import SamplingState


@dataclass(slots=True, eq=False)
class DraftContext:
    """One sample as a drafter sees it."""

    ids: Sequence[int]  # prompt and drawn; grows in place, and never shrinks
    state: SamplingState  # how it draws: a drafter may advance it, and takes back what it advanced
    memory: Any = None  # the drafter's own
    predicted: Sequence[int] = ()  # what the caller expects the answer to repeat


@dataclass(frozen=True, slots=True)
class Draft:
    """The next tokens of one sample, perhaps none."""

    tokens: Sequence[int] = ()
    grade: int = 0  # how sure its drafter is; what becomes of drafts is counted apart for each grade
    read: int = 0  # tokens of the prompt it had to read first; what that took is no draft's price


@runtime_checkable
class Drafter(Protocol):
    """Prompt lookup, a draft model, heads that were trained with the model. Belongs to the thread that steps."""

    @property
    def most(self) -> int:
        """Tokens it drafts at the most for a request that says nothing of it."""
        ...

    @property
    def hopes(self) -> Sequence[float]:
        """For each grade how likely one more token of a draft is accepted, until that is known better."""
        ...

    def begin(self, ids: Sequence[int], state: SamplingState, parent: DraftContext | None = None) -> DraftContext:
        """A sample that may want drafts; `parent` is the one it was forked off."""
        ...

    def propose(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> list[Draft]:
        """What each sample may draw next: `k` tokens at the most, or fewer, or none."""
        ...

    def forget(self, draft_context: DraftContext) -> None:
        """A sample is over."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
