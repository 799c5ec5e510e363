"""Which samples want drafts and how many, asking the drafter, and counting what became of its drafts.

What goes wrong with a drafter costs its drafts and nothing else.
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

DRAFTS = Counter("kvilt_spec_decode_num_drafts_total", "DraftCounts that were computed, of one token or more.")
DRAFTED = Counter("kvilt_spec_decode_num_draft_tokens_total", "Tokens of these drafts.")
ACCEPTED = Counter("kvilt_spec_decode_num_accepted_tokens_total", "Those that were drawn.")
ACCEPTED_AT = Counter(
    "kvilt_spec_decode_num_accepted_tokens_per_pos_total", "The same by their place in a draft.", ("position",)
)
NO_DRAFT = Draft()
_LASTING = 0.97  # what was seen of all samples' drafts is forgotten more slowly than what was seen of one
_FREE = 0.1  # a drafter that takes less than this part of what drafts cost in a step may be asked for too many
DRAFT_METRICS = (DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_AT)


@dataclass(slots=True, eq=False)
class DraftState:
    """One sample's drafts."""

    draft_context: DraftContext
    acceptance: AcceptanceRate
    most: int
    draft: Draft = NO_DRAFT  # that of the step in progress
    probed: bool = False  # it is not expected to pay, but to show whether that still holds
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
        self._usual = AcceptanceRate.of(drafter.hopes, _LASTING)  # of all samples
        self._ahead_s: dict[Sample, float] = {}  # of a life without drafts; also of those that want none themselves
        self._began_s = self._took_s = 0.0

    def forget(self, draft_state: DraftState) -> None:
        """A sample is over."""
        quietly(partial(self._drafter.forget, draft_state.draft_context), None)

    def close(self) -> None:
        self._drafter.close()

    # One step.

    def request_drafts(self, seqs: Mapping[Sample, SequenceState]) -> None:
        """Before a plan: how many drafts each sample that draws now would like."""
        ready = [seq for sample, seq in seqs.items() if sample.left == 1 and not sample.held]
        draws = [seq for seq in ready if seq.kv is not None and seq.state is not None]
        for seq in seqs.values():
            seq.sample.drafts = 0
        self._ahead_s = {sample: ahead for sample, ahead in self._ahead_s.items() if sample in seqs}
        self._price = self._cost.price(len(draws))
        for seq in draws:
            if seq.draft_state is None and seq.state is not None and not seq.undrafted:
                seq.draft_state = self._try_begin(seq, seq.state)
            if (draft_state := seq.draft_state) is not None:
                draft_state.draft = NO_DRAFT
                draft_state.acceptance.steps += 1
        if self._price is not None and draws:
            for seq, count in zip(draws, self._wishes(draws, self._price), strict=True):
                seq.sample.drafts = count

    def _wishes(self, draws: Sequence[SequenceState], price: StepPrice) -> list[int]:
        """As many as may pay if all goes well; whoever drafts for nothing is asked for more than will be computed."""
        bids = []
        for seq in draws:
            draft_state, ahead_s = seq.draft_state, self._ahead(seq.sample, price)
            if draft_state is None:
                bids.append(DraftBid(0.0, 0.0, 0, ahead_s))
                continue
            acceptance = draft_state.acceptance
            bids.append(
                DraftBid(acceptance.best, acceptance.surest(self._usual), draft_state.most, ahead_s, acceptance.any_due)
            )
        if not possible(bids, price):
            return [0] * len(bids)
        if price.own_s > _FREE * price.each_s:
            return probe(bids, allot(bids, price), price)
        return [
            request_drafts.most if request_drafts.chance > price.share or request_drafts.probe else 0
            for request_drafts in bids
        ]

    def _ahead(self, sample: Sample, price: StepPrice) -> float:
        return self._ahead_s.get(sample, CREDIT * price.plain_s)

    def _try_begin(self, seq: SequenceState, state: SamplingState) -> DraftState | None:
        """A sample's drafts; None if it wants none, or if its drafter fails: then it is drawn without any."""
        try:
            draft_state = self._begin(seq, state)
        except BaseException as error:
            contained(error)
            draft_state = None
        seq.undrafted = draft_state is None
        return draft_state

    def _begin(self, seq: SequenceState, state: SamplingState) -> DraftState | None:
        """A sample's drafts; None if it wants none."""
        asked, first = state.params.draft_tokens, seq.job.first
        if asked == 0:
            return None
        near = first.draft_state.draft_context if first.draft_state is not None and first is not seq else None
        draft_context = self._drafter.begin(seq.ids, state, near)
        acceptance = AcceptanceRate.of([tally.chance for tally in self._usual.tallies])
        return DraftState(draft_context, acceptance, self._drafter.most if asked is None else asked)

    def propose(self, plan: StepPlan, seqs: Mapping[Sample, SequenceState], vocab_size: int) -> None:
        """Drafts for those that have room for some; each course then has its own."""
        began_s, self._took_s = self._clock(), 0.0
        wanted = [(work.drafts, seqs[work.sample].draft_state) for work in plan.work if work.drafts]
        asked = [(count, draft_state) for count, draft_state in wanted if draft_state is not None]
        if asked:
            drafts = self._drafts(
                [draft_state.draft_context for _, draft_state in asked], [count for count, _ in asked]
            )
            for (count, draft_state), draft in zip(asked, drafts, strict=True):
                draft_state.draft = _checked(draft, count, vocab_size, draft_state.draft_context.state.end_ids)
            if any(draft_state.draft.tokens for _, draft_state in asked):
                self._cut([seqs[work.sample] for work in plan.work if work.draws])
            self._took(drafts, self._clock() - began_s)
        self._began_s = self._clock()

    def _cut(self, draws: Sequence[SequenceState]) -> None:
        """Leave of all drafts those that pay, now that it is known what they are."""
        price = self._price
        assert price is not None
        bids = []
        for seq in draws:
            draft_state, ahead_s = seq.draft_state, self._ahead(seq.sample, price)
            if draft_state is None or not draft_state.draft.tokens:
                bids.append(DraftBid(0.0, 0.0, 0, ahead_s))
                continue
            grade, most, acceptance = draft_state.draft.grade, len(draft_state.draft.tokens), draft_state.acceptance
            bids.append(
                DraftBid(
                    acceptance.chance(grade),
                    acceptance.sure(grade, self._usual),
                    most,
                    ahead_s,
                    acceptance.is_due(grade),
                )
            )
        paying = allot(bids, price)
        for seq, paid, count in zip(draws, paying, probe(bids, paying, price), strict=True):
            if (draft_state := seq.draft_state) is not None:
                draft_state.draft = replace(draft_state.draft, tokens=draft_state.draft.tokens[:count])
                draft_state.probed = count > paid

    def _took(self, drafts: Sequence[Draft], took_s: float) -> None:
        """What a drafter took; reading prompts is the price of no draft."""
        count = sum(len(draft.tokens) for draft in drafts)
        if not any(draft.read for draft in drafts):
            self._took_s = took_s
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

    def stepped(self, plan: StepPlan, tasks: Sequence[RowTask | None], results: Sequence[Result | None]) -> None:
        """What a step of decodes took; other steps say nothing about the price of a draft."""
        there, step_s = [len(task.drafts) for task in tasks if task is not None], self._clock() - self._began_s
        alone = all(work.count == 1 and work.draws and not work.forks for work in plan.work)
        if alone:
            self._cost.stepped(len(there), sum(there), step_s)
        price = self._cost.known(sum(work.draws for work in plan.work))
        if price is None:
            return
        extra_s = price.extra_s(sum(there))
        if alone and extra_s:  # what it took, unless it was interrupted
            extra_s = min(max(step_s - price.plain_s, extra_s / 2), extra_s * 2)
        extra_s += self._took_s
        for work, result in zip(plan.work, results, strict=True):
            if work.draws and not work.forks and isinstance(result, RowDone):
                before_s, accepted = self._ahead(work.sample, price), len(result.tokens) - 1
                self._ahead_s[work.sample] = moved(before_s, accepted, extra_s, price.plain_s)

    def took(self, draft_state: DraftState, accepted: int, metrics: Metrics) -> None:
        """The drafts of a course were computed, and so many of them accepted."""
        drafted, grade = len(draft_state.draft.tokens), draft_state.draft.grade
        draft_state.draft = NO_DRAFT
        if not drafted:
            return
        draft_state.drafted += drafted
        draft_state.places += [0] * (drafted - len(draft_state.places))
        for place in range(accepted):
            draft_state.places[place] += 1
            metrics.add(ACCEPTED_AT, position=str(place))
        for acceptance in (draft_state.acceptance, self._usual):
            acceptance.took(grade, drafted, accepted, draft_state.probed)
        metrics.add(DRAFTS)
        metrics.add(DRAFTED, drafted)
        metrics.add(ACCEPTED, accepted)


def _checked(draft: Draft, count: int, vocab_size: int, end_ids: frozenset[int]) -> Draft:
    """A draft of at most `count` tokens that can be drawn; none where the drafter's answer is no draft."""
    try:
        return replace(draft, tokens=_sound(draft.tokens[:count], vocab_size, end_ids))
    except Exception:
        _log.exception("the drafter gave no draft; its sample has none in this step")
        return NO_DRAFT


def _sound(tokens: Sequence[int], vocab_size: int, end_ids: frozenset[int]) -> Sequence[int]:
    """The drafts before the first that ends the sample, or is no token of its model: a draft model may have more."""
    bad = (i for i, token in enumerate(tokens) if token in end_ids or not 0 <= token < vocab_size)
    return tokens[: next(bad, len(tokens))]
