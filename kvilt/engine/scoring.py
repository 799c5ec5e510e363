"""Log-probabilities of a prompt's tokens: which are still missing, and what a row must want to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Score, Scores
from ..sampling.sampler import TokenLogprobs
from .event import Scored


@dataclass(slots=True, eq=False)
class Scoring:
    """How far the scores of one prompt have been sent. The logits at a position score the token after it."""

    top: int  # likeliest tokens beside each
    at: int  # the first position whose score was not sent
    stop: int  # the first position without a score: the prompt's last

    @property
    def over(self) -> bool:
        return self.at >= self.stop

    def want(self, ids: Sequence[int], start: int, stop: int) -> Score | None:
        """What a row at positions [start, stop) of `ids` must want; None where all its scores were sent."""
        if max(start, self.at) >= min(stop, self.stop):
            return None
        targets = [*ids[start + 1 : stop + 1], 0][: stop - start]  # no token follows the last one
        return Score(targets, self.top, ranks=True)

    def event(self, ids: Sequence[int], start: int, scores: Scores) -> Scored:
        """The new scores among those of positions from `start` on."""
        first, self.at = self.at, min(start + len(scores.logprobs), self.stop)
        rows = slice(first - start, self.at - start)
        columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        logprobs = tuple(
            TokenLogprobs(token, logprob, rank, tuple(top), tuple(values))
            for token, logprob, rank, top, values in zip(
                ids[first + 1 : self.at + 1], *(column[rows].tolist() for column in columns), strict=True
            )
        )
        return Scored(0, first + 1, logprobs)
