"""What the engine holds of a request while it runs, and the counts of it that the scheduler asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from ..batch import SampledIds
from ..blend.blender import Blending
from ..executor.lora import AdapterLease
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..kv.prefix_keys import PrefixKeys
from ..kv.row import Token
from ..kv.row_states import ROW_STATES
from ..sampling.sampler import SamplingState
from .event import DraftCounts, Listener
from .features.blend_decision import BlendDecision, OnLogits
from .isolation import contained
from .misses.miss import PrefixMiss
from .misses.past_prompts import PromptComparison
from .pooling import Pooling
from .request import Request
from .scheduling.plan import GroupPages, Pages, PrefixHit, Sample
from .scoring import Scoring

T = TypeVar("T")
# Frees KV that is only kept for later, if there is any; also pinned KV, if the argument is True.
ReclaimPages = Callable[[bool], bool]
# Starts to load more of a prompt's prefix from a store than was found here; False where there is nothing to wait for.
LoadPrefix = Callable[["SequenceState", PrefixHit], bool]


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress: checked, with everything it brought along."""

    request: Request
    listener: Listener
    first: SequenceState
    base: KVCache | None  # the borrowed cache, held to the end: a preempted sequence starts from it again
    capacity: int  # tokens a sample may have
    unforked: int  # samples that are forked when the prompt is computed
    live: list[SequenceState] = field(default_factory=list)
    arrived_s: float = 0.0
    adapter_lease: AdapterLease | None = None
    blend_decision: BlendDecision | None = None  # None where it has no documents, or where that is not worth it
    explained: bool = False
    miss: PrefixMiss | None = None  # why its prompt reused no more, once that is explained
    comparison: PromptComparison | None = None  # with earlier prompts of its owner; None: its misses are not explained

    def release_resources(self) -> None:
        """Release the borrowed cache and the adapter; may be called twice."""
        if self.base is not None:
            self.base.close()
        if self.adapter_lease is not None:
            self.adapter_lease.release()


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sample: its tokens, its KV while it has any, its keys in the prefix index, its sampling state."""

    sample: Sample
    ids: list[int]  # prompt and drawn
    state: SamplingState | None  # None where nothing is drawn
    prefix_keys: PrefixKeys | None  # None where its KV is not shared
    scoring: Scoring | None = None
    pooling: Pooling | None = None
    kv: KVCache | None = None
    cached: int | None = None  # tokens of the prompt that were there when it first began
    known_prefix: int = 0  # tokens of the prompt that the prefix index knew then, usable or not
    blending: Blending | None = None  # what blends its prompt, if anything does
    prompt_ready: int = 0  # the most tokens of the prompt whose KV was there so far
    last_token_s: float = 0.0  # when it drew its latest token
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of its drafts so far
    on_first_logits: OnLogits | None = None  # until they are there
    unread: SampledIds | None = None  # its last token, while that is still on the device
    job: Job = field(init=False)

    def tokens(self, start: int = 0, stop: int | None = None) -> Sequence[Token]:
        """What KV knows its tokens [start, stop) by."""
        ids = self.ids if not start and stop is None else self.ids[start:stop]
        return ids if (embeds := self.job.request.embeds) is None else embeds.tokens(ids, start)

    def send_first_logits(self, logits: Tensor) -> None:
        """Call the watcher of the first logits, once."""
        watcher, self.on_first_logits = self.on_first_logits, None
        if watcher is not None:
            watcher(logits)


@dataclass(slots=True)
class PoolAccounting:
    """Answers the scheduler from the pool and the prefix index."""

    executor: Executor
    seqs: Mapping[Sample, SequenceState]
    free_kept_pages: ReclaimPages
    load_prefix: LoadPrefix | None = None
    failed: list[tuple[SequenceState, Exception]] = field(default_factory=list)  # while a plan was made

    def reclaim(self) -> bool:
        """Free some KV that is only kept for later; pinned KV stays."""
        return self.free_kept_pages(False)

    def groups(self) -> Sequence[GroupPages]:
        """The layer groups; one that has as many pages as any other is counted as if it kept all."""
        pool = self.executor.pool
        small = [group.window_pages if g in pool.small_groups else None for g, group in enumerate(pool.layout.groups)]
        return tuple(map(GroupPages, pool.group_pages, small))

    def free(self) -> Pages:
        """Pages of each group that may be taken."""
        return self.executor.pool.free_pages()

    def hit(self, sample: Sample, most: int) -> PrefixHit:
        """The prefix a waiting sample would find: its borrowed cache, or what the index has of its tokens."""
        return self._guarded(sample, lambda seq: self._found(seq, sample, most), PrefixHit())

    def loads_prefix(self, sample: Sample, hit: PrefixHit) -> bool:
        """Whether more of its prefix is being loaded from a store."""
        load_prefix = self.load_prefix
        return load_prefix is not None and self._guarded(sample, lambda seq: load_prefix(seq, hit), False)

    def end_failed(self, fail: Callable[[SequenceState, Exception], None]) -> None:
        """End the requests for which a call failed while the plan was made."""
        failed, self.failed = self.failed, []
        for seq, error in failed:
            fail(seq, error)

    def _guarded(self, sample: Sample, action: Callable[[SequenceState], T], otherwise: T) -> T:
        seq = self.seqs[sample]
        try:
            return action(seq)
        except BaseException as error:
            self.failed.append((seq, contained(error)))
            return otherwise

    def _found(self, seq: SequenceState, sample: Sample, most: int) -> PrefixHit:
        if seq.job.base is not None:
            return PrefixHit(seq.job.base.row(0).resumes_at)
        if seq.prefix_keys is None:
            return PrefixHit()
        if (scoring := seq.scoring) is not None and not scoring.over:
            # Tokens that are found are not computed, so they have no logits.
            most = min(most, scoring.at - scoring.at % self.executor.layout.page_tokens)
        known = None if sample.blend_progress is None else sample.blend_progress.start
        seq.prefix_keys.extend(seq.tokens(0, known), self.executor.layout.page_tokens)
        found = self.executor.prefixes.match(seq.prefix_keys, most)
        seq.known_prefix = found.known if seq.cached is None else seq.known_prefix
        return PrefixHit(found.tokens, found.idle)

    def startable(self) -> int | None:
        """How many more samples have slots for their recurrent states; None: there is no such limit."""
        pool = self.executor.pool
        if pool.layout.recurrent is None:
            return None
        held = [0 if (states := kv.row(0).states) is None else len(states.slots()) for kv in self._caches()]
        return max(0, pool.free_states() - sum(max(0, ROW_STATES - n) for n in held)) // ROW_STATES

    def lacks_states(self) -> bool:
        """Whether a running sample cannot write its next recurrent state, because caches hold all slots."""
        if self.executor.pool.layout.recurrent is None or self.executor.pool.free_states():
            return False
        return any((states := kv.row(0).states) is not None and not states.spare for kv in self._caches())

    def _caches(self) -> list[KVCache]:
        return [seq.kv for seq in self.seqs.values() if seq.kv is not None]

    def shares_tail(self, sample: Sample) -> bool:
        """Whether another cache, or the index, shares the last page of a sample."""
        kv = self.seqs[sample].kv
        tables = kv.row(0).tables if kv is not None else ()
        return any(table and self.executor.pool.holders(g, table[-1]) > 1 for g, table in enumerate(tables))
