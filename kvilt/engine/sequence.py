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
    unforked: int  # samples that are forked off when the prompt is computed
    live: list[SequenceState] = field(default_factory=list)
    arrived_s: float = 0.0
    hold: AdapterLease | None = None  # on its adapter
    gate_decision: GateDecision | None = None  # of a quality gate on its recipe

    def release_resources(self) -> None:
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
    prefix_keys: PrefixKeys | None  # None where its KV is nobody else's business
    scoring: Scoring | None = None
    kv: KVCache | None = None
    cached: int | None = None  # tokens of the prompt that were there when it first began
    blending: Blending | None = None  # what blends its prompt, if anything does
    restored: bool = False  # whatever a store has of its beginning is here
    read: int = 0  # tokens of the prompt whose KV was there at some time
    last_s: float = 0.0  # when it drew its latest token
    draft_state: DraftState | None = None  # its drafts, once it wants some
    undrafted: bool = False  # it wants no drafts, or its drafter failed
    watch: Callable[[Tensor], None] | None = None  # hears the logits [vocab] behind the prompt's last token, once
    job: Job = field(init=False)


@dataclass(slots=True)
class PoolAccounting:
    """The scheduler's questions, answered by the pool and the prefix index."""

    executor: Executor
    seqs: Mapping[Sample, SequenceState]
    free_kept_pages: Relief
    load_prefix: Seek | None = None
    failed: list[tuple[SequenceState, Exception]] = field(default_factory=list)  # while a plan was made

    def relieve(self) -> bool:
        """Let somebody who only keeps KV for later give some up; what is pinned stays."""
        return self.free_kept_pages(False)

    def total(self) -> int:
        """Pages of each group."""
        return self.executor.pool.pages

    def free(self) -> int:
        """Pages that may be taken of every group."""
        return min(self.executor.pool.free_pages())

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        """What a sample that begins would find: its lent cache, or what the index has of its tokens."""
        return self._guarded(sample, lambda seq: self._found(seq, sample, most), PrefixHit())

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        """Whether more of its beginning is on its way from a store."""
        load_prefix = self.load_prefix
        return load_prefix is not None and self._guarded(sample, lambda seq: load_prefix(seq, hit), False)

    def end_failed(self, fail: Callable[[SequenceState, Exception], None]) -> None:
        """End the requests whose questions failed; a plan cannot do that itself."""
        failed, self.failed = self.failed, []
        for seq, error in failed:
            fail(seq, error)

    def _guarded(self, sample: Sample, ask: Callable[[SequenceState], T], otherwise: T) -> T:
        seq = self.seqs[sample]
        try:
            return ask(seq)
        except BaseException as error:
            self.failed.append((seq, contained(error)))
            return otherwise

    def _found(self, seq: SequenceState, sample: Sample, most: int) -> PrefixHit:
        if seq.job.base is not None:
            return PrefixHit(seq.job.base.num_entries)
        if seq.prefix_keys is None:
            return PrefixHit()
        if (scoring := seq.scoring) is not None and not scoring.over:
            # What is found is not computed, and has no logits.
            most = min(most, scoring.at - scoring.at % self.executor.layout.page_tokens)
        known = seq.ids if sample.blend_progress is None else seq.ids[: sample.blend_progress.start]
        seq.prefix_keys.extend(known, self.executor.layout.page_tokens)
        found = self.executor.prefixes.match(seq.prefix_keys, most)
        return PrefixHit(found.tokens, found.idle)

    def shares_tail(self, sample: Sample) -> bool:
        """Whether another cache, or the index, sees the last page of a sample."""
        kv = self.seqs[sample].kv
        tables = kv.row(0).tables if kv is not None else ()
        return any(table and self.executor.pool.holders(g, table[-1]) > 1 for g, table in enumerate(tables))
