"""Comparisons of blended prompts with whole prefills, by background requests of their own.

No request waits for a comparison. One runs at a time, and only while no other prompt wants rows; if it is in the way of
other requests, it is dropped. Refuses to know what follows from a comparison.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from ...blend.quality_gate import QualityGate, Trial, compare, strategy_of
from ...blend.recipe import Recipe
from ...executor.lora import AdapterLease
from ...executor.protocol import Executor
from ...metrics import Counter, Gauge, Histogram, Metrics
from ..event import Ended, Event
from ..isolation import contained
from ..request import Request
from ..scheduling.proposals import HoldRows
from ..sequence import SequenceState
from .blend_decision import BlendDecision
from .feature import Abort, Feature, Proposal, Sequences, Submit

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
        plain = replace(plain, adapter=own.adapter, discover=False, background=True, max_step_tokens=MAX_STEP_TOKENS)
        if part == "whole":
            return plain
        # As it is: neither too small a gain nor the gate itself changes what is compared.
        recipe = replace(self.trial.recipe, min_gain=0.0, gate=False)
        return replace(plain, documents=own.documents, recipe=recipe)


def _decodes(seq: SequenceState) -> bool:
    """Whether a sequence has no prompt to compute now; one that waits for a store has none yet."""
    return seq.sample.held or seq.sample.waits_for_store or (seq.kv is not None and seq.sample.uncomputed <= 1)


class QualityChecks(Feature):
    """The comparisons of one engine, which gets this both as a feature and as the judge of its blended prompts."""

    def __init__(self, gate: QualityGate, executor: Executor, metrics: Metrics) -> None:
        self._gate = gate
        self._executor = executor
        self._metrics = metrics
        self._queue: deque[Comparison] = deque()  # the first may be running
        self._running: str | None = None  # the id of the background request in progress

    @property
    def has_ready(self) -> bool:
        """Whether there is something to compare."""
        return bool(self._queue)

    # A request that is compared.

    def judge(self, request: Request, adapter: str, worth: Callable[[Recipe], bool], draws: bool) -> BlendDecision:
        """How the gate wants a prompt to be blended. If it chose the prompt, its first logits will be compared."""
        made = self._gate.judge(request.recipe, adapter, worth, draws)
        if made.recipe is None:
            self._metrics.add(FALLBACKS)
        if made.trial is None:
            return BlendDecision(made.recipe)
        same = made.recipe is not None and made.recipe.ratio == made.trial.recipe.ratio
        part: Part | None = "whole" if made.recipe is None else "blended" if same else None
        return BlendDecision(made.recipe, partial(self._add, request, made.trial, part))

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

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        """The first comparison continues, waits, starts or ends. A failure ends only the comparison."""
        if not self._queue:
            return ()
        try:
            return self._advance(self._queue[0], seqs)
        except BaseException as error:
            contained(error)
            return self._drop("failed") if self._queue else ()

    def stop(self) -> Iterable[Proposal]:
        """End all comparisons."""
        proposals: list[Proposal] = []
        while self._queue:
            proposals += self._drop("closing")
        return proposals

    def _advance(self, first: Comparison, seqs: Sequences) -> list[Proposal]:
        others = [seq for seq in seqs.values() if not seq.job.request.background]
        own = next((seq for seq in seqs.values() if seq.sample.request == self._running), None)
        if not all(map(_decodes, others)):
            return self._wait(first, own, others)
        if own is not None and (own.kv is None or not self._fits(first, own, others)):
            return self._drop("busy")  # it was preempted, or other requests need its pages
        if own is not None:
            return [HoldRows(own.sample, False)]
        return self._begin(first) if self._fits(first, None, others) else self._wait(first, None, others)

    def _wait(self, first: Comparison, own: SequenceState | None, others: Sequence[SequenceState]) -> list[Proposal]:
        """Other requests go first; if they need the pages of the comparison, it is dropped."""
        first.waited += 1
        held: list[Proposal] = [] if own is None else [HoldRows(own.sample, True)]
        in_the_way = own is not None and self._needed(others) > min(self._executor.pool.free_pages())
        if in_the_way or first.waited > self._gate.config.patience:
            return self._drop("busy")
        return held

    def _fits(self, first: Comparison, own: SequenceState | None, others: Sequence[SequenceState]) -> bool:
        """Whether the rest of it fits without preempting other requests."""
        layout = self._executor.layout
        there = own.kv.row(0).reserved if own is not None and own.kv is not None else 0
        need = layout.pages_for(len(first.request.prompt)) - layout.pages_for(there) + 1
        if own is None and first.missing == "blended":
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

    def _begin(self, first: Comparison) -> list[Proposal]:
        """The background request for what is missing."""
        part = first.missing
        assert part is not None
        request = first.request_for(part)
        self._running = request.id
        return [Submit(request, _EndListener(partial(self._ended, part)), partial(first.set_logits, part))]

    def _ended(self, part: Part, ended: Ended) -> None:
        """The request of a part has ended, or was refused."""
        if self._running is None:
            return  # it was dropped
        self._running = None
        first = self._queue[0]
        if ended.reason != "length" or first.missing == part:
            self._drop("failed")
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
        if (known := self._gate.learn(first.trial, compared)) is not None:
            ratio = 1.0 if known.falls_back else known.ratio
            self._metrics.set(RATIO, ratio, strategy=strategy, asked=f"{known.asked_ratio:.4g}")

    def _drop(self, why: Why) -> list[Proposal]:
        """Give the first comparison up, and its request if there is one."""
        running, self._running = self._running, None
        self._release(self._queue[0])
        self._metrics.add(DROPPED, reason=why)
        return [] if running is None else [Abort(running)]

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
