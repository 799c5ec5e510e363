"""Blended prompts among an engine's samples: when they begin, what row comes next, what the scheduler is told.

Refuses to know how blending works and who is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..batch import Last, Nothing
from ..errors import PoolExhausted
from .forward import Task
from .gating import overheard
from .plan import Detour, Work
from .track import Track


class Blends:
    """The tracks whose blending begins before the next plan."""

    def __init__(self) -> None:
        self._waiting: dict[Track, None] = {}

    def expect(self, track: Track) -> None:
        """All that stands before its first document is computed."""
        self._waiting[track] = None

    def begin(
        self, give_back: Callable[[Track, PoolExhausted], None], fail: Callable[[Track, Exception], None]
    ) -> None:
        """Let those begin that can; without room a track goes back, until there is some."""
        waiting, self._waiting = list(self._waiting), {}
        for track in waiting:
            if track.blending is None or track.kv is None or not track.sample.blends:
                continue  # it has ended, or was preempted
            try:
                track.blending.begin(track.kv)
            except PoolExhausted as error:  # another thread was quicker than the plan
                give_back(track, error)
            except Exception as error:
                fail(track, error)
            else:
                _count(track)


def blend_task(track: Track, work: Work) -> Task:
    """The next row of a blending; its last one is drawn from like any other."""
    assert track.blending is not None
    row, drawing = track.blending.next(work.count), []
    if not work.draws and track.watch is None and isinstance(row.want, Last):  # what comes next is known, or unwanted
        row = replace(row, want=Nothing())
    if track.state is not None and work.draws:
        drawing = [track.state, *(track.state.fork(i) for i in range(1, work.forks + 1))]
    return Task(row, drawing, work.sample.prompt, hears=overheard(track, track.blending.took))


def blend_twin(track: Track, parent: Track) -> None:
    """A sample forked off a blended prompt: should it have to begin again, it blends for itself."""
    if parent.blending is not None and parent.sample.detour is not None:
        detour = parent.sample.detour
        track.blending = parent.blending.twin()
        track.sample.detour = Detour(detour.start, detour.stop, detour.scratch)


def blend_took(track: Track) -> int | None:
    """A row of a blending was run. With the last one all of the prompt is there: its tokens, else None.

    Nobody else will find that KV: it is not what a whole prefill would have computed.
    """
    blending, kv = track.blending, track.kv
    assert blending is not None
    assert kv is not None
    _count(track)
    if not blending.done:
        return None
    kv.commit([blending.quilt.ids[blending.quilt.exact :]])
    return len(blending.quilt.ids)


def _count(track: Track) -> None:
    """Tell the scheduler what is left."""
    detour, blending = track.sample.detour, track.blending
    assert detour is not None
    assert blending is not None
    detour.begun, detour.left, detour.ends = True, blending.left, blending.draws
