"""What the engine holds of a request while it runs, and what the scheduler may ask about it in counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ..blend.blender import Blending
from ..blend.quality_gate import GateDecision
from ..executor.executor import Executor
from ..executor.lora import AdapterLease
from ..kv.cache import KVCache
from ..kv.prefix_keys import PrefixKeys
from ..sampling.sampler import SamplingState
from .drafting import DraftState
from .event import Listener
from .isolation import contained
from .plan import PrefixHit, Sample
from .request import Request
from .scoring import Scoring

T = TypeVar("T")
# Frees KV that is only kept for later, if there is any; also what is pinned, if told so.
Relief = Callable[[bool], bool]
# Looks elsewhere for more of a prompt's beginning than was found here; False where nobody need wait for that.
Seek = Callable[["SequenceState", PrefixHit], bool]


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress: checked, with everything it brought along."""

    request: Request
    listener: Listener
    first: SequenceState
    base: KVCache | None  # the cache it was lent, held to the end: whoever is preempted starts from it again
    capacity: int  # tokens a sample may have
    unborn: int  # samples that are forked off when the prompt is computed
    live: list[SequenceState] = field(default_factory=list)
    arrived_s: float = 0.0
    hold: AdapterLease | None = None  # on its adapter
    verdict: GateDecision | None = None  # of a quality gate on its recipe

    def let_go(self) -> None:
        """Give back what it was lent; twice is fine."""
        if self.base is not None:
            self.base.close()
        if self.hold is not None:
            self.hold.release()


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sample: its tokens, its KV while it has any, its way through the prefix index, its sampling state."""

    sample: Sample
    ids: list[int]  # prompt and drawn
    state: SamplingState | None  # None where nothing is drawn
    trail: PrefixKeys | None  # None where its KV is nobody else's business
    scoring: Scoring | None = None
    kv: KVCache | None = None
    cached: int | None = None  # tokens of the prompt that were there when it first began
    blending: Blending | None = None  # what blends its prompt, if anything does
    sought: bool = False  # whatever a store has of its beginning is here
    read: int = 0  # tokens of the prompt whose KV was there at some time
    last_s: float = 0.0  # when it drew its latest token
    course: DraftState | None = None  # its drafts, once it wants some
    undrafted: bool = False  # it wants no drafts, or its drafter failed
    watch: Callable[[Tensor], None] | None = None  # hears the logits [vocab] behind the prompt's last token, once
    job: Job = field(init=False)


@dataclass(slots=True)
class PoolAccounting:
    """The scheduler's questions, answered by the pool and the prefix index."""

    executor: Executor
    tracks: Mapping[Sample, SequenceState]
    relief: Relief
    seek: Seek | None = None
    failed: list[tuple[SequenceState, Exception]] = field(default_factory=list)  # while a plan was made

    def relieve(self) -> bool:
        """Let somebody who only keeps KV for later give some up; what is pinned stays."""
        return self.relief(False)

    def total(self) -> int:
        """Pages of each group."""
        return self.executor.pool.pages

    def free(self) -> int:
        """Pages that may be taken of every group."""
        return min(self.executor.pool.free_pages())

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        """What a sample that begins would find: its lent cache, or what the index has of its tokens."""
        return self._guarded(sample, lambda track: self._found(track, sample, most), PrefixHit())

    def seeks(self, sample: Sample, hit: PrefixHit) -> bool:
        """Whether more of its beginning is on its way from a store."""
        seek = self.seek
        return seek is not None and self._guarded(sample, lambda track: seek(track, hit), False)

    def end_failed(self, fail: Callable[[SequenceState, Exception], None]) -> None:
        """End the requests whose questions failed; a plan cannot do that itself."""
        failed, self.failed = self.failed, []
        for track, error in failed:
            fail(track, error)

    def _guarded(self, sample: Sample, ask: Callable[[SequenceState], T], otherwise: T) -> T:
        track = self.tracks[sample]
        try:
            return ask(track)
        except BaseException as error:
            self.failed.append((track, contained(error)))
            return otherwise

    def _found(self, track: SequenceState, sample: Sample, most: int) -> PrefixHit:
        if track.job.base is not None:
            return PrefixHit(track.job.base.num_entries)
        if track.trail is None:
            return PrefixHit()
        if (scoring := track.scoring) is not None and not scoring.over:
            # What is found is not computed, and has no logits.
            most = min(most, scoring.at - scoring.at % self.executor.layout.page_tokens)
        known = track.ids if sample.detour is None else track.ids[: sample.detour.start]
        track.trail.extend(known, self.executor.layout.page_tokens)
        found = self.executor.prefixes.match(track.trail, most)
        return PrefixHit(found.tokens, found.idle)

    def shares_tail(self, sample: Sample) -> bool:
        """Whether another cache, or the index, sees the last page of a sample."""
        kv = self.tracks[sample].kv
        tables = kv.row(0).tables if kv is not None else ()
        return any(table and self.executor.pool.holders(g, table[-1]) > 1 for g, table in enumerate(tables))
