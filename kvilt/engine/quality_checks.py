"""Comparisons of blended prompts with whole prefills, in the background of an engine's steps.

No request waits for a comparison. One runs at a time, and only while no other prompt wants rows; if it is in the way of
other requests, it is dropped. Refuses to know what follows from a comparison.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from ..batch import Last, Logits, Row
from ..blend.quality_gate import QualityGate, Trial, compare, strategy_of
from ..executor.lora import AdapterLease
from ..metrics import Counter, Gauge, Histogram, Metrics
from .admission import make_job
from .event import Ended, Event
from .isolation import contained
from .plan import Sample
from .request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from ..blend.chunk import ChunkCache
    from ..executor.protocol import Executor
    from .sequence import Job, SequenceState

_log = logging.getLogger(__name__)

PRIORITY = 1000  # after all other requests
MAX_STEP_TOKENS = 64  # of a comparison in one step: a request that arrives meanwhile waits for that
MAX_COMPARISONS = 2  # that wait or run; further ones are dropped

KL = Histogram(
    "kvilt_blend_kl",
    "KL of a blended prompt's first token from a whole prefill's, in nats.",
    ("strategy",),
    (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
AGREEMENTS = Counter("kvilt_blend_agreements_total", "Comparisons in which the likeliest token agreed.", ("strategy",))
SAMPLED = Counter("kvilt_blend_gate_sampled_total", "Blended prompts that were chosen to be compared.")
DROPPED = Counter("kvilt_blend_gate_dropped_total", "Of these, those that were not compared, by why.", ("reason",))
RATIO = Gauge("kvilt_blend_gate_ratio", "What a recipe is blended with; 1 if as a whole.", ("strategy", "asked"))
FALLBACKS = Counter("kvilt_blend_gate_fallbacks_total", "Prompts with documents that were computed as a whole.")
GATE_METRICS = (KL, AGREEMENTS, SAMPLED, DROPPED, RATIO, FALLBACKS)

Part = Literal["whole", "blended"]
Why = Literal["full", "busy", "closing", "failed"]


class EngineAPI(Protocol):
    """The methods of the engine that comparisons call, in the thread that steps."""

    def chunks_for(self, request: Request) -> ChunkCache | None:
        """What the documents of a request are found in."""
        ...

    def admit_now(self, job: Job) -> None:
        """Admit a request without waiting for the next step."""
        ...

    def abort_now(self, job: Job) -> None:
        """End a request without waiting for the next step."""
        ...


@dataclass(slots=True, eq=False)
class Comparison:
    """The logits of one prompt's first token, blended and from a whole prefill, as far as they are computed."""

    request: Request
    trial: Trial
    adapter_lease: AdapterLease | None
    whole: Tensor | None = None  # [vocab]
    blended: Tensor | None = None
    waited: int = 0  # steps of other requests

    @property
    def missing(self) -> Part | None:
        return "whole" if self.whole is None else "blended" if self.blended is None else None

    def set_logits(self, part: Part, logits: Tensor) -> None:
        setattr(self, part, logits)

    def request_for(self, part: Part) -> Request:
        """The background request that computes a part."""
        own = self.request
        plain = Request(own.prompt, None, priority=PRIORITY, tenant=own.tenant, owner=own.owner)
        plain = replace(plain, adapter=own.adapter)
        if part == "whole":
            return replace(plain, background=True)
        recipe = replace(self.trial.recipe, min_gain=0.0)
        return replace(plain, background=True, documents=own.documents, recipe=recipe)


def with_watcher(
    seq: SequenceState, then: Callable[[Row, Logits, int], None] | None = None
) -> Callable[[Row, Logits, int], None] | None:
    """The callback of a sequence's row. A comparison also gets the logits after the prompt, if the row has them."""
    if (on_first_logits := seq.on_first_logits) is None:
        return then

    def on_result(row: Row, logits: Logits, index: int) -> None:
        if isinstance(row.want, Last):
            seq.on_first_logits = None
            on_first_logits(logits.of_row(index)[0].clone())
        if then is not None:
            then(row, logits, index)

    return on_result


def _decodes(seq: SequenceState) -> bool:
    """Whether a sequence has no prompt to compute now; one that waits for a store has none yet."""
    return seq.sample.held or seq.sample.waits_for_store or (seq.kv is not None and seq.sample.uncomputed <= 1)


