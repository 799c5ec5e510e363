"""Blended prompts among an engine's samples: when they go on, what row comes next, what the scheduler is told.

Refuses to know how blending works and who is scheduled.
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
    """The tracks whose blending cannot go on: it has yet to begin, or more of its documents must come first."""

    def __init__(
        self,
        wake: Callable[[], None],
        give_back: Callable[[SequenceState, PoolExhausted], None],
        fail: Callable[[SequenceState, Exception], None],
    ) -> None:
        """`wake` is called, from any thread, when something has come; the others when a track cannot go on."""
        self._waiting: dict[SequenceState, None] = {}
        self._wake = wake
        self._give_back, self._fail = give_back, fail

    def expect(self, seq: SequenceState) -> None:
        """All that stands before its first document is computed."""
        assert seq.blending is not None
        seq.blending.watch(self._wake)
        self._wait(seq)

    def forget(self, seq: SequenceState) -> None:
        """It has ended, or gives its pages up."""
        self._waiting.pop(seq, None)

    @property
    def due(self) -> bool:
        """Whether one of them could go on."""
        return any(seq.blending is None or _settled(seq.blending) for seq in self._waiting)

    @property
    def patience_s(self) -> float | None:
        """Seconds after which one of them goes on in any case; None where nobody waits."""
        return min((_patience_s(seq.blending) for seq in self._waiting if seq.blending is not None), default=None)

    def before_plan(self) -> None:
        """Let those go on that can; without room a track goes back, until there is some."""
        waiting, self._waiting = list(self._waiting), {}
        for seq in waiting:
            try:
                self._go_on(seq)
            except PoolExhausted as error:  # another thread was quicker than the plan
                self._give_back(seq, error)
            except BaseException as error:
                self._fail(seq, contained(error))

    def took(self, seq: SequenceState) -> int | None:
        """A row of a blending was run. With the last one all of the prompt is there: its tokens, else None.

        Nobody else will find that KV: it is not what a whole prefill would have computed.
        """
        blending, kv = seq.blending, seq.kv
        assert blending is not None
        assert kv is not None
        if blending.paused:
            self._wait(seq)
        _count(seq)
        if not blending.done:
            return None
        kv.commit([blending.blend_prompt.ids[blending.blend_prompt.exact :]])
        return len(blending.blend_prompt.ids)

    def _wait(self, seq: SequenceState) -> None:
        self._waiting[seq] = None
        seq.sample.waits = True

    def _go_on(self, seq: SequenceState) -> None:
        blending = seq.blending
        if blending is None or seq.kv is None or not seq.sample.blends:
            return
        if not blending.settled:
            self._wait(seq)
            return
        seq.sample.waits = False
        if blending.paused:
            blending.resume()
        else:
            blending.begin(seq.kv)
        if blending.paused:
            self._wait(seq)
        _count(seq)


def blend_task(seq: SequenceState, work: Work) -> RowTask:
    """The next row of a blending; its last one is drawn from like any other."""
    assert seq.blending is not None
    row, drawing = seq.blending.next(work.count), []
    if not work.draws and seq.watch is None and isinstance(row.want, Last):  # what comes next is known, or unwanted
        row = replace(row, want=Nothing())
    if seq.state is not None and work.draws:
        drawing = [seq.state, *(seq.state.fork(i) for i in range(1, work.forks + 1))]
    return RowTask(row, drawing, work.sample.prompt, on_result=with_watcher(seq, seq.blending.took))


def fork_blending(seq: SequenceState, parent: SequenceState) -> None:
    """A sample forked off a blended prompt: should it have to begin again, it blends for itself."""
    if parent.blending is not None and parent.sample.blend_progress is not None:
        blend_progress = parent.sample.blend_progress
        seq.blending = parent.blending.twin()
        seq.sample.blend_progress = BlendProgress(blend_progress.start, blend_progress.stop, blend_progress.scratch)


def _settled(blending: Blending) -> bool:
    """Whether it can go on; one that fails to say so goes on, and fails there by itself."""
    return quietly(lambda: blending.settled, True)


def _patience_s(blending: Blending) -> float:
    return quietly(lambda: blending.patience_s, 0.0)


def _count(seq: SequenceState) -> None:
    """Tell the scheduler what is left."""
    blend_progress, blending = seq.sample.blend_progress, seq.blending
    assert blend_progress is not None
    assert blending is not None
    # A pause is not the end: there is something left, though nobody knows how much.
    blend_progress.begun, blend_progress.left, blend_progress.ends = (
        True,
        1 if blending.paused else blending.left,
        blending.draws,
    )
