"""Which samples want drafts and how many, asking the drafter, and counting what became of its drafts.

What goes wrong with a drafter costs its drafts and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..metrics import Counter, Metrics
from ..sampling.sampler import SampleState
from ..speculative.drafter import Draft, Drafter, Story
from ..speculative.pace import Cost, Pace
from .event import Drafts
from .forward import Done, Result, Task
from .plan import Sample, StepPlan

if TYPE_CHECKING:
    from .track import Track

_log = logging.getLogger(__name__)

DRAFTS = Counter("kvilt_spec_decode_num_drafts_total", "Drafts that were computed, of one token or more.")
DRAFTED = Counter("kvilt_spec_decode_num_draft_tokens_total", "Tokens of these drafts.")
ACCEPTED = Counter("kvilt_spec_decode_num_accepted_tokens_total", "Those that were drawn.")
ACCEPTED_AT = Counter(
    "kvilt_spec_decode_num_accepted_tokens_per_pos_total", "The same by their place in a draft.", ("position",)
)
NO_DRAFT = Draft()
DRAFT_METRICS = (DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_AT)


@dataclass(slots=True, eq=False)
class Course:
    """One sample's drafts."""

    story: Story
    pace: Pace
    most: int
    draft: Draft = NO_DRAFT  # that of the step in progress
    drafted: int = 0
    places: list[int] = field(default_factory=list)  # how often the first, second, ... of a draft was accepted

    @property
    def counts(self) -> Drafts:
        return Drafts(self.drafted, sum(self.places), tuple(self.places))


class Drafting:
    """Drafts for the samples of one engine, in the thread that steps."""

    def __init__(
        self, drafter: Drafter, cost: Cost | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter = drafter
        self._cost = cost or Cost()
        self._clock = clock
        self._price = self._cost.price
        self._usual = Pace.of(drafter.hopes)  # of all samples, for those that begin
        self._began_s = 0.0

    def forget(self, course: Course) -> None:
        """A sample is over."""
        self._drafter.forget(course.story)

    def close(self) -> None:
        self._drafter.close()

    # One step.

    def wish(self, tracks: Mapping[Sample, Track]) -> None:
        """Before a plan: how many drafts each sample that draws now would like."""
        ready = [track for sample, track in tracks.items() if sample.left == 1 and not sample.held]
        draws = [track for track in ready if track.kv is not None and track.state is not None]
        for track in tracks.values():
            track.sample.drafts = 0
        pays = self._cost.pays(len(draws))
        for track in draws:
            if track.course is None and track.state is not None:
                track.course = self._begin(track, track.state)
            if (course := track.course) is not None:
                course.draft = NO_DRAFT
                course.pace.steps += 1
                track.sample.drafts = course.pace.most(self._price, course.most) if pays else 0

    def _begin(self, track: Track, state: SampleState) -> Course | None:
        """A sample's drafts; None if it wants none."""
        asked, first = state.params.draft_tokens, track.job.first
        if asked == 0:
            return None
        near = first.course.story if first.course is not None and first is not track else None
        story = self._drafter.begin(track.ids, state, near)
        pace = Pace.of([tally.chance for tally in self._usual.tallies])
        return Course(story, pace, self._drafter.most if asked is None else asked)

    def propose(self, plan: StepPlan, tracks: Mapping[Sample, Track], vocab_size: int) -> None:
        """Drafts for those that have room for some; each course then has its own."""
        self._price = self._cost.price
        began_s = self._clock()
        wanted = [(work.drafts, tracks[work.sample].course) for work in plan.work if work.drafts]
        asked = [(count, course) for count, course in wanted if course is not None]
        if asked:
            drafts = self._drafts([course.story for _, course in asked], [count for count, _ in asked])
            for (count, course), draft in zip(asked, drafts, strict=True):
                paying = course.pace.count(draft.grade, self._price, count)
                course.draft = Draft(_sound(draft.tokens[:paying], vocab_size, course.story.state.end_ids), draft.grade)
            self._cost.drafted(sum(len(draft.tokens) for draft in drafts), self._clock() - began_s)
        self._began_s = self._clock()

    def _drafts(self, stories: Sequence[Story], k: Sequence[int]) -> Sequence[Draft]:
        try:
            return self._drafter.propose(stories, k)
        except Exception:  # a cancel included: this step is drawn without drafts
            _log.exception("the drafter failed; this step has no drafts")
            return [NO_DRAFT] * len(stories)

    def stepped(self, plan: StepPlan, tasks: Sequence[Task | None], results: Sequence[Result | None]) -> None:
        """What a step of decodes took; other steps say nothing about the price of a draft."""
        if all(work.count == 1 and work.draws and not work.forks for work in plan.work):
            there = [len(task.drafts) for task in tasks if task is not None]
            drawn = sum(len(result.tokens) for result in results if isinstance(result, Done))
            self._cost.stepped(len(there), sum(there), drawn, self._clock() - self._began_s)

    def took(self, course: Course, accepted: int, metrics: Metrics) -> None:
        """The drafts of a course were computed, and so many of them accepted."""
        drafted, grade = len(course.draft.tokens), course.draft.grade
        course.draft = NO_DRAFT
        if not drafted:
            return
        course.drafted += drafted
        course.places += [0] * (drafted - len(course.places))
        for place in range(accepted):
            course.places[place] += 1
            metrics.add(ACCEPTED_AT, position=str(place))
        for pace in (course.pace, self._usual):
            pace.took(grade, self._price, drafted, accepted)
        metrics.add(DRAFTS)
        metrics.add(DRAFTED, drafted)
        metrics.add(ACCEPTED, accepted)


def _sound(tokens: Sequence[int], vocab_size: int, end_ids: frozenset[int]) -> Sequence[int]:
    """The drafts before the first that ends the sample, or is no token of its model: a draft model may have more."""
    bad = (i for i, token in enumerate(tokens) if token in end_ids or not 0 <= token < vocab_size)
    return tokens[: next(bad, len(tokens))]
