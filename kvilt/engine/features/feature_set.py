"""The features of one engine as one: each is asked in turn, and its proposals are applied before the next is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..active import ActiveRequests
from ..scheduling.plan import Sample, StepPlan
from ..scheduling.scheduler import Scheduler
from ..sequence import SequenceState
from .feature import Abort, Fail, Feature, FinishedStep, MakeRow, Proposal, Requeue, Sequences, Submit


class FeatureSet:
    """Asks features, and carries out what they propose. Belongs to the thread that steps."""

    def __init__(
        self,
        features: Sequence[Feature],
        seqs: Sequences,
        scheduler: Scheduler,
        active: ActiveRequests,
        submit: Callable[[Submit], None],
    ) -> None:
        """`submit` admits a request of a feature's own."""
        self._features = features
        self._seqs = seqs
        self._scheduler = scheduler
        self._active = active
        self._submit = submit

    @property
    def has_ready(self) -> bool:
        """Whether the next plan could do more than the last one because of a feature."""
        return any(feature.has_ready for feature in self._features)

    @property
    def wait_timeout_s(self) -> float | None:
        """Seconds after which that is so in any case; None where no sequence waits for a feature."""
        timeouts = [feature.wait_timeout_s for feature in self._features]
        return min((timeout_s for timeout_s in timeouts if timeout_s is not None), default=None)

    @property
    def reads_tokens(self) -> bool:
        """Whether a feature must know the tokens of a step before the next one is planned."""
        return any(feature.reads_tokens for feature in self._features)

    def before_plan(self) -> None:
        """A plan is about to be made."""
        for feature in self._features:
            self._apply(feature.before_plan(self._seqs))

    def begin(self, seq: SequenceState) -> None:
        """A sequence has its cache."""
        for feature in self._features:
            self._apply(feature.begin(seq))

    def rows(self, plan: StepPlan) -> Mapping[Sample, MakeRow]:
        """What makes the rows that are not simply the next tokens of their samples."""
        makers: dict[Sample, MakeRow] = {}
        for feature in self._features:
            makers.update(feature.rows(plan, self._seqs))
        return makers

    def after_step(self, step: FinishedStep) -> None:
        """The rows of a step were computed."""
        for feature in self._features:
            self._apply(feature.after_step(step, self._seqs))

    def stop(self) -> None:
        """All requests are about to end."""
        for feature in self._features:
            self._apply(feature.stop())

    def _apply(self, proposals: Iterable[Proposal]) -> None:
        for proposal in proposals:
            match proposal:
                case Requeue(seq, error):
                    self._active.requeue(seq, error)
                case Fail(seq, failure):
                    self._active.fail(seq, failure)
                case Submit():
                    self._submit(proposal)
                case Abort(request):
                    self._active.abort(request)
                case _:
                    self._scheduler.apply(proposal)
