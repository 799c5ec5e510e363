"""What an engine holds at this moment, as plain values: requests, prefixes and pages.

Reads only, from any thread. Refuses to know text, and to show one tenant what another one has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..kv.prefix_branches import PrefixBranch
from .handles.handles import HandleInfo
from .sequence import SequenceState

State = Literal["running", "waiting", "held"]


@dataclass(frozen=True, slots=True)
class PagesView:
    """The page pool, shared by all tenants."""

    total: int
    used: int
    free: int
    kept: int  # of those free, with KV that the prefix index knows
    shared: int  # of those used, seen by more than one cache
    page_tokens: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample in progress, and the cache it computes with."""

    request: str
    index: int
    state: State
    priority: int
    prompt_tokens: int
    tokens: int  # prompt and drawn
    computed: int  # of these, those whose KV is there
    cached: int  # of the prompt, found
    pages: int
    shared_pages: int  # of these, seen by another cache too


@dataclass(frozen=True, slots=True)
class EngineView:
    """One tenant's part of an engine, and the pages of all."""

    pages: PagesView
    samples: tuple[SampleView, ...]
    prefixes: tuple[PrefixBranch, ...]  # parents before children
    handles: tuple[HandleInfo, ...] = ()
    omitted: int = 0  # samples, prefixes and handles that there are besides


def look(
    executor: Executor,
    seqs: Iterable[SequenceState],
    tenant: str,
    handles: Sequence[HandleInfo] = (),
    most: int | None = None,
) -> EngineView:
    """What there is now, `most` of each kind. Holds the pool only while it counts pages; steps need it too."""
    mine = [seq for seq in seqs if seq.job.request.tenant == tenant]
    with executor.pool.lock:  # pages do not change hands while they are counted
        pages = _pages(executor)
        samples = tuple(_sample(executor, seq) for seq in mine[:most])
        known = executor.prefixes.runs(tenant, most)
    prefixes = tuple(executor.prefixes.branch(run) for run in known.runs)
    omitted = len(mine) - len(samples) + known.omitted + len(handles) - len(handles[:most])
    return EngineView(pages, samples, prefixes, tuple(handles[:most]), omitted)


def _pages(executor: Executor) -> PagesView:
    usage = executor.pool.usage()
    return PagesView(
        total=usage.total,
        used=usage.used,
        free=usage.free,
        kept=usage.cached,
        shared=usage.shared,
        page_tokens=executor.layout.page_tokens,
        used_bytes=usage.used_bytes,
    )


def _sample(executor: Executor, seq: SequenceState) -> SampleView:
    sample, kv = seq.sample, seq.kv  # once: the thread that steps may take the cache away
    pages = _held(kv) if kv is not None else []
    return SampleView(
        request=sample.request,
        index=sample.index,
        state="held" if sample.held else "waiting" if kv is None else "running",
        priority=sample.priority,
        prompt_tokens=sample.prompt,
        tokens=sample.known,
        computed=sample.computed,
        cached=seq.cached or 0,
        pages=len(pages),
        shared_pages=executor.pool.shared(pages),
    )


def _held(kv: KVCache) -> list[tuple[int, int]]:
    if kv.closed:
        return []
    return [(group, page) for group, pages in enumerate(kv.pages()) for page in pages]
