"""Blended prompts among an engine's samples: when they continue, which row is next, and the counts for the scheduler.

Refuses to know how blending works and which samples are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from ...batch import Last, Nothing
from ...blend.blender import Blending
from ...errors import PoolExhausted
from ..forward import RowDone, RowTask
from ..isolation import contained, quietly
from ..rows import with_watcher
from ..scheduling.page_counts import reached
from ..scheduling.plan import Sample, StepPlan, Work
from ..scheduling.proposals import AdvanceBlend, WaitForStore
from ..sequence import SequenceState
from .feature import Fail, Feature, FinishedStep, Forgotten, MakeRow, Proposal, Requeue, Sequences


class BlendQueue(Feature):
    """The sequences whose blending waits: it has not begun, or more of its documents must be loaded first."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when a document was loaded."""
        self._waiting: dict[SequenceState, None] = {}
        self._wake = wake

    @property
    def has_ready(self) -> bool:
        """Whether one of them could continue."""
        return any(seq.blending is None or _is_ready(seq.blending) for seq in self._waiting)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which one of them continues in any case; None where none waits."""
        return min((_timeout_s(seq.blending) for seq in self._waiting if seq.blending is not None), default=None)

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        """Let those continue that can. A sequence without room is requeued until there is some."""
        waiting, self._waiting = list(self._waiting), {}
        proposals: list[Proposal] = []
        for seq in waiting:
            try:
                proposals += self._continue(seq)
            except PoolExhausted as error:  # another thread took the pages after the plan
                proposals.append(Requeue(seq, error))
            except BaseException as error:
                proposals.append(Fail(seq, contained(error)))
        return proposals

    def begin(self, seq: SequenceState) -> Iterable[Proposal]:
        """Look for the documents of a prompt. If no token stands before the first of them, blending is next."""
        if seq.blending is None:
            return ()
        seq.blending.open()
        return self._add(seq) if seq.sample.is_blending else ()

    def rows(self, plan: StepPlan, seqs: Sequences) -> Mapping[Sample, MakeRow]:
        """The next row of each blending that the plan has work for."""
        return {
            work.sample: partial(blend_task, seqs[work.sample], work)
            for work in plan.work
            if work.sample.blend_progress is not None and work.sample.is_blending
        }

    def after_step(self, step: FinishedStep, seqs: Sequences) -> Iterable[Proposal]:
        """Count what is left of each blending; prompts that have reached their first document wait for it."""
        proposals: list[Proposal] = []
        for work, result in zip(step.plan.work, step.results, strict=True):
            if (progress := work.sample.blend_progress) is None or not isinstance(result, RowDone):
                continue
            if (seq := seqs.get(work.sample)) is None:
                continue
            try:
                if work.sample.is_blending:
                    proposals += self._counted(seq)
                elif reached(work) == progress.start:
                    proposals += self._add(seq)
            except BaseException as error:
                proposals.append(Fail(seq, contained(error)))
        return proposals

    def forget(self, seq: SequenceState, why: Forgotten) -> None:
        """It has ended, or gives its pages up."""
        self._waiting.pop(seq, None)
        if seq.blending is not None:
            seq.blending.close()

    def _add(self, seq: SequenceState) -> list[Proposal]:
        """All tokens before its first document are computed."""
        assert seq.blending is not None
        seq.blending.watch(self._wake)
        return self._wait(seq)

    def _wait(self, seq: SequenceState) -> list[Proposal]:
        self._waiting[seq] = None
        return [WaitForStore(seq.sample, True)]

    def _continue(self, seq: SequenceState) -> list[Proposal]:
        blending = seq.blending
        if blending is None or seq.kv is None or not seq.sample.is_blending:
            return []
        if not blending.settled:
            return self._wait(seq)
        if blending.paused:
            blending.resume()
        else:
            blending.begin(seq.kv)
        return [WaitForStore(seq.sample, False), *self._counted(seq)]

    def _counted(self, seq: SequenceState) -> list[Proposal]:
        """The counts that the scheduler plans with."""
        progress, blending = seq.sample.blend_progress, seq.blending
        assert progress is not None
        assert blending is not None
        # A paused blending has tokens left, though their number is not known yet: the count must not be 0.
        left = 1 if blending.paused else blending.left
        waits = self._wait(seq) if blending.paused else []
        return [*waits, AdvanceBlend(seq.sample, replace(progress, begun=True, left=left, ends=blending.draws))]


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


def _is_ready(blending: Blending) -> bool:
    """Whether it can continue; if the check itself fails, it continues, and fails there."""
    return quietly(lambda: blending.settled, True)


def _timeout_s(blending: Blending) -> float:
    return quietly(lambda: blending.patience_s, 0.0)
