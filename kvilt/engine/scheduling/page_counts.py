"""Tokens and pages that samples need, in counts. Knows the size of a page, not which page belongs to which sample.

A group that keeps all needs pages for every token of a sample. A window group needs no more than a window and a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import GroupPages, Pages, PrefixHit, Sample, Work


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages a sample takes before it can continue."""

    page_tokens: int
    step_tokens: int
    groups: Sequence[GroupPages]

    @property
    def largest(self) -> int:
        """Pages of the largest group."""
        return max(group.total for group in self.groups)

    def need(self, sample: Sample, count: int) -> int:
        """Pages to take of every group before `count` more tokens can be computed."""
        if not count:
            return 0
        if (progress := sample.blend_progress) is None and not sample.shared_tail:  # nearly every row of a step
            return -(-(sample.computed + count) // self.page_tokens) + (sample.computed // -self.page_tokens)
        if progress is not None and progress.begun and sample.is_blending:  # it has room for all of its prompt
            return max(0, self._grown(progress.stop, max(sample.computed + count, progress.stop), False))
        return self._grown(sample.computed, sample.computed + count, sample.shared_tail)

    def promised(self, sample: Sample) -> Pages:
        """Pages to take before a sample has computed what it knows, and one token more."""
        rest, beside = self.need(sample, self._target(sample) - sample.computed), self.beside(sample)
        taken, found = self._grown(0, sample.computed, False), []
        for group in self.groups:
            most, own = self._most(sample, group), rest
            if most is not None and group.window is not None:
                own = min(rest, most - min(taken, group.window - 2))  # between steps it may hold two pages less
            found.append(own + beside)
        return found

    def taken(self, sample: Sample) -> Pages:
        """Pages that a sample has, shared ones included."""
        return self._bounded(sample, self._grown(0, sample.computed, False))

    def all(self, sample: Sample) -> Pages:
        """Pages that a sample has when it has computed what it knows, and one token more."""
        return self._bounded(sample, self._grown(0, self._target(sample), False), self.beside(sample))

    def beside(self, sample: Sample) -> int:
        """Pages that a blending may need for documents that are not stored, before it has begun."""
        progress = sample.blend_progress
        return -(-progress.scratch // self.page_tokens) if progress is not None and not progress.begun else 0

    def whole(self, sample: Sample, hit: PrefixHit, alone: bool) -> Pages:
        """Pages until a waiting sample has computed all it knows; its forks need one each, unless it is alone."""
        forks = 0 if alone else sample.width - 1
        own = hit.idle + self._grown(hit.tokens, self._target(sample), True)
        return self._bounded(sample, own, forks + self.beside(sample))

    def share(self, pages: Pages) -> int:
        """The largest share of a group that these pages are, in pages of the largest group."""
        return max(n * self.largest // group.total for n, group in zip(pages, self.groups, strict=True))

    def _bounded(self, sample: Sample, pages: int, more: int = 0) -> Pages:
        """So many pages of a group that keeps all, and no more of others than a sample ever holds; `more` of each."""
        bounds = [self._most(sample, group) for group in self.groups]
        return [(pages if most is None else min(pages, most)) + more for most in bounds]

    def _most(self, sample: Sample, group: GroupPages) -> int | None:
        """The most pages of a group that a sample holds, during its steps too; None where it keeps all.

        A blended stretch is written as a whole before a window gives any of it back.
        """
        progress = sample.blend_progress
        if group.window is None or (progress is not None and sample.computed < progress.stop):
            return None
        step_tokens = min(sample.max_step_tokens or self.step_tokens, self.step_tokens)
        return group.window + (-(-step_tokens // self.page_tokens) if sample.uncomputed > 1 else 0)

    def _target(self, sample: Sample) -> int:
        return min(sample.known + 1, sample.limit - 1)

    def _grown(self, start: int, stop: int, shared_tail: bool) -> int:
        size = self.page_tokens
        return -(-stop // size) + (start // -size) + (shared_tail and start % size != 0)


def usable(sample: Sample, tokens: int) -> int:
    """How many of a step's tokens a sample can use."""
    if sample.max_step_tokens:
        tokens = min(sample.max_step_tokens, tokens)
    if sample.blend_progress is not None and sample.is_blending:
        return min(sample.blend_progress.left, tokens)
    count = min(sample.uncomputed, tokens)
    if sample.blend_progress is not None and sample.computed < sample.blend_progress.start:
        count = min(count, sample.blend_progress.start - sample.computed)
    return min(count, sample.scored - sample.computed) if sample.computed < sample.scored else count


def is_last(sample: Sample, count: int) -> bool:
    """Whether the logits of so many tokens choose the next one."""
    blend_progress = sample.blend_progress
    if blend_progress is not None and sample.is_blending:
        return blend_progress.ends and count == blend_progress.left and sample.known == blend_progress.stop
    return count == sample.uncomputed


def reached(work: Work) -> int:
    """How many tokens of a sample are computed after a step; a blended stretch is so as a whole, at its end."""
    sample, blend_progress = work.sample, work.sample.blend_progress
    if blend_progress is not None and sample.is_blending and work.start == sample.computed:
        return sample.computed if blend_progress.left else blend_progress.stop
    return work.start + work.count
