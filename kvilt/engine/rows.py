"""From planned work to rows: tokens, positions, what is wanted of them, and the samplers that draw.

Refuses to know how samples are scheduled, and what the result of a row is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..batch import Ids, Last, Logits, Nothing, Row, Source, Want
from ..errors import PoolExhausted
from .forward import RowTask
from .scheduling.plan import Work
from .sequence import SequenceState


def row_task(seq: SequenceState, work: Work, drafts: Sequence[int] = ()) -> RowTask | None:
    """A planned row, with drafts after its tokens; None where another thread has taken the pages for it."""
    stop = work.start + work.count
    if not _reserve(seq, work, len(drafts)):
        return None
    assert seq.kv is not None
    places = range(work.start, stop + len(drafts))
    source = _source(seq, work.start, [*seq.ids[work.start : stop], *drafts])
    row = Row(source, places, seq.kv, want=_want(seq, work, len(drafts)), adapter=seq.job.request.adapter)
    if seq.state is None or not work.draws:
        return RowTask(row, (), stop, on_result=with_watcher(seq))
    drawing = [seq.state] if not work.forks else [seq.state, *map(seq.state.fork, range(1, work.forks + 1))]
    return RowTask(row, drawing, stop, drafts, with_watcher(seq))


def _source(seq: SequenceState, start: int, ids: Sequence[int]) -> Source:
    """What enters a row at `start`: the token that was drawn last may still be on the device."""
    if seq.unread is not None and start == len(seq.ids):
        return seq.unread
    embeds = seq.job.request.embeds
    return Ids(ids) if embeds is None else embeds.source(ids, start)


def with_watcher(
    seq: SequenceState, then: Callable[[Row, Logits, int], None] | None = None
) -> Callable[[Row, Logits, int], None] | None:
    """The callback of a sequence's row. If the row has the logits after the prompt, their watcher gets them as well."""
    if seq.on_first_logits is None:
        return then

    def on_result(row: Row, logits: Logits, index: int) -> None:
        if isinstance(row.want, Last):
            seq.send_first_logits(logits.of_row(index)[0].clone())
        if then is not None:
            then(row, logits, index)

    return on_result


def _reserve(seq: SequenceState, work: Work, drafts: int) -> bool:
    """Reserve pages for a row; False if another thread has taken them, so that the row waits."""
    assert seq.kv is not None
    stop = work.start + work.count + drafts
    try:
        if work.sample.shared_tail or stop > seq.kv.row(0).reserved:  # most decodes have their room already
            seq.kv.reserve(work.count + drafts)
    except PoolExhausted:
        return False
    return True


def _want(seq: SequenceState, work: Work, drafts: int = 0) -> Want:
    """Logits to draw from, log-probabilities of the next tokens, or only the KV."""
    if work.draws:
        return Last(1 + drafts)
    if seq.on_first_logits is not None and work.start + work.count == work.sample.prompt:
        return Last()
    if seq.scoring is None:
        return Nothing()
    return seq.scoring.want(seq.ids, work.start, work.start + work.count) or Nothing()
