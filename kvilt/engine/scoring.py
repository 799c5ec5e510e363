"""Log-probabilities of a prompt's tokens: which are still to be told, and what a row must want to have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..batch import Score, Scores
from ..sampling.sampler import TokenLogprobs
from .event import Scored


@dataclass(slots=True, eq=False)
class Scoring:
    """How far the scores of one prompt are told. What a position's logits score is the token behind it."""

    top: int  # likeliest tokens beside each
    at: int  # the first position that is not told
    stop: int  # the first that has nothing to tell: the prompt's last

    @property
    def over(self) -> bool:
        return self.at >= self.stop

    def want(self, ids: Sequence[int], start: int, stop: int) -> Score | None:
        """What a row at positions [start, stop) of `ids` must want; None where it has no news."""
        if max(start, self.at) >= min(stop, self.stop):
            return None
        targets = [*ids[start + 1 : stop + 1], 0][: stop - start]  # behind the last stands nothing
        return Score(targets, self.top, ranks=True)

    def tell(self, ids: Sequence[int], start: int, scores: Scores) -> Scored:
        """What is new in the scores of positions from `start` on."""
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
