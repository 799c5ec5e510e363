"""Speculative decoding in the engine: how many drafts each sample gets, and calling the drafter.

A drafter that fails costs its drafts and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...sampling.sampler import SamplingState
from ...speculative.acceptance import AcceptanceRate
from ...speculative.allocation import CREDIT, DraftBid, allot, moved, possible, probe
from ...speculative.cost import DraftCosts, StepPrice
from ...speculative.drafter import Draft, DraftContext, Drafter
from ..forward import RowDone
from ..isolation import contained, quietly
from ..rows import row_task
from ..scheduling.plan import Sample, StepPlan
from ..scheduling.proposals import WantDrafts
from ..sequence import SequenceState
from .feature import Feature, FinishedStep, Forgotten, MakeRow, Proposal, Sequences

_log = logging.getLogger(__name__)

NO_DRAFT = Draft()
_OVERALL_DECAY = 0.97  # the acceptance rate of all samples changes more slowly than that of one
_CHEAP = 0.1  # a drafter that costs less than this part of verifying is asked for more drafts than will be used


@dataclass(slots=True, eq=False)
class DraftState:
    """One sample's drafts."""

    draft_context: DraftContext
    acceptance: AcceptanceRate
    most: int
    draft: Draft = NO_DRAFT  # of the step in progress
    probed: bool = False  # it is not expected to pay: it measures the acceptance rate again


