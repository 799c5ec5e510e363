"""The engine: plan, run, sample, commit, notify. One step computes the rows of all scheduled sequences.

`step` belongs to one thread at a time; requests come and go from any. Refuses to know text and threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ..blend.chunk import ChunkCache
from ..config import EngineConfig
from ..errors import Cancelled
from ..executor.protocol import Executor
from ..metrics import Metrics
from ..store.store import Store
from .active import ActiveRequests
from .admission import BorrowedKV, JobMaker
from .counters import ENGINE_METRICS, Counters
from .event import Ended, Listener
from .features.blend_decision import BlendJudge, OnLogits
from .features.blending import BlendQueue
from .features.feature import Feature, Submit
from .features.feature_set import FeatureSet
from .features.prefix_restore import PrefixRestore
from .handles.handles import HandleInfo
from .isolation import contained
from .misses.explainer import MissExplainer
from .misses.past_prompts import PastPrompts
from .planner import Planner
from .request import Request
from .scheduling.plan import Sample, StepPlan
from .scheduling.proposals import HoldRows
from .scheduling.schedule_state import StepLimits
from .scheduling.scheduler import Scheduler
from .sequence import Job, PoolAccounting, ReclaimPages, SequenceState
from .step_runner import LaunchedStep, StepRunner
from .view import EngineView, look


class Engine:
    """Requests over one executor."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        features: Sequence[Feature] = (),
        judge: BlendJudge | None = None,
        chunks: Callable[[], ChunkCache] | None = None,
        store: Store | None = None,
        reclaim: ReclaimPages | None = None,
        past_prompts: PastPrompts | None = None,
    ) -> None:
        """`features` plug in beside blending and stored prefixes; `judge` decides how documents are blended.

        `chunks` gives what documents of prompts are found in; without it such requests are refused.

        `reclaim` is asked for pages before a request is preempted or fails.

        `store`, if it has a tier that outlives the process, keeps prefixes that this executor has no room for. Closing
        the engine puts all of them there.

        `past_prompts` remember the latest prompts, so that misses can be explained.
        """
        config = config or EngineConfig()
        device = executor.pool.device.type
        sizes = config.step_sizes(device)
        limits = StepLimits(sizes.step_tokens, sizes.max_rows, executor.layout.page_tokens, sizes.shared_step_tokens)
        self._executor, self._clock = executor, clock
        self._jobs = JobMaker(executor, chunks, judge, config.discover)
        self.metrics = metrics or Metrics(ENGINE_METRICS)
        self.wakeup = threading.Event()  # set, from any thread, when there may be something to do
        self._inbox: deque[Callable[[], None]] = deque()  # calls from other threads, until the next step
        self._arriving: dict[Job, None] = {}  # jobs in there
        self._seqs: dict[Sample, SequenceState] = {}
        restore = self._prefix_restore = _prefix_restore(executor, store, config, self.metrics, self.wakeup.set)
        plugged: list[Feature] = [*features, BlendQueue(self.wakeup.set), *([] if restore is None else [restore])]
        load_prefix, on_evict = (None, None) if restore is None else (restore.load_prefix, restore.store_page)
        accounting = PoolAccounting(executor, self._seqs, reclaim or _nothing_to_reclaim, load_prefix)
        scheduler = self._scheduler = Scheduler(limits, accounting, config.owner_weights)
        counters = self._counters = Counters(self.metrics, executor.pool, scheduler, clock)
        self._misses = MissExplainer(executor, past_prompts or PastPrompts(clock))
        given = (executor, scheduler, counters, clock, self._seqs, plugged, self._misses)
        active = self._active = ActiveRequests(*given)
        every = self._features = FeatureSet(plugged, self._seqs, scheduler, active, self._submit)
        self._planner = Planner(executor, self._seqs, scheduler, accounting, active, counters, every, self._settle)
        self._overlap = config.overlap if config.overlap is not None else device != "cpu"
        self._unfinished: LaunchedStep | None = None  # a step whose tokens are still on the device
        self._runner = StepRunner(executor, self._seqs, active, counters, every, on_evict)
        self.on_evict = on_evict  # gets pages that the prefix index loses; None without a store

    # The spine.

    def step(self) -> bool:
        """One forward for all scheduled rows; False if there is none.

        Where steps overlap, the tokens of a step are read after the next one was launched: what follows from them comes
        one step later.

        Raises what concerns the call itself. After a cancel all sequences are where they were before. After an internal
        error the rows of the step end.
        """
        plan = self._plan()
        step = self._launch(plan) if plan.work else None
        settled = self._settle()
        if step is not None:
            with self._ending_rows(plan):
                if step.advances is None:
                    self._finish(step)
                else:
                    self._unfinished = step
                    self._runner.grow(step)
        self._counters.update_gauges()
        return step is not None or settled

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Where it overlaps, the scheduler counts its tokens before they are read."""
        with self._ending_rows(plan):
            step = self._runner.launch(plan, self._overlap and not self._features.reads_tokens)
            return replace(step, advances=self._scheduler.commit(plan, step.unread())) if step.overlaps else step

    def _settle(self) -> bool:
        """Finish the step that was launched before, if its tokens were not read yet; False if there is none."""
        step, self._unfinished = self._unfinished, None
        if step is not None:
            with self._ending_rows(step.plan):
                self._finish(step)
        return step is not None

    def _finish(self, launched: LaunchedStep) -> None:
        """Read the tokens of a step, commit them and notify the listeners."""
        step, counted = launched.finish(), launched.advances
        self._features.after_step(step)
        drawn = self._runner.commit(step, grown=counted is not None)
        if counted is None:
            advances = self._scheduler.commit(step.plan, drawn)
        else:
            advances = self._scheduler.read(counted, step.plan, drawn)
        self._active.notify_advances(advances, step.committed(drawn))

    @contextmanager
    def _ending_rows(self, plan: StepPlan) -> Iterator[None]:
        """An internal error ends the rows of a plan, since their state is half done."""
        try:
            yield
        except Cancelled:
            raise
        except BaseException as error:
            for work in plan.work:
                if (seq := self._seqs.get(work.sample)) is not None:
                    self._active.end(seq, "error", error)
            raise

    def _plan(self) -> StepPlan:
        try:
            self.drain_inbox()
            return self._planner.plan()
        except BaseException as error:  # an internal error, or an interrupt: no sequence's state can be trusted
            self.fail_all(error)
            raise

    # From any thread.

    def prepare(
        self,
        request: Request,
        listener: Listener,
        borrowed: BorrowedKV | None = None,
        on_first_logits: OnLogits | None = None,
    ) -> Job:
        """Check a request and make the job to add; raises for everything that is wrong with the request.

        The engine owns the borrowed cache from here on, also if this raises.
        """
        job = self._jobs.make(request, listener, borrowed, on_first_logits)
        self._misses.compare(job)
        return job

    def add(self, job: Job, held: bool = False) -> None:
        """Admit a request at the next step; if `held`, it gets no row until `resume`."""
        self._scheduler.apply(HoldRows(job.first.sample, held))
        job.arrived_s = self._clock()
        self._arriving[job] = None
        self._inbox.append(partial(self._admit, job))

    def abort(self, which: Job | str) -> None:
        """End a request before the next step, unless it has ended already; a job also if it was never added."""
        self._inbox.append(partial(self._active.abort, which))

    def hold(self, which: Job | str) -> None:
        """Give a request no row until `resume`: its reader is behind."""
        self._inbox.append(partial(self._hold, which, True))

    def resume(self, which: Job | str) -> None:
        """Give a request rows again."""
        self._inbox.append(partial(self._hold, which, False))

    def view(self, tenant: str, handles: Sequence[HandleInfo] = (), most: int | None = None) -> EngineView:
        """What a tenant has here at this moment; its handles are given, since they are kept elsewhere."""
        seqs = [*self._seqs.values(), *[job.first for job in list(self._arriving)]]
        return look(self._executor, [one for one in seqs if not one.job.request.background], tenant, handles, most)

    @property
    def requests(self) -> int:
        """Requests in progress for which callers wait, those not yet admitted included."""
        return sum(not job.request.background for job in (*list(self._active.jobs.values()), *list(self._arriving)))

    @property
    def waiting(self) -> int:
        """Samples that wait for their first row, or for the next one after a preemption."""
        return self._scheduler.waiting + len(self._arriving)

    def waiting_by_owner(self) -> Counter[str]:
        """The same for each owner."""
        return self._scheduler.waiting_by_owner() + Counter(job.request.owner for job in list(self._arriving))

    # Between two steps.

    def drain_inbox(self) -> None:
        """Carry out the calls of other threads."""
        while self._inbox:
            self._inbox.popleft()()

    @property
    def has_inbox(self) -> bool:
        """Whether calls of other threads wait to be carried out."""
        return bool(self._inbox)

    @property
    def ready(self) -> bool:
        """Whether a step would have something to do."""
        return self.has_inbox or self._has_unread or self._scheduler.ready or self._features.has_ready

    @property
    def _has_unread(self) -> bool:
        """Whether a sequence waits for a token that is still on the device."""
        return self._unfinished is not None and any(work.sample in self._seqs for work in self._unfinished.plan.work)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which the driver asks again, if nothing wakes it; None where no sequence waits for a store."""
        return self._features.wait_timeout_s

    def fail_all(self, error: BaseException) -> None:
        """End all requests."""
        self.drain_inbox()
        self._unfinished = None  # its tokens are for sequences that end now
        self._features.stop()
        for job in list(self._active.jobs.values()):
            for seq in list(job.live):
                self._active.end(seq, "error", error)

    def close(self) -> None:
        """Put all known prefixes into the store, if there is one that outlives the process."""
        if self._prefix_restore is not None:
            self._prefix_restore.close()

    # What other threads and features ask for.

    def _admit(self, job: Job) -> None:
        self._arriving.pop(job, None)
        self._active.add(job)

    def _hold(self, which: Job | str, held: bool) -> None:
        job = self._active.find(which)
        for seq in job.live if job is not None else ():
            self._scheduler.apply(HoldRows(seq.sample, held))

    def _submit(self, own: Submit) -> None:
        """Admit a request of a feature, or tell its listener why not."""
        try:
            job = self.prepare(own.request, own.listener, on_first_logits=own.on_first_logits)
        except BaseException as error:
            own.listener.on_event(Ended(0, "error", error=contained(error)))
        else:
            self._active.add(job)


def _prefix_restore(
    executor: Executor, store: Store | None, config: EngineConfig, metrics: Metrics, wake: Callable[[], None]
) -> PrefixRestore | None:
    """Prefixes in a store; None without a store that outlives the process, or has memory that the device has not."""
    if store is None or config.stored_prefix_tokens is None:
        return None
    swaps = store.has_memory and executor.pool.device.type != "cpu"  # evicted and preempted pages go to the host
    if store.least_budget is None and not swaps:
        return None
    return PrefixRestore(executor, store, config.stored_prefix_tokens, metrics, wake)


def _nothing_to_reclaim(_pinned: bool) -> bool:
    return False
