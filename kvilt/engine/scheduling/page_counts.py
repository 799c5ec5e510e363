"""Tokens and pages that samples need, in counts. Knows the size of a page, not which page belongs to which sample."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import PrefixHit, Sample, Work


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages a sample takes before it can continue."""

    page_tokens: int

    def need(self, sample: Sample, count: int) -> int:
        """Pages to take before `count` more tokens can be computed."""
        if not count:
            return 0
        progress = sample.blend_progress
        if progress is not None and progress.begun and sample.is_blending:  # it has room for all of its prompt
            return max(0, self._grown(progress.stop, max(sample.computed + count, progress.stop), False))
        return self._grown(sample.computed, sample.computed + count, sample.shared_tail)

    def rest(self, sample: Sample) -> int:
        """Pages to take before a sample has computed what it knows, and one token more."""
        return self.need(sample, self._target(sample) - sample.computed)

    def taken(self, sample: Sample) -> int:
        """Pages that a sample has, shared ones included."""
        return self._grown(0, sample.computed, False)

    def all(self, sample: Sample) -> int:
        """Pages that a sample has when it has computed what it knows, and one token more."""
        return self._grown(0, self._target(sample), False) + self.beside(sample)

    def beside(self, sample: Sample) -> int:
        """Pages that a blending may need for documents that are not stored, before it has begun."""
        progress = sample.blend_progress
        return -(-progress.scratch // self.page_tokens) if progress is not None and not progress.begun else 0

    def whole(self, sample: Sample, hit: PrefixHit, alone: bool) -> int:
        """Pages until a waiting sample has computed all it knows; its forks need one each, unless it is alone."""
        forks = 0 if alone else sample.width - 1
        return hit.idle + self._grown(hit.tokens, self._target(sample), True) + forks + self.beside(sample)

    def _target(self, sample: Sample) -> int:
        return min(sample.known + 1, sample.limit - 1)

    def _grown(self, start: int, stop: int, shared_tail: bool) -> int:
        size = self.page_tokens
        return -(-stop // size) + (start // -size) + (shared_tail and start % size != 0)


def usable(sample: Sample, tokens: int) -> int:
    """How many of a step's tokens a sample can use."""
    tokens = min(sample.max_step_tokens or tokens, tokens)
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
