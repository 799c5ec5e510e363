"""The requests in progress: how their sequences fork, get tokens, are preempted, fail and end.

Refuses to know how a step is planned and computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from ..errors import InputError, NumericsError, PoolExhausted
from ..executor.protocol import Executor
from .counters import Counters
from .event import Ended, PromptProgress, Reason, TokenEvent
from .features.feature import Feature, Forgotten
from .forward import Result, RowDone
from .isolation import contained, quietly
from .misses.explainer import MissExplainer
from .notify import blend_report, detach_kv, notify
from .scheduling.plan import Sample
from .scheduling.scheduler import Advance, Scheduler
from .sequence import Job, SequenceState
from .sequence_kv import fork_sequence

T = TypeVar("T")


class ActiveRequests:
    """Jobs and their sequences. All methods belong to the thread that steps."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        counters: Counters,
        clock: Callable[[], float],
        seqs: dict[Sample, SequenceState],
        features: Sequence[Feature],
        misses: MissExplainer,
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self._seqs = seqs
        self._executor = executor
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._features = features
        self._misses = misses

    def add(self, job: Job) -> None:
        """A request is in progress from now on; its first sequence waits for a row."""
        job.live.append(job.first)
        if job.request.id in self.jobs:
            error = InputError(f"a request {job.request.id!r} is in progress; give each its own id")
            self.end(job.first, "error", error)
            return
        self.jobs[job.request.id] = job
        self._seqs[job.first.sample] = job.first
        self._scheduler.add(job.first.sample)

    def find(self, which: Job | str) -> Job | None:
        return self.jobs.get(which) if isinstance(which, str) else which

    # Failures of one request.

    def guarded(self, seq: SequenceState, action: Callable[..., T], otherwise: T, *args: Any) -> T:
        """The result of a request's own part of a step; what that raises ends this request and no other."""
        try:
            return action(*args)
        except BaseException as error:
            self.fail(seq, contained(error))
            return otherwise

    def fail(self, seq: SequenceState, error: Exception) -> None:
        """End a sequence with an error. After a numerics error its KV is not used again."""
        if isinstance(error, NumericsError) and seq.prefix_keys is not None:
            self._executor.prefixes.forget(seq.prefix_keys)  # the KV of such logits may be wrong as well
        self.end(seq, "error", error)

    # Preemption.

    def requeue(self, seq: SequenceState, error: PoolExhausted) -> None:
        """A sequence without room for what it was promised waits again. If no other one runs, it fails."""
        if self._scheduler.running == 1:
            self.fail(seq, error)
            return
        self._scheduler.requeue(seq.sample)
        self.preempt(seq)

    def preempt(self, seq: SequenceState) -> None:
        """Give the pages of a sequence back; the scheduler has put it among the waiting ones."""
        for feature in self._features:
            feature.forget(seq, "preempted")
        if not seq.job.request.background:
            self._counters.preempted(seq)
        if seq.kv is not None:
            seq.kv.close()
        seq.kv = None
        if seq.prefix_keys is not None:
            seq.prefix_keys.rewind()

    # Tokens.

    def notify_advances(self, advances: Sequence[Advance], results: Sequence[Result | None]) -> None:
        """Fork new samples, and hand each token of a step to its listener."""
        logprobs = iter([one for result in results if isinstance(result, RowDone) for one in result.logprobs])
        for one in advances:
            if one.parent is not None:
                self._try_fork(one.parent, one.sample)
        now_s = self._clock()
        for one, after in zip(advances, [*advances[1:], None], strict=False):
            seq, sample, over = self._seqs.get(one.sample), one.sample, False
            event = None
            if one.token is not None:
                drafted = after is not None and after.sample is sample
                event = TokenEvent(sample.index, one.token, next(logprobs), drafted)
            if seq is None:  # its listener wanted no more before the last of several tokens
                continue
            if event is not None:
                over = self.guarded(seq, self._append_token, False, seq, event, now_s)
            if one.end is not None:
                self.end(seq, one.end)
            elif over:
                self.end(seq, "stop")
        self._counters.generated(sum(one.token is not None for one in advances))

    def _append_token(self, seq: SequenceState, event: TokenEvent, now_s: float) -> bool:
        """Append a token and notify the listener; True if the listener wants no more."""
        assert seq.state is not None
        seq.ids.append(event.token)
        seq.unread = None
        seq.state.advance(event.token)
        self._counters.token_drawn(seq, now_s)
        return seq.job.listener.on_event(event)

    def _try_fork(self, parent: Sample, sample: Sample) -> None:
        """Another sample of a computed prompt; where that fails, the whole request does."""
        seq = self._seqs.get(parent)
        if seq is not None:
            self.guarded(seq, partial(self._fork, seq, sample), None)
        if sample not in self._seqs:
            self._scheduler.drop(sample)
            error = InputError("another sample of this request failed")
            for other in list(seq.job.live) if seq is not None else ():
                self.end(other, "error", error)

    def _fork(self, parent: SequenceState, sample: Sample) -> None:
        seq = fork_sequence(parent, sample, self._executor)
        seq.job.live.append(seq)
        seq.job.unforked -= 1
        if seq.prefix_keys is not None:
            self._scheduler.set_keys(sample, seq.prefix_keys.keys)
        self._seqs[sample] = seq
        self._counters.forked()

    def prompt_progress(self, seq: SequenceState, tokens: int) -> None:
        """The KV of so many prompt tokens is there. After a preemption only new ones are an event."""
        if tokens > seq.prompt_ready:
            seq.prompt_ready = tokens
            if seq.job.request.progress:
                blended = seq.blending.report() if seq.blending is not None and seq.blending.done else None
                miss = quietly(partial(self._misses.explained, seq), None)
                notify(seq.job, PromptProgress(seq.sample.index, tokens, seq.cached or 0, blended, miss))

    # Ends.

    def abort(self, which: Job | str) -> None:
        """End a request now."""
        job = self.find(which)
        for seq in list(job.live) if job is not None else ():
            self.end(seq, "cancelled")
        if job is not None:
            job.release_resources()

    def end(self, seq: SequenceState, reason: Reason, error: BaseException | None = None) -> None:
        """End a sequence exactly once: its pages go back, or to a listener that wanted to keep them."""
        job = seq.job
        if seq not in job.live:
            return
        job.live.remove(seq)
        self._seqs.pop(seq.sample, None)
        self._scheduler.drop(seq.sample)
        blended = quietly(partial(blend_report, seq), None) if seq.sample.index == 0 else None
        why: Forgotten = "unsound" if isinstance(error, NumericsError) else "ended"
        for feature in self._features:
            quietly(partial(feature.forget, seq, why), None)
        miss = quietly(partial(self._misses.ended, seq), None)
        if miss is not None:
            self._counters.missed(miss)
        keeps = job.request.keep_kv and reason != "error"
        kv = quietly(partial(detach_kv, seq, self._executor), None) if keeps else None
        if kv is None and seq.kv is not None:
            seq.kv.close()
        seq.kv = None
        unforked, job.unforked = (job.unforked, 0) if seq.sample.index == 0 else (0, job.unforked)
        cached = seq.cached or 0
        computed = max(0, seq.prompt_ready - cached)
        notify(job, Ended(seq.sample.index, reason, cached, computed, error, kv, seq.drafts, blended, miss))
        for index in range(job.request.samples - unforked, job.request.samples):
            notify(job, Ended(index, reason, error=error))
        if not job.live:
            self._close(job, seq, reason, error)

    def _close(self, job: Job, last: SequenceState, reason: Reason, error: BaseException | None) -> None:
        job.release_resources()
        if self.jobs.get(job.request.id) is job:
            del self.jobs[job.request.id]
        if not job.request.background:
            self._counters.ended(job, last, reason, error)
        self._counters.update_gauges()  # no step may follow: the gauges must not count it any more
