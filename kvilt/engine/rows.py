"""From planned work to rows: which tokens stand where, what is wanted of them, and who draws.

Refuses to know who is scheduled, and what comes of a row.
"""

from __future__ import annotations

from ..batch import Ids, Last, Nothing, Row, Want
from ..errors import PoolExhausted
from .blending import blend_task
from .forward import RowTask
from .plan import Work
from .quality_checks import with_watcher
from .sequence import SequenceState


def row_task(track: SequenceState, work: Work) -> RowTask | None:
    """A planned row; None where the room for it has gone to another thread."""
    stop = work.start + work.count
    if work.start != work.sample.computed:
        return None
    if work.sample.blends:
        return blend_task(track, work)
    drafts = track.course.draft.tokens if track.course is not None and work.drafts else ()
    if not _reserve(track, work, len(drafts)):
        return None
    assert track.kv is not None
    ids, places = [*track.ids[work.start : stop], *drafts], range(work.start, stop + len(drafts))
    row = Row(Ids(ids), places, track.kv, want=_want(track, work, len(drafts)), adapter=track.job.request.adapter)
    if track.state is None or not work.draws:
        return RowTask(row, (), stop, hears=with_watcher(track))
    drawing = [track.state, *(track.state.fork(i) for i in range(1, work.forks + 1))]
    return RowTask(row, drawing, stop, drafts, with_watcher(track))


def _reserve(track: SequenceState, work: Work, drafts: int) -> bool:
    """Room for a row; what another thread took meanwhile, the row and its drafts wait for."""
    assert track.kv is not None
    stop = work.start + work.count + drafts
    try:
        if work.sample.shared_tail or stop > track.kv.row(0).reserved:  # most decodes have their room already
            track.kv.reserve(work.count + drafts)
    except PoolExhausted:
        return False
    return True


def _want(track: SequenceState, work: Work, drafts: int = 0) -> Want:
    """Logits to draw from, log-probabilities of the next tokens, or only the KV."""
    if work.draws:
        return Last(1 + drafts)
    if track.watch is not None and work.start + work.count == work.sample.prompt:
        return Last()
    if track.scoring is None:
        return Nothing()
    return track.scoring.want(track.ids, work.start, work.start + work.count) or Nothing()
