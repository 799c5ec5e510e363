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

    def expect(self, track: SequenceState) -> None:
        """All that stands before its first document is computed."""
        assert track.blending is not None
        track.blending.watch(self._wake)
        self._wait(track)

    def forget(self, track: SequenceState) -> None:
        """It has ended, or gives its pages up."""
        self._waiting.pop(track, None)

    @property
    def due(self) -> bool:
        """Whether one of them could go on."""
        return any(track.blending is None or _settled(track.blending) for track in self._waiting)

    @property
    def patience_s(self) -> float | None:
        """Seconds after which one of them goes on in any case; None where nobody waits."""
        return min((_patience_s(track.blending) for track in self._waiting if track.blending is not None), default=None)

    def attend(self) -> None:
        """Let those go on that can; without room a track goes back, until there is some."""
        waiting, self._waiting = list(self._waiting), {}
        for track in waiting:
            try:
                self._go_on(track)
            except PoolExhausted as error:  # another thread was quicker than the plan
                self._give_back(track, error)
            except BaseException as error:
                self._fail(track, contained(error))

    def took(self, track: SequenceState) -> int | None:
        """A row of a blending was run. With the last one all of the prompt is there: its tokens, else None.

        Nobody else will find that KV: it is not what a whole prefill would have computed.
        """
        blending, kv = track.blending, track.kv
        assert blending is not None
        assert kv is not None
        if blending.paused:
            self._wait(track)
        _count(track)
        if not blending.done:
            return None
        kv.commit([blending.quilt.ids[blending.quilt.exact :]])
        return len(blending.quilt.ids)

    def _wait(self, track: SequenceState) -> None:
        self._waiting[track] = None
        track.sample.waits = True

    def _go_on(self, track: SequenceState) -> None:
        blending = track.blending
        if blending is None or track.kv is None or not track.sample.blends:
            return
        if not blending.settled:
            self._wait(track)
            return
        track.sample.waits = False
        if blending.paused:
            blending.resume()
        else:
            blending.begin(track.kv)
        if blending.paused:
            self._wait(track)
        _count(track)


def blend_task(track: SequenceState, work: Work) -> RowTask:
    """The next row of a blending; its last one is drawn from like any other."""
    assert track.blending is not None
    row, drawing = track.blending.next(work.count), []
    if not work.draws and track.watch is None and isinstance(row.want, Last):  # what comes next is known, or unwanted
        row = replace(row, want=Nothing())
    if track.state is not None and work.draws:
        drawing = [track.state, *(track.state.fork(i) for i in range(1, work.forks + 1))]
    return RowTask(row, drawing, work.sample.prompt, hears=with_watcher(track, track.blending.took))


def fork_blending(track: SequenceState, parent: SequenceState) -> None:
    """A sample forked off a blended prompt: should it have to begin again, it blends for itself."""
    if parent.blending is not None and parent.sample.detour is not None:
        detour = parent.sample.detour
        track.blending = parent.blending.twin()
        track.sample.detour = BlendProgress(detour.start, detour.stop, detour.scratch)


def _settled(blending: Blending) -> bool:
    """Whether it can go on; one that fails to say so goes on, and fails there by itself."""
    return quietly(lambda: blending.settled, True)


def _patience_s(blending: Blending) -> float:
    return quietly(lambda: blending.patience_s, 0.0)


def _count(track: SequenceState) -> None:
    """Tell the scheduler what is left."""
    detour, blending = track.sample.detour, track.blending
    assert detour is not None
    assert blending is not None
    # A pause is not the end: there is something left, though nobody knows how much.
    detour.begun, detour.left, detour.ends = True, 1 if blending.paused else blending.left, blending.draws
