"""The caches that samples start with. Refuses to know how samples are scheduled."""

from __future__ import annotations

from ..errors import PoolExhausted
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from .scheduling.plan import Sample
from .sequence import SequenceState


def cache_for(seq: SequenceState, found: int, executor: Executor) -> KVCache:
    """A fork of what a sample continues, or of the first `found` tokens that the prefix index has, or an empty one."""
    if seq.job.base is not None:
        return seq.job.base.fork()
    if seq.prefix_keys is not None:
        return executor.prefixes.fork(seq.prefix_keys, found, seq.job.capacity)
    return executor.create_kv_cache(capacity=seq.job.capacity, owner=seq.job.request.owner)


def fork_sequence(parent: SequenceState, sample: Sample, executor: Executor) -> SequenceState:
    """Another sample of the prompt that `parent` has computed; it shares the pages."""
    assert parent.state is not None
    assert parent.kv is not None
    ids, prefix_keys = parent.ids[: sample.prompt], None
    if parent.prefix_keys is not None and parent.blending is None:
        prefix_keys = parent.prefix_keys.twin()
        prefix_keys.extend(parent.tokens(0, sample.prompt), executor.layout.page_tokens)
    seq = SequenceState(sample, ids, parent.state.fork(sample.index), prefix_keys, cached=sample.prompt)
    seq.job = parent.job
    if parent.blending is not None:  # its own one, in case it is preempted and starts again
        seq.blending = parent.blending.twin()
    seq.kv = parent.kv.fork()  # last: a failure before it leaves no page held
    return seq


def out_of_pages(seq: SequenceState, executor: Executor) -> PoolExhausted:
    """The error of a sample that needs pages, though no other one is left to preempt."""
    layout, pool = executor.layout, executor.pool
    needed = layout.pages_for(seq.sample.known) - layout.pages_for(seq.sample.computed)
    free, total = min(zip(pool.free_pages(), pool.group_pages, strict=True))
    return PoolExhausted(max(1, needed), free, total)
