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

ONE = Last()  # logits to draw one token from


def row_task(seq: SequenceState, work: Work, drafts: Sequence[int] = ()) -> RowTask | None:
    """A planned row, with drafts after its tokens; None where another thread has taken the pages for it."""
    if work.draws and not drafts and (task := _decode_task(seq, work)) is not None:
        return task
    start, stop = work.start, work.start + work.count
    if not _reserve(seq, work, stop + len(drafts), len(drafts)):
        return None
    assert seq.kv is not None
    if drafts and (states := seq.kv.row(0).states) is not None:
        drafts = drafts[: max(0, len(states.spare) - 1)]  # each that may be accepted leaves a state
    source = _source(seq, start, stop, drafts)
    want = _want(seq, work, len(drafts))
    row = Row(source, range(start, stop + len(drafts)), seq.kv, want=want, adapter=seq.job.request.adapter)
    watcher = None if seq.on_first_logits is None else with_watcher(seq)
    if seq.state is None or not work.draws:
        return RowTask(row, (), stop, (), watcher if seq.pooling is None else seq.pooling.watcher(stop))
    drawing = (seq.state,) if not work.forks else (seq.state, *map(seq.state.fork, range(1, work.forks + 1)))
    return RowTask(row, drawing, stop, drafts, watcher)


def _decode_task(seq: SequenceState, work: Work) -> RowTask | None:
    """The row of a token that is still on the device, in room that is there; None for other rows."""
    start, kv, unread, state = work.start, seq.kv, seq.unread, seq.state
    if unread is None or start != len(seq.ids) or kv is None or state is None or work.count > 1 or work.forks:
        return None
    if seq.on_first_logits is not None or work.sample.shared_tail or kv.layout.recurrent is not None:
        return None
    if start >= kv.row(0).reserved:
        return None
    row = Row(unread, (start,), kv, want=ONE, adapter=seq.job.request.adapter)
    return RowTask(row, (state,), start + 1)


def _source(seq: SequenceState, start: int, stop: int, drafts: Sequence[int]) -> Source:
    """What enters a row at `start`: the token that was drawn last may still be on the device."""
    if seq.unread is not None and start == len(seq.ids):
        return seq.unread
    ids, embeds = [*seq.ids[start:stop], *drafts], seq.job.request.embeds
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


def _reserve(seq: SequenceState, work: Work, stop: int, drafts: int = 0) -> bool:
    """Reserve pages for a row up to `stop`; False if another thread has taken them, so that the row waits."""
    assert seq.kv is not None
    try:
        if seq.kv.layout.recurrent is not None:  # each step writes another state
            more = max(0, stop - seq.kv.num_entries)
            seq.kv.reserve(more, folds=[range(work.start, stop)], drafts=drafts)
        elif work.sample.shared_tail or stop > seq.kv.row(0).reserved:  # most decodes have their room already
            seq.kv.reserve(stop - work.start)
    except PoolExhausted:
        return False
    return True


def _want(seq: SequenceState, work: Work, drafts: int = 0) -> Want:
    """Logits to draw from, log-probabilities of the next tokens, or only the KV."""
    if work.draws:
        return Last(1 + drafts) if drafts else ONE
    if seq.on_first_logits is not None and work.start + work.count == work.sample.prompt:
        return Last()
    if seq.pooling is not None:
        return seq.pooling.want(work.start, work.start + work.count) or Nothing()
    if seq.scoring is None:
        return Nothing()
    return seq.scoring.want(seq.ids, work.start, work.start + work.count) or Nothing()