class Drafting(Feature):
    """Drafts for the samples of one engine, in the thread that steps."""

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        cost: DraftCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`vocab_size` is that of the model that verifies; a draft model may have more tokens."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._cost = cost or DraftCosts()
        self._clock = clock
        self._price: StepPrice | None = None  # of the step in progress
        self._overall = AcceptanceRate.of(drafter.hopes, _OVERALL_DECAY)  # of all samples
        # Of all sequences that have drawn; None where one wants no drafts, or its drafter failed.
        self._states: dict[SequenceState, DraftState | None] = {}
        self._saved_s: dict[Sample, float] = {}  # by drafts, so far; also of samples without drafts
        self._began_s = self._drafter_s = 0.0

    def state_of(self, seq: SequenceState) -> DraftState | None:
        """The drafts of a sequence, once it wants some."""
        return self._states.get(seq)

    def forget(self, seq: SequenceState, why: Forgotten) -> None:
        """A sequence is over; after a preemption its drafts go on."""
        if why == "preempted":
            return
        if (draft_state := self._states.pop(seq, None)) is not None:
            quietly(partial(self._drafter.forget, draft_state.draft_context), None)

    # Before a plan.

    @property
    def reads_tokens(self) -> bool:
        """A draft continues the last token."""
        return True

    def before_plan(self, seqs: Sequences) -> Iterable[Proposal]:
        """How many drafts each decoding sample asks for."""
        ready = [seq for sample, seq in seqs.items() if sample.uncomputed == 1 and not sample.held]
        draws = [seq for seq in ready if seq.kv is not None and seq.state is not None]
        self._saved_s = {sample: saved for sample, saved in self._saved_s.items() if sample in seqs}
        self._price = self._cost.price(len(draws))
        for seq in draws:
            if seq not in self._states and seq.state is not None:
                self._states[seq] = self._try_begin(seq, seq.state)
            if (draft_state := self._states[seq]) is not None:
                draft_state.draft = NO_DRAFT
                draft_state.acceptance.steps += 1
        if self._price is None or not draws:
            return [WantDrafts({})]
        counts = zip(draws, self._draft_counts(draws, self._price), strict=True)
        return [WantDrafts({seq.sample: count for seq, count in counts if count > 0})]

    def _draft_counts(self, draws: Sequence[SequenceState], price: StepPrice) -> list[int]:
        """As many as may pay at best. A cheap drafter is asked for more than will be verified."""
        bids = []
        for seq in draws:
            draft_state, saved_s = self._states.get(seq), self._time_saved(seq.sample, price)
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
            return self._begin(seq, state)
        except BaseException as error:
            contained(error)
            return None

    def _begin(self, seq: SequenceState, state: SamplingState) -> DraftState | None:
        """A sample's draft state; None if it wants no drafts."""
        wanted, first = state.params.draft_tokens, self._states.get(seq.job.first)
        if wanted == 0 or seq.job.request.embeds is not None:  # a drafter sees ids alone
            return None
        sibling = first.draft_context if first is not None and seq.job.first is not seq else None
        draft_context = self._drafter.begin(seq.ids, state, sibling)
        draft_context.predicted = seq.job.request.predicted
        acceptance = AcceptanceRate.of([tally.chance for tally in self._overall.tallies])
        return DraftState(draft_context, acceptance, self._drafter.most if wanted is None else wanted)

    # After a plan.

    def rows(self, plan: StepPlan, seqs: Sequences) -> Mapping[Sample, MakeRow]:
        """Rows with the drafts that the plan has room for."""
        began_s, self._drafter_s = self._clock(), 0.0
        makers: dict[Sample, MakeRow] = {}
        planned = [(work, self._states.get(seqs[work.sample])) for work in plan.work if work.drafts]
        drafted = [(work, draft_state) for work, draft_state in planned if draft_state is not None]
        if drafted:
            drafts = self._drafts([one.draft_context for _, one in drafted], [work.drafts for work, _ in drafted])
            for (work, draft_state), draft in zip(drafted, drafts, strict=True):
                ends = draft_state.draft_context.state.end_ids
                draft_state.draft = _valid_draft(draft, work.drafts, self._vocab_size, ends)
            if any(draft_state.draft.tokens for _, draft_state in drafted):
                self._trim([seqs[work.sample] for work in plan.work if work.draws])
            self._record_drafter(drafts, self._clock() - began_s)
            for work, draft_state in drafted:
                makers[work.sample] = partial(row_task, seqs[work.sample], work, draft_state.draft.tokens)
        self._began_s = self._clock()
        return makers

    def _trim(self, draws: Sequence[SequenceState]) -> None:
        """Keep only the drafts that pay, now that they are known."""
        price = self._price
        assert price is not None
        bids = []
        for seq in draws:
            draft_state, saved_s = self._states.get(seq), self._time_saved(seq.sample, price)
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
            if (draft_state := self._states.get(seq)) is not None:
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

    # After a step.

    def after_step(self, step: FinishedStep, seqs: Sequences) -> Iterable[Proposal]:
        """Record what the step took, and how many of its drafts were accepted."""
        quietly(partial(self._record_step, step), None)
        for work, result in zip(step.plan.work, step.results, strict=True):
            seq = seqs.get(work.sample)
            draft_state = self._states.get(seq) if seq is not None and work.drafts else None
            if draft_state is not None and isinstance(result, RowDone):
                self._record_accepted(draft_state, len(result.tokens) - 1)
        return ()

    def _record_step(self, step: FinishedStep) -> None:
        """Record the time of a decode step; other steps say nothing about the price of a draft."""
        work = step.plan.work
        step_s, counts = self._clock() - self._began_s, [len(task.drafts) for task in step.tasks if task is not None]
        only_decodes = all(one.count == 1 and one.draws and not one.forks for one in work)
        if only_decodes:
            self._cost.stepped(len(counts), sum(counts), step_s)
        price = self._cost.known(sum(one.draws for one in work))
        if price is None:
            return
        extra_s = price.extra_s(sum(counts))
        if only_decodes and extra_s:  # the measured time, unless the step was interrupted
            extra_s = min(max(step_s - price.plain_s, extra_s / 2), extra_s * 2)
        extra_s += self._drafter_s
        for one, result in zip(work, step.results, strict=True):
            if one.draws and not one.forks and isinstance(result, RowDone):
                before_s, accepted = self._time_saved(one.sample, price), len(result.tokens) - 1
                self._saved_s[one.sample] = moved(before_s, accepted, extra_s, price.plain_s)

    def _record_accepted(self, draft_state: DraftState, accepted: int) -> None:
        """The drafts of a sample were verified, and so many of them accepted."""
        drafted, grade = len(draft_state.draft.tokens), draft_state.draft.grade
        draft_state.draft = NO_DRAFT
        if drafted:
            for acceptance in (draft_state.acceptance, self._overall):
                acceptance.took(grade, drafted, accepted, draft_state.probed)


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
