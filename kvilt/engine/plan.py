"""A step as the scheduler sees it: samples and counts, never tensors or pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# How a sample that gives its pages up comes back; the plan names it, so that swapping can join.
Return = Literal["recompute"]


@dataclass(slots=True, eq=False)
class BlendProgress:
    """A stretch of a prompt that is blended: counts of what is left of it, kept by whoever has the blending."""

    start: int  # computed tokens with which it begins
    stop: int  # and those with which it ends, all at once
    scratch: int  # tokens that may need room beside it
    begun: bool = False  # it has all its room
    left: int = 0  # tokens of the next rows, as far as is known
    ends: bool = False  # the last of them is the last of the stretch


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence in progress. The fields after `draws` are the scheduler's own to change."""

    request: str
    prompt: int  # tokens it began with
    limit: int  # with this many tokens it is over; the last of them is never computed
    index: int = 0  # which of its request's samples it is
    owner: str = ""  # the API key whose share of steps and pages it counts for
    priority: int = 0
    width: int = 1  # samples that draw from the end of the prompt, this one among them
    keys: Sequence[bytes] = ()  # for each whole page of its tokens, what the prefix index knows it by
    end_ids: frozenset[int] = frozenset()
    draws: bool = True  # False: only the KV of the prompt is wanted
    stride: int = 0  # tokens of it in one step at the most; 0: as many as there are
    scored: int = 0  # of its first tokens, those with log-probabilities: computed by itself, in rows of their own
    known: int = 0  # tokens there are, prompt and drawn
    computed: int = 0  # of them, those whose KV is there
    shared_tail: bool = False  # its begun page may be seen by others, so that the next write copies it
    drafts: int = 0  # tokens it would like to have drafted in the next step
    blend_progress: BlendProgress | None = None  # a part of the prompt that is blended
    held: bool = False  # nobody reads what it draws: it gets no row until somebody does
    waits: bool = False  # for a store, and not long: it gets no row until that has answered
    rank: tuple[int, int, int] = (0, 0, 0)  # who goes first; settled when it arrives
    planned: int = 0  # the last plan that gave it a row
    awaits: bytes | None = None  # a page that somebody else is computing for it
    blocked: int = 0  # the plan since which it waits for more pages than its owner's share has; 0: it does not
    protected: int = 0  # until this plan it gives way to no other owner

    def __post_init__(self) -> None:
        self.known = self.known or self.prompt

    @property
    def left(self) -> int:
        """Tokens that are known but not computed."""
        return self.known - self.computed

    @property
    def blends(self) -> bool:
        """Whether its next row is one of a blending."""
        return self.blend_progress is not None and self.blend_progress.start <= self.computed < self.blend_progress.stop


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a sample would find of its beginning: tokens, and pages of them that count as free until it takes them."""

    tokens: int = 0
    idle: int = 0


class PageAccounting(Protocol):
    """What a scheduler asks whoever has the pages."""

    def total(self) -> int:
        """Pages there are."""
        ...

    def free(self) -> int:
        """Pages that may be taken now."""
        ...

    def relieve(self) -> bool:
        """Free pages that nobody computes with, if there are such; False when there are no more."""
        ...

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        """What the first tokens of a waiting sample, `most` at the most, would find."""
        ...

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        """Whether a sample that could begin waits for more of its beginning to come from a store."""
        ...

    def shares_tail(self, sample: Sample) -> bool:
        """Whether others still see the begun page of a running sample."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """A sample's share of a step: the next `count` tokens behind `start`."""

    sample: Sample
    start: int
    count: int
    draws: bool  # these are the last tokens known, so their logits choose the next one
    forks: int = 0  # further samples that begin here
    drafts: int = 0  # room behind them, for as many drafts at the most


@dataclass(frozen=True, slots=True)
class Admission:
    """A sample that begins, or begins again, with what it was promised to find."""

    sample: Sample
    hit: PrefixHit


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sample that gives its pages up."""

    sample: Sample
    back_by: Return = "recompute"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: preempt, admit, work."""

    work: tuple[Work, ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    starved: Sample | None = None  # it needs pages, and nobody is left who could give any
