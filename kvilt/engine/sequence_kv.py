"""The caches that samples begin with. Refuses to know who is scheduled."""

from __future__ import annotations

from ..errors import PoolExhausted
from ..executor.executor import Executor
from ..kv.cache import KVCache
from .blending import fork_blending
from .plan import Sample
from .sequence import SequenceState


def cache_for(track: SequenceState, found: int, executor: Executor) -> KVCache:
    """A fork of what a sample continues, or of the first `found` tokens that the prefix index has, or an empty one."""
    if track.job.base is not None:
        return track.job.base.fork()
    if track.trail is not None:
        return executor.prefixes.fork(track.trail, found, track.job.capacity)
    return executor.create_kv_cache(capacity=track.job.capacity, owner=track.job.request.owner)


def fork_sequence(parent: SequenceState, sample: Sample, executor: Executor) -> SequenceState:
    """Another sample behind the prompt that `parent` has computed, whose pages it shares."""
    assert parent.state is not None
    assert parent.kv is not None
    ids, trail = parent.ids[: sample.prompt], None
    if parent.trail is not None and parent.blending is None:
        trail = parent.trail.twin()
        trail.extend(ids, executor.layout.page_tokens)
        sample.keys = trail.keys
    track = SequenceState(sample, ids, parent.state.fork(sample.index), trail, cached=sample.prompt)
    track.job = parent.job
    fork_blending(track, parent)
    track.kv = parent.kv.fork()  # last: whatever fails before it holds no page
    return track


def out_of_pages(track: SequenceState, executor: Executor) -> PoolExhausted:
    """Why a sample cannot go on, though nobody is left to make room for it."""
    layout, pool = executor.layout, executor.pool
    needed = layout.pages_for(track.sample.known) - layout.pages_for(track.sample.computed)
    return PoolExhausted(max(1, needed), min(pool.free_pages()), pool.pages)
