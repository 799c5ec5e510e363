"""A step as the scheduler sees it: samples and counts, never tensors or pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

# How a preempted sample comes back; the plan names it, so that swapping can be added.
Return = Literal["recompute"]


@dataclass(frozen=True, slots=True)
class BlendProgress:
    """A stretch of a prompt that is blended: counts of what is left of it."""

    start: int  # the first position of the stretch
    stop: int  # the position after its last; all of it counts as computed at once, at its end
    scratch: int  # tokens of documents that may need pages while they are computed
    begun: bool = False  # all its pages are reserved
    left: int = 0  # tokens of the next rows, as far as is known
    ends: bool = False  # the last of them is the last of the stretch

    @property
    def restarted(self) -> BlendProgress:
        """The same stretch before its beginning."""
        return BlendProgress(self.start, self.stop, self.scratch)


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence in progress, in counts. Only the scheduler writes its fields; features propose."""

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
    max_step_tokens: int = 0  # the most of its tokens in one step; 0: no limit
    scored: int = 0  # of its first tokens, those with log-probabilities: computed by itself, in rows of their own
    known: int = 0  # tokens there are, prompt and drawn
    computed: int = 0  # of them, those whose KV is there
    shared_tail: bool = False  # its last page, partly filled, may be shared, so that the next write copies it
    blend_progress: BlendProgress | None = None  # a part of the prompt that is blended
    held: bool = False  # its reader is behind or gone: it gets no row until it is resumed
    waits_for_store: bool = False  # and not long: it gets no row until the store has answered
    rank: tuple[int, int, int] = (0, 0, 0)  # the smallest goes first; fixed when it arrives
    last_planned: int = 0  # the last plan that gave it a row
    awaited_page: bytes | None = None  # the key of a page that another sample is computing
    blocked_since: int = 0  # the plan since which it waits for more pages than its owner's share; 0: it does not
    protected_until: int = 0  # until this plan no other owner preempts it

    def __post_init__(self) -> None:
        self.known = self.known or self.prompt

    @property
    def uncomputed(self) -> int:
        """Tokens that are known, and whose KV is not computed."""
        return self.known - self.computed

    @property
    def is_blending(self) -> bool:
        """Whether its next row belongs to a blending."""
        return self.blend_progress is not None and self.blend_progress.start <= self.computed < self.blend_progress.stop


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The prefix a sample would find: its tokens, and those of its pages that count as free until then."""

    tokens: int = 0
    idle: int = 0


# Pages of each layer group. A step takes as many of every group. Between steps a window group has fewer in use.
Pages = Sequence[int]


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one layer group."""

    total: int
    window: int | None = None  # the most that a sample holds between two steps; None: it keeps all


class PageAccounting(Protocol):
    """What the scheduler asks of the page pool and the prefix index."""

    def groups(self) -> Sequence[GroupPages]:
        """The layer groups; they do not change."""
        ...

    def free(self) -> Pages:
        """Pages that may be taken now."""
        ...

    def reclaim(self) -> bool:
        """Free pages that no sample computes with, if there are such; False when there are no more."""
        ...

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        """What the first tokens of a waiting sample, `most` at the most, would find."""
        ...

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        """Whether a sample that could start waits for more of its prefix from a store."""
        ...

    def startable(self) -> int | None:
        """How many more samples have slots for their recurrent states; None: there is no such limit."""
        ...

    def lacks_states(self) -> bool:
        """Whether a running sample has no slot for its next recurrent state."""
        ...

    def shares_tail(self, sample: Sample) -> bool:
        """Whether the last page of a running sample is still shared."""
        ...


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class Work:
    """A sample's part of a step: `count` tokens from position `start` on."""

    sample: Sample
    start: int
    count: int
    draws: bool  # these are the last tokens known, so their logits choose the next one
    forks: int = 0  # further samples that are forked after this row
    drafts: int = 0  # room after them for at most this many drafts


@dataclass(frozen=True, slots=True)
class Admission:
    """A sample that starts, or starts again, with the prefix it was promised."""

    sample: Sample
    hit: PrefixHit


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sample that gives its pages up."""

    sample: Sample
    back_by: Return = "recompute"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: preempt, admit, work."""

    work: tuple[Work, ...] = ()
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Preemption, ...] = ()
    starved: Sample | None = None  # it needs pages, and no sample is left that could be preempted
