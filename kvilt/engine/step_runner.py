"""The rows of a plan through one forward, and what their results mean for the caches.

Refuses to know which samples are scheduled, and what follows from their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..errors import PoolExhausted
from ..executor.protocol import Executor
from ..kv.prefix import EvictedPage
from .active import ActiveRequests
from .counters import Counters
from .features.feature import FinishedStep, MakeRow
from .features.feature_set import FeatureSet
from .forward import Result, RowDone, RowFailed, RowTask, forward
from .notify import notify
from .rows import row_task
from .scheduling.page_counts import reached
from .scheduling.plan import Sample, StepPlan, Work
from .sequence import SequenceState


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

    def run(self, plan: StepPlan) -> FinishedStep:
        """One forward over the rows of a plan: those that features make, and the next tokens of all other samples."""
        makers = self._features.rows(plan)
        tasks = [self._task(work, makers) for work in plan.work]
        there = [i for i, task in enumerate(tasks) if task is not None]
        results = forward(self._executor, [task for task in tasks if task is not None]) if there else []
        by_place = dict(zip(there, results, strict=True))
        return FinishedStep(plan, tasks, [by_place.get(i) for i in range(len(tasks))])

    def commit(self, step: FinishedStep) -> list[Sequence[int] | None]:
        """Advance the caches of a step; for each row the tokens it drew, or None if it was not done."""
        return [self._commit(*row) for row in zip(step.plan.work, step.tasks, step.results, strict=True)]

    def _task(self, work: Work, makers: Mapping[Sample, MakeRow]) -> RowTask | None:
        seq = self._seqs[work.sample]
        if work.start != work.sample.computed:  # it found fewer tokens than it was promised
            return None
        return self._active.guarded(seq, makers.get(work.sample) or partial(row_task, seq, work), None)

    def _commit(self, work: Work, task: RowTask | None, result: Result | None) -> Sequence[int] | None:
        if task is None or result is None or (seq := self._seqs.get(work.sample)) is None:
            return None
        match result:
            case RowFailed(PoolExhausted() as error) if work.sample.is_blending:  # a document is not there after all
                self._active.requeue(seq, error)
                return None
            case RowFailed(error):
                self._active.fail(seq, error)
                return None
            case RowDone():
                return self._active.guarded(seq, partial(self._row_done, seq, work, task, result), None)

    def _row_done(self, seq: SequenceState, work: Work, task: RowTask, result: RowDone) -> Sequence[int]:
        """A row was computed: its cache grows, and its listener is notified."""
        accepted = result.tokens[:-1] if work.drafts else ()
        stop = reached(work) + len(accepted)
        if stop > work.start:
            self._grow(seq, work.start, stop, accepted)
        if task.drafts:
            self._verified(seq, stop, len(task.drafts), len(accepted))
        if stop > work.start and work.start < work.sample.prompt:
            self._active.prompt_progress(seq, min(stop, work.sample.prompt))
        if result.scores is not None and seq.scoring is not None:
            notify(seq.job, seq.scoring.event(seq.ids, work.start, result.scores))
        return result.tokens

    def _grow(self, seq: SequenceState, start: int, stop: int, accepted: Sequence[int]) -> None:
        """Positions [start, stop) of a cache are computed, the last of them from accepted drafts."""
        assert seq.kv is not None
        filled, keys = None, None if seq.job.request.background else seq.prefix_keys
        if keys is not None and start // self._page_tokens < stop // self._page_tokens:
            filled = partial(self._executor.prefixes.insert, prefix_keys=keys, on_evict=self._on_evict)
        seq.kv.commit([[*seq.tokens(start, stop), *accepted]], filled=filled)

    def _verified(self, seq: SequenceState, stop: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a row, and free the pages of those that were not accepted."""
        assert seq.kv is not None
        seq.drafts = seq.drafts.plus(drafted, accepted)
        self._counters.verified(drafted, accepted)
        if seq.kv.row(0).reserved - stop >= self._page_tokens:
            seq.kv.truncate(stop)
