"""Speculative decoding in the engine: how many drafts each sample gets, calling the drafter, counting accepted drafts.

A drafter that fails costs its drafts and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ..metrics import Counter, Metrics
from ..sampling.sampler import SamplingState
from ..speculative.acceptance import AcceptanceRate
from ..speculative.allocation import CREDIT, DraftBid, allot, moved, possible, probe
from ..speculative.cost import DraftCosts, StepPrice
from ..speculative.drafter import Draft, DraftContext, Drafter
from .event import DraftCounts
from .forward import Result, RowDone, RowTask
from .isolation import contained, quietly
from .plan import Sample, StepPlan

if TYPE_CHECKING:
    from .sequence import SequenceState

_log = logging.getLogger(__name__)

DRAFTS = Counter("kvilt_spec_decode_num_drafts_total", "Drafts that were computed, of one token or more.")
DRAFTED = Counter("kvilt_spec_decode_num_draft_tokens_total", "Tokens of these drafts.")
ACCEPTED = Counter("kvilt_spec_decode_num_accepted_tokens_total", "Those that were drawn.")
ACCEPTED_AT = Counter(
    "kvilt_spec_decode_num_accepted_tokens_per_pos_total", "The same by their place in a draft.", ("position",)
)
NO_DRAFT = Draft()
_OVERALL_DECAY = 0.97  # the acceptance rate of all samples changes more slowly than that of one
_CHEAP = 0.1  # a drafter that costs less than this part of verifying is asked for more drafts than will be used
DRAFT_METRICS = (DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_AT)


@dataclass(slots=True, eq=False)
class DraftState:
    """One sample's drafts."""

    draft_context: DraftContext
    acceptance: AcceptanceRate
    most: int
    draft: Draft = NO_DRAFT  # of the step in progress
    probed: bool = False  # it is not expected to pay: it measures the acceptance rate again
    drafted: int = 0
    places: list[int] = field(default_factory=list)  # how often the first, second, ... of a draft was accepted

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(self.drafted, sum(self.places), tuple(self.places))