class QualityChecks:
    """The comparisons of one engine."""

    def __init__(
        self, gate: QualityGate, executor: Executor, metrics: Metrics, seqs: Mapping[Sample, SequenceState]
    ) -> None:
        self.gate = gate
        self._executor = executor
        self._metrics = metrics
        self._seqs = seqs
        self._queue: deque[Comparison] = deque()  # the first may be running
        self._job: Job | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._queue)

    @property
    def running(self) -> int:
        """Background requests in progress."""
        return int(self._job is not None)

    # A request that is compared.

    def watch(self, job: Job) -> None:
        """A request was prepared. If the gate chose it, its first logits will be compared."""
        if (gate_decision := job.gate_decision) is None:
            return
        if gate_decision.recipe is None:
            self._metrics.add(FALLBACKS)
        if gate_decision.trial is not None:
            same = gate_decision.recipe is not None and gate_decision.recipe.ratio == gate_decision.trial.recipe.ratio
            part: Part | None = "whole" if gate_decision.recipe is None else "blended" if same else None
            job.first.on_first_logits = partial(self._add, job.request, gate_decision.trial, part)

    def _add(self, request: Request, trial: Trial, part: Part | None, logits: Tensor) -> None:
        """The first logits of a request were computed. A failure here does not fail the request."""
        self._metrics.add(SAMPLED)
        if len(self._queue) >= MAX_COMPARISONS:
            self._metrics.add(DROPPED, reason="full")
            return
        try:
            comparison = Comparison(request, trial, self._executor.adapters.hold(request.adapter))
        except Exception:
            _log.exception("a blended prompt cannot be compared")
            self._metrics.add(DROPPED, reason="failed")
            return
        if part is not None:
            comparison.set_logits(part, logits)
        self._queue.append(comparison)

    # Between steps, in the thread that steps.

    def before_plan(self, engine: EngineAPI) -> None:
        """Before a plan: the first comparison continues, waits, starts or ends. A failure ends only the comparison."""
        if not self._queue:
            return
        try:
            self._advance(engine)
        except BaseException as error:
            contained(error)
            if self._queue:
                self._drop(engine, "failed")

    def _advance(self, engine: EngineAPI) -> None:
        first, job = self._queue[0], self._job
        others = [seq for seq in self._seqs.values() if not seq.job.request.background]
        if not all(map(_decodes, others)):
            self._wait(engine, first, job, others)
        elif job is not None and (job.first.kv is None or not self._fits(first, job, others)):
            self._drop(engine, "busy")  # it was preempted, or other requests need its pages
        elif job is not None:
            job.first.sample.held = False
        elif self._fits(first, job, others):
            self._begin(engine, first)
        else:
            self._wait(engine, first, job, others)

    def _wait(self, engine: EngineAPI, first: Comparison, job: Job | None, others: Sequence[SequenceState]) -> None:
        """Other requests go first; if they need the pages of the comparison, it is dropped."""
        first.waited += 1
        if job is not None:
            job.first.sample.held = True
        in_the_way = job is not None and self._needed(others) > min(self._executor.pool.free_pages())
        if in_the_way or first.waited > self.gate.config.patience:
            self._drop(engine, "busy")

    def close(self, engine: EngineAPI) -> None:
        """End all comparisons."""
        while self._queue:
            self._drop(engine, "closing")

    def _fits(self, first: Comparison, job: Job | None, others: Sequence[SequenceState]) -> bool:
        """Whether the rest of it fits without preempting other requests."""
        layout = self._executor.layout
        there = job.first.kv.row(0).reserved if job is not None and job.first.kv is not None else 0
        need = layout.pages_for(len(first.request.prompt)) - layout.pages_for(there) + 1
        if job is None and first.missing == "blended":
            need += layout.pages_for(max(map(len, first.request.documents))) + 1  # to compute one that is not stored
        return need + self._needed(others) <= min(self._executor.pool.free_pages())

    def _needed(self, others: Sequence[SequenceState]) -> int:
        """Pages that others may take before they draw their next token, forks and copied tails included."""
        layout = self._executor.layout
        return sum(
            layout.pages_for(one.sample.known + 1)
            - layout.pages_for(one.sample.computed if one.kv is not None else 0)
            + (layout.pages_for(one.sample.blend_progress.scratch) if one.sample.blend_progress is not None else 0)
            + one.sample.width
            + 1
            for one in others
            if not one.sample.held
        )

    def _begin(self, engine: EngineAPI, first: Comparison) -> None:
        part = first.missing
        assert part is not None
        request = first.request_for(part)
        try:
            job = make_job(
                self._executor, request, _EndListener(partial(self._ended, engine)), chunks=engine.chunks_for(request)
            )
        except Exception:
            _log.exception("a blended prompt cannot be compared")
            self._drop(engine, "failed")
            return
        job.first.on_first_logits = partial(first.set_logits, part)
        job.first.sample.max_step_tokens = MAX_STEP_TOKENS
        self._job = job
        engine.admit_now(job)

    def _ended(self, engine: EngineAPI, ended: Ended) -> None:
        """The request of a part has ended."""
        if self._job is None:
            return  # it was dropped
        before, self._job = self._job, None
        first = self._queue[0]
        if ended.reason != "length" or before.first.on_first_logits is not None:
            self._drop(engine, "failed")
        elif first.missing is None:
            self._learn(first)

    def _learn(self, first: Comparison) -> None:
        self._release(first)
        assert first.whole is not None
        assert first.blended is not None
        if (compared := compare(first.whole, first.blended)) is None:
            self._metrics.add(DROPPED, reason="failed")
            return
        strategy = strategy_of(first.trial.recipe)
        self._metrics.observe(KL, compared.kl, strategy=strategy)
        if compared.agrees:
            self._metrics.add(AGREEMENTS, strategy=strategy)
        if (known := self.gate.learn(first.trial, compared)) is not None:
            ratio = 1.0 if known.falls_back else known.ratio
            self._metrics.set(RATIO, ratio, strategy=strategy, asked=f"{known.asked_ratio:.4g}")

    def _drop(self, engine: EngineAPI, why: Why) -> None:
        job, self._job = self._job, None
        self._release(self._queue[0])
        self._metrics.add(DROPPED, reason=why)
        if job is not None:
            engine.abort_now(job)

    def _release(self, first: Comparison) -> None:
        self._queue.remove(first)
        if first.adapter_lease is not None:
            first.adapter_lease.release()


@dataclass(frozen=True, slots=True)
class _EndListener:
    """Listens for the end of a comparison's own request."""

    ended: Callable[[Ended], None]

    def on_event(self, event: Event) -> bool:
        if isinstance(event, Ended):
            self.ended(event)
        return False
