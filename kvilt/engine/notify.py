"""Notifying the listeners of requests, and the KV and reports that they get."""

from __future__ import annotations

import logging

from ..blend.report import BlendReport
from ..errors import ModelClosed
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from .event import Ended, Event
from .isolation import contained
from .sequence import Job, SequenceState

_log = logging.getLogger(__name__)


def notify(job: Job, event: Event) -> None:
    """Send an event whose answer does not matter; a listener that fails is logged."""
    try:
        job.listener.on_event(event)
    except BaseException as error:
        contained(error)
        _log.error("the listener of request %r failed", job.request.id, extra={"request_id": job.request.id})
        if isinstance(event, Ended) and event.kv is not None:
            event.kv.close()


def detach_kv(seq: SequenceState, executor: Executor) -> KVCache | None:
    """The KV of a sample that its listener keeps, without spare pages."""
    try:
        kv = seq.kv or (seq.job.base.fork() if seq.job.base else executor.create_kv_cache())
    except ModelClosed:
        return None
    kv.truncate(min(kv.num_entries, len(seq.ids) - 1) if seq.state is not None else kv.num_entries)
    return kv


def blend_report(seq: SequenceState) -> BlendReport | None:
    """Where the KV of a prompt with documents came from."""
    if seq.blending is not None:
        return seq.blending.report()
    if seq.job.blend_decision is None or seq.job.blend_decision.recipe is not None:
        return None
    return BlendReport(seq.prompt_ready, 0, 0, 0, f"full/1 instead of {seq.job.request.recipe.name}")
