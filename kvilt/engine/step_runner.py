"""The rows of a plan through one forward, and what their results mean for the caches.

Refuses to know which samples are scheduled, and what follows from their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..batch import SampledIds
from ..errors import PoolExhausted
from ..executor.protocol import Executor
from ..kv.prefix import EvictedPage
from .active import ActiveRequests
from .counters import Counters
from .features.feature import FinishedStep, MakeRow
from .features.feature_set import FeatureSet
from .forward import LaunchedForward, Result, RowDone, RowTask, launch
from .notify import notify
from .rows import row_task
from .scheduling.page_counts import reached
from .scheduling.plan import Sample, StepPlan, Work
from .scheduling.scheduler import UNREAD, Advance
from .sequence import SequenceState


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step whose tokens may still be on the device. Where a row was not run, its task is None."""

    plan: StepPlan
    tasks: Sequence[RowTask | None]
    forward: LaunchedForward
    advances: Sequence[Advance] | None = None  # if the scheduler has counted its tokens before they are read

    @property
    def overlaps(self) -> bool:
        """Whether the next step can be planned before this one is finished."""
        return self.forward.sampled is not None

    def unread(self) -> list[Sequence[int] | None]:
        """For each work the tokens it draws, as far as that can be known before they are read."""
        return [None if task is None else (UNREAD,) * len(task.drawing) for task in self.tasks]

    def finish(self) -> FinishedStep:
        """Wait for the results."""
        results = iter(self.forward.results())
        return FinishedStep(self.plan, self.tasks, [None if task is None else next(results) for task in self.tasks])


class StepRunner:
    """Runs planned work. An error of one row ends its own request."""

    def __init__(
        self,
        executor: Executor,
        seqs: Mapping[Sample, SequenceState],
        active: ActiveRequests,
        counters: Counters,
        features: FeatureSet,
        on_evict: Callable[[EvictedPage], None] | None,
    ) -> None:
        """`on_evict` gets pages that this engine computed when the prefix index loses them."""
        self._executor = executor
        self._seqs = seqs
        self._active = active
        self._counters = counters
        self._features = features
        self._on_evict = on_evict
        self._page_tokens = executor.layout.page_tokens

    def launch(self, plan: StepPlan, overlap: bool = False) -> LaunchedStep:
        """One forward over the rows of a plan: those that features make, and the next tokens of all other samples.

        With `overlap` it may return before the tokens are there.
        """
        makers = self._features.rows(plan)
        tasks = [self._task(work, makers) for work in plan.work]
        there = [task for task in tasks if task is not None]
        overlap = overlap and not makers and not any(map(_blends, plan.work))
        launched = launch(self._executor, there, overlap) if there else LaunchedForward.done([])
        return LaunchedStep(plan, tasks, launched)

    def grow(self, step: LaunchedStep) -> None:
        """Advance the caches of a step that is still computed: the tokens that entered it are known by now."""
        at, sampled = 0, step.forward.sampled
        for work, task in zip(step.plan.work, step.tasks, strict=True):
            if task is None:
                continue
            if (seq := self._seqs.get(work.sample)) is not None:
                seq.unread = None if sampled is None or not task.drawing else SampledIds(sampled, at)
                if not _appended(seq, work):
                    self._active.guarded(seq, self._grow, None, seq, work, work.start + work.count)
            at += bool(task.drawing)

    def commit(self, step: FinishedStep, grown: bool = False) -> list[Sequence[int] | None]:
        """Advance the caches of a step, unless they are `grown`; for each row its tokens, None if it was not done."""
        rows = zip(step.plan.work, step.tasks, step.results, strict=True)
        return [self._commit(*row, grown) for row in rows]

    def _task(self, work: Work, makers: Mapping[Sample, MakeRow]) -> RowTask | None:
        seq = self._seqs[work.sample]
        if work.start != work.sample.computed:  # it found fewer tokens than it was promised
            return None
        if (make_row := makers.get(work.sample)) is not None:
            return self._active.guarded(seq, make_row, None)
        return self._active.guarded(seq, row_task, None, seq, work)

    def _commit(self, work: Work, task: RowTask | None, result: Result | None, grown: bool) -> Sequence[int] | None:
        if task is None or result is None or (seq := self._seqs.get(work.sample)) is None:
            return None
        if isinstance(result, RowDone):
            return self._active.guarded(seq, self._row_done, None, seq, work, task, result, grown)
        if isinstance(result.error, PoolExhausted) and work.sample.is_blending:  # a document is not there after all
            self._active.requeue(seq, result.error)
        else:
            self._active.fail(seq, result.error)
        return None

    def _row_done(self, seq: SequenceState, work: Work, task: RowTask, result: RowDone, grown: bool) -> Sequence[int]:
        """A row was computed: its cache grows, and its listener is notified."""
        accepted = result.tokens[:-1] if work.drafts else ()
        stop = reached(work) + len(accepted)
        if stop > work.start and not grown:
            self._grow(seq, work, stop, accepted)
        if task.drafts:
            self._verified(seq, stop, len(task.drafts), len(accepted))
        if result.scores is not None and seq.scoring is not None:
            notify(seq.job, seq.scoring.event(seq.ids, work.start, result.scores))
        if seq.pooling is not None and (pooled := seq.pooling.event()) is not None:
            notify(seq.job, pooled)
        return result.tokens

    def _grow(self, seq: SequenceState, work: Work, stop: int, accepted: Sequence[int] = ()) -> None:
        """The positions of a row up to `stop` are computed, the last of them from accepted drafts."""
        assert seq.kv is not None
        start = max(work.start, seq.kv.num_entries)  # tokens before it were only folded into a recurrent state again
        filled, fills = None, start // self._page_tokens < stop // self._page_tokens
        if fills and (keys := seq.prefix_keys) is not None and not seq.job.request.background:
            filled = partial(self._executor.prefixes.insert, prefix_keys=keys, on_evict=self._on_evict)
        tokens = seq.tokens(start, max(start, stop))
        seq.kv.commit([[*tokens, *accepted] if accepted else tokens], filled=filled)
        if start < work.sample.prompt:
            self._active.prompt_progress(seq, min(stop, work.sample.prompt))

    def _verified(self, seq: SequenceState, stop: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a row, and free the pages of those that were not accepted."""
        assert seq.kv is not None
        seq.drafts = seq.drafts.plus(drafted, accepted)
        self._counters.verified(drafted, accepted)
        if seq.kv.row(0).reserved - stop >= self._page_tokens:
            seq.kv.truncate(stop)


def _appended(seq: SequenceState, work: Work) -> bool:
    """Whether the row of a decode grew by its token, and there is nothing else to do: so for nearly every row."""
    start, kv = work.start, seq.kv
    if work.count > 1 or start < work.sample.prompt or kv is None or seq.job.request.embeds is not None:
        return False
    return kv.commit_token(seq.ids[start], start)


def _blends(work: Work) -> bool:
    """Whether a part of the prompt is blended in this step, or after it."""
    progress = work.sample.blend_progress
    return progress is not None and work.start < progress.stop
