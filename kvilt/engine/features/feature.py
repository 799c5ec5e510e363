"""The protocol of the engine's features, and what they may propose.

A feature keeps its own records of sequences and writes no field of theirs. It returns proposals. The scheduler applies
those about the schedule, the engine applies the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ...errors import PoolExhausted
from ..event import Listener
from ..forward import Result, RowTask
from ..request import Request
from ..scheduling.plan import Sample, StepPlan
from ..scheduling.proposals import ScheduleProposal
from ..sequence import SequenceState
from .blend_decision import OnLogits

Sequences = Mapping[Sample, SequenceState]  # all that are in progress
MakeRow = Callable[[], RowTask | None]  # None: the row waits for a later step
# Why a feature forgets a sequence: it gives its pages up and may start again; it is over; its KV may be wrong as well.
Forgotten = Literal["preempted", "ended", "unsound"]


@dataclass(frozen=True, slots=True)
class Requeue:
    """A sequence found no room for what it was promised: it waits again. If no other one runs, it fails."""

    seq: SequenceState
    error: PoolExhausted


@dataclass(frozen=True, slots=True)
class Fail:
    """A sequence ends with an error."""

    seq: SequenceState
    error: Exception


@dataclass(frozen=True, slots=True)
class Submit:
    """A request of the feature's own, for which no caller waits. If it is refused, its listener gets the error."""

    request: Request
    listener: Listener
    on_first_logits: OnLogits | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends now, unless it has ended already."""

    request: str


Proposal = ScheduleProposal | Requeue | Fail | Submit | Abort


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step after its forward and before its commit. Where a row was not run, its task and result are None."""

    plan: StepPlan
    tasks: Sequence[RowTask | None]
    results: Sequence[Result | None]

    def committed(self, drawn: Sequence[Sequence[int] | None]) -> list[Result | None]:
        """The results of the rows that drew these tokens; one that was not committed drew None."""
        return [result for result, tokens in zip(self.results, drawn, strict=True) if tokens is not None]


class Feature(Protocol):
    """One feature of an engine. The engine calls it in the thread that steps.

    A feature names `Feature` as its base class and overrides what it needs. What a method raises about one sequence it
    returns as a proposal; what it raises ends the step.
    """

    @property
    def has_ready(self) -> bool:
        """Whether the next plan could do more than the last one because of this feature."""
        return False

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which that is so in any case; None where no sequence waits for this feature."""
        return None

    @property
    def reads_tokens(self) -> bool:
        """Whether `before_plan` and `rows` read the tokens of sequences, so that steps cannot overlap."""
        return False

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        """A plan is about to be made."""
        return ()

    def begin(self, seq: SequenceState) -> Iterable[Proposal]:
        """A sequence has its cache, and computes from now on. What this raises ends the sequence."""
        return ()

    def rows(self, plan: StepPlan, seqs: Sequences) -> Mapping[Sample, MakeRow]:
        """For planned work whose row is not simply its next tokens: what makes the row.

        What making a row raises ends its sequence.
        """
        return {}

    def after_step(self, step: FinishedStep, seqs: Sequences) -> Iterable[Proposal]:
        """The rows of a step were computed; their tokens are committed next."""
        return ()

    def forget(self, seq: SequenceState, why: Forgotten) -> None:
        """A sequence has ended, or was preempted."""
        return None  # noqa: RET501 (an empty body would make the method abstract)

    def stop(self) -> Iterable[Proposal]:
        """All requests are about to end."""
        return ()
