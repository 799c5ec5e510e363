"""Blended prompts among an engine's samples: when they continue, which row is next, and the counts for the scheduler.

Refuses to know how blending works and which samples are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..batch import Last, Nothing
from ..blend.blender import Blending
from ..errors import PoolExhausted
from .forward import RowTask
from .isolation import contained, quietly
from .plan import BlendProgress, Work
from .quality_checks import with_watcher
from .sequence import SequenceState


class BlendQueue:
    """The sequences whose blending waits: it has not begun, or more of its documents must be loaded first."""

    def __init__(
        self,
        wake: Callable[[], None],
        requeue: Callable[[SequenceState, PoolExhausted], None],
        fail: Callable[[SequenceState, Exception], None],
    ) -> None:
        """`wake` is called, from any thread, when a document was loaded; the others when a sequence cannot continue."""
        self._waiting: dict[SequenceState, None] = {}
        self._wake = wake
        self._requeue, self._fail = requeue, fail

    def add(self, seq: SequenceState) -> None:
        """All tokens before its first document are computed."""
        assert seq.blending is not None
        seq.blending.watch(self._wake)
        self._wait(seq)

    def forget(self, seq: SequenceState) -> None:
        """It has ended, or gives its pages up."""
        self._waiting.pop(seq, None)

    @property
    def has_ready(self) -> bool:
        """Whether one of them could continue."""
        return any(seq.blending is None or _is_ready(seq.blending) for seq in self._waiting)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which one of them continues in any case; None where none waits."""
        return min((_timeout_s(seq.blending) for seq in self._waiting if seq.blending is not None), default=None)

    def before_plan(self) -> None:
        """Let those continue that can. A sequence without room is requeued until there is some."""
        waiting, self._waiting = list(self._waiting), {}
        for seq in waiting:
            try:
                self._continue(seq)
            except PoolExhausted as error:  # another thread took the pages after the plan
                self._requeue(seq, error)
            except BaseException as error:
                self._fail(seq, contained(error))

    def row_done(self, seq: SequenceState) -> int | None:
        """A row of a blending was computed. Returns the prompt's length after its last row, else None.

        That KV does not enter the prefix index: it is not what a whole prefill would have computed.
        """
        blending, kv = seq.blending, seq.kv
        assert blending is not None
        assert kv is not None
        if blending.paused:
            self._wait(seq)
        _update_progress(seq)
        if not blending.done:
            return None
        kv.commit([blending.blend_prompt.ids[blending.blend_prompt.exact :]])
        return len(blending.blend_prompt.ids)

    def _wait(self, seq: SequenceState) -> None:
        self._waiting[seq] = None
        seq.sample.waits_for_store = True

    def _continue(self, seq: SequenceState) -> None:
        blending = seq.blending
        if blending is None or seq.kv is None or not seq.sample.is_blending:
            return
        if not blending.settled:
            self._wait(seq)
            return
        seq.sample.waits_for_store = False
        if blending.paused:
            blending.resume()
        else:
            blending.begin(seq.kv)
        if blending.paused:
            self._wait(seq)
        _update_progress(seq)


def blend_task(seq: SequenceState, work: Work) -> RowTask:
    """The next row of a blending; the first token is drawn from the last one, as in any prompt."""
    assert seq.blending is not None
    row, drawing = seq.blending.next(work.count), []
    if (
        not work.draws and seq.on_first_logits is None and isinstance(row.want, Last)
    ):  # the next token is known, or not wanted
        row = replace(row, want=Nothing())
    if seq.state is not None and work.draws:
        drawing = [seq.state, *(seq.state.fork(i) for i in range(1, work.forks + 1))]
    return RowTask(row, drawing, work.sample.prompt, on_result=with_watcher(seq, seq.blending.took))


def fork_blending(seq: SequenceState, parent: SequenceState) -> None:
    """A sample forked from a blended prompt has its own blending, in case it is preempted and starts again."""
    if parent.blending is not None and parent.sample.blend_progress is not None:
        progress = parent.sample.blend_progress
        seq.blending = parent.blending.twin()
        seq.sample.blend_progress = BlendProgress(progress.start, progress.stop, progress.scratch)


def _is_ready(blending: Blending) -> bool:
    """Whether it can continue; if the check itself fails, it continues, and fails there."""
    return quietly(lambda: blending.settled, True)


def _timeout_s(blending: Blending) -> float:
    return quietly(lambda: blending.patience_s, 0.0)


def _update_progress(seq: SequenceState) -> None:
    """Write the counts that the scheduler plans with."""
    progress, blending = seq.sample.blend_progress, seq.blending
    assert progress is not None
    assert blending is not None
    # A paused blending has tokens left, though their number is not known yet: the count must not be 0.
    progress.begun, progress.ends = True, blending.draws
    progress.left = 1 if blending.paused else blending.left