class Drafting:
    """Drafts for the samples of one engine, in the thread that steps."""

    def __init__(
        self, drafter: Drafter, cost: DraftCosts | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter = drafter
        self._cost = cost or DraftCosts()
        self._clock = clock
        self._price: StepPrice | None = None  # of the step in progress
        self._overall = AcceptanceRate.of(drafter.hopes, _OVERALL_DECAY)  # of all samples
        self._saved_s: dict[Sample, float] = {}  # by drafts, so far; also of samples without drafts
        self._began_s = self._drafter_s = 0.0

    def forget(self, draft_state: DraftState) -> None:
        """A sample is over."""
        quietly(partial(self._drafter.forget, draft_state.draft_context), None)

    def close(self) -> None:
        self._drafter.close()

    # One step.

    def request_drafts(self, seqs: Mapping[Sample, SequenceState]) -> None:
        """Before a plan: how many drafts each decoding sample asks for."""
        ready = [seq for sample, seq in seqs.items() if sample.uncomputed == 1 and not sample.held]
        draws = [seq for seq in ready if seq.kv is not None and seq.state is not None]
        for seq in seqs.values():
            seq.sample.drafts = 0
        self._saved_s = {sample: saved for sample, saved in self._saved_s.items() if sample in seqs}
        self._price = self._cost.price(len(draws))
        for seq in draws:
            if seq.draft_state is None and seq.state is not None and not seq.without_drafts:
                seq.draft_state = self._try_begin(seq, seq.state)
            if (draft_state := seq.draft_state) is not None:
                draft_state.draft = NO_DRAFT
                draft_state.acceptance.steps += 1
        if self._price is not None and draws:
            for seq, count in zip(draws, self._draft_counts(draws, self._price), strict=True):
                seq.sample.drafts = count

    def _draft_counts(self, draws: Sequence[SequenceState], price: StepPrice) -> list[int]:
        """As many as may pay at best. A cheap drafter is asked for more than will be verified."""
        bids = []
        for seq in draws:
            draft_state, saved_s = seq.draft_state, self._time_saved(seq.sample, price)
            if draft_state is None:
                bids.append(DraftBid(0.0, 0.0, 0, saved_s))
                continue
            acceptance = draft_state.acceptance
            surest = acceptance.surest(self._overall)
            bids.append(DraftBid(acceptance.best, surest, draft_state.most, saved_s, acceptance.any_due))
        if not possible(bids, price):
            return [0] * len(bids)
        if price.own_s > _CHEAP * price.each_s:
            return probe(bids, allot(bids, price), price)
        return [bid.most if bid.chance > price.share or bid.probe else 0 for bid in bids]

    def _time_saved(self, sample: Sample, price: StepPrice) -> float:
        return self._saved_s.get(sample, CREDIT * price.plain_s)

    def _try_begin(self, seq: SequenceState, state: SamplingState) -> DraftState | None:
        """A sample's draft state; None if it wants no drafts, or if its drafter fails."""
        try:
            draft_state = self._begin(seq, state)
        except BaseException as error:
            contained(error)
            draft_state = None
        seq.without_drafts = draft_state is None
        return draft_state

    def _begin(self, seq: SequenceState, state: SamplingState) -> DraftState | None:
        """A sample's draft state; None if it wants no drafts."""
        wanted, first = state.params.draft_tokens, seq.job.first
        if wanted == 0:
            return None
        sibling = first.draft_state.draft_context if first.draft_state is not None and first is not seq else None
        draft_context = self._drafter.begin(seq.ids, state, sibling)
        acceptance = AcceptanceRate.of([tally.chance for tally in self._overall.tallies])
        return DraftState(draft_context, acceptance, self._drafter.most if wanted is None else wanted)

    def propose(self, plan: StepPlan, seqs: Mapping[Sample, SequenceState], vocab_size: int) -> None:
        """Ask the drafter for the drafts that the plan has room for."""
        began_s, self._drafter_s = self._clock(), 0.0
        planned = [(work.drafts, seqs[work.sample].draft_state) for work in plan.work if work.drafts]
        drafted = [(count, draft_state) for count, draft_state in planned if draft_state is not None]
        if drafted:
            drafts = self._drafts(
                [draft_state.draft_context for _, draft_state in drafted], [count for count, _ in drafted]
            )
            for (count, draft_state), draft in zip(drafted, drafts, strict=True):
                draft_state.draft = _valid_draft(draft, count, vocab_size, draft_state.draft_context.state.end_ids)
            if any(draft_state.draft.tokens for _, draft_state in drafted):
                self._trim([seqs[work.sample] for work in plan.work if work.draws])
            self._record_drafter(drafts, self._clock() - began_s)
        self._began_s = self._clock()

    def _trim(self, draws: Sequence[SequenceState]) -> None:
        """Keep only the drafts that pay, now that they are known."""
        price = self._price
        assert price is not None
        bids = []
        for seq in draws:
            draft_state, saved_s = seq.draft_state, self._time_saved(seq.sample, price)
            if draft_state is None or not draft_state.draft.tokens:
                bids.append(DraftBid(0.0, 0.0, 0, saved_s))
                continue
            grade, most, acceptance = draft_state.draft.grade, len(draft_state.draft.tokens), draft_state.acceptance
            bids.append(
                DraftBid(
                    acceptance.chance(grade),
                    acceptance.sure(grade, self._overall),
                    most,
                    saved_s,
                    acceptance.is_due(grade),
                )
            )
        paying = allot(bids, price)
        for seq, paid, count in zip(draws, paying, probe(bids, paying, price), strict=True):
            if (draft_state := seq.draft_state) is not None:
                draft_state.draft = replace(draft_state.draft, tokens=draft_state.draft.tokens[:count])
                draft_state.probed = count > paid

    def _record_drafter(self, drafts: Sequence[Draft], took_s: float) -> None:
        """Record the time of the drafter. A call in which it reads a prompt says nothing about the price of a draft."""
        count = sum(len(draft.tokens) for draft in drafts)
        if not any(draft.read for draft in drafts):
            self._drafter_s = took_s
            if count and self._price is not None:
                self._cost.drafted(self._price.rows, count, took_s)

    def _drafts(self, draft_contexts: Sequence[DraftContext], k: Sequence[int]) -> Sequence[Draft]:
        try:
            drafts = self._drafter.propose(draft_contexts, k)
            if len(drafts) == len(draft_contexts):
                return drafts
            _log.error(
                "the drafter gave %d drafts for %d samples; this step has no drafts", len(drafts), len(draft_contexts)
            )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a cancel included: this step is drawn without drafts
            _log.exception("the drafter failed; this step has no drafts")
        return [NO_DRAFT] * len(draft_contexts)

    def record_step(self, plan: StepPlan, tasks: Sequence[RowTask | None], results: Sequence[Result | None]) -> None:
        """Record the time of a decode step; other steps say nothing about the price of a draft."""
        step_s, counts = self._clock() - self._began_s, [len(task.drafts) for task in tasks if task is not None]
        only_decodes = all(work.count == 1 and work.draws and not work.forks for work in plan.work)
        if only_decodes:
            self._cost.stepped(len(counts), sum(counts), step_s)
        price = self._cost.known(sum(work.draws for work in plan.work))
        if price is None:
            return
        extra_s = price.extra_s(sum(counts))
        if only_decodes and extra_s:  # the measured time, unless the step was interrupted
            extra_s = min(max(step_s - price.plain_s, extra_s / 2), extra_s * 2)
        extra_s += self._drafter_s
        for work, result in zip(plan.work, results, strict=True):
            if work.draws and not work.forks and isinstance(result, RowDone):
                before_s, accepted = self._time_saved(work.sample, price), len(result.tokens) - 1
                self._saved_s[work.sample] = moved(before_s, accepted, extra_s, price.plain_s)

    def record_accepted(self, draft_state: DraftState, accepted: int, metrics: Metrics) -> None:
        """The drafts of a sample were verified, and so many of them accepted."""
        drafted, grade = len(draft_state.draft.tokens), draft_state.draft.grade
        draft_state.draft = NO_DRAFT
        if not drafted:
            return
        draft_state.drafted += drafted
        draft_state.places += [0] * (drafted - len(draft_state.places))
        for place in range(accepted):
            draft_state.places[place] += 1
            metrics.add(ACCEPTED_AT, position=str(place))
        for acceptance in (draft_state.acceptance, self._overall):
            acceptance.took(grade, drafted, accepted, draft_state.probed)
        metrics.add(DRAFTS)
        metrics.add(DRAFTED, drafted)
        metrics.add(ACCEPTED, accepted)


def _valid_draft(draft: Draft, count: int, vocab_size: int, end_ids: frozenset[int]) -> Draft:
    """The first `count` tokens of a draft, as far as they are valid; none where the drafter returned something else."""
    try:
        return replace(draft, tokens=_valid_tokens(draft.tokens[:count], vocab_size, end_ids))
    except Exception:
        _log.exception("the drafter gave no draft; its sample has none in this step")
        return NO_DRAFT


def _valid_tokens(tokens: Sequence[int], vocab_size: int, end_ids: frozenset[int]) -> Sequence[int]:
    """The tokens before the first that ends the sample or is not in its vocabulary: a draft model may have more."""
    bad = (i for i, token in enumerate(tokens) if token in end_ids or not 0 <= token < vocab_size)
    return tokens[: next(bad, len(tokens))]
