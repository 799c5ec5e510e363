"""Which tokens are computed again: scores of tokens, and the best of them. Pure functions on tensors.

A row without KV never enters a score: it may hold anything, and NaN times 0 is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def budget(ratio: float, tokens: int) -> int:
    """floor(ratio * tokens), where 0.29 of 100 is 29 although floats think it a little less."""
    return min(tokens, math.floor(ratio * tokens + 1e-9))


def deviations(fresh: Tensor, retrieved: Tensor, valid: Tensor) -> Tensor:
    """Mean squared deviation of each token's values [tokens, ...], float32 [tokens]; 0 where `valid` is False.

    Values that cannot be compared count as infinite, so that they are computed again first.
    """
    valid = valid.to(fresh.device)
    gap = (fresh.float() - retrieved.float()).flatten(1).square().mean(1)
    gap = torch.where(gap.isnan(), torch.inf, gap)
    return torch.where(valid, gap, 0.0)


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, ascending; among equals the earlier ones."""
    order = torch.sort(scores.nan_to_num(nan=torch.inf, posinf=torch.inf), descending=True, stable=True).indices
    return order[:count].sort().values


def choose(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """Indices of the `count` best of those that `among` [tokens] allows, ascending."""
    allowed = among.nonzero().flatten()
    return allowed[largest(scores[allowed], count)]


def select(scores: Tensor, valid: Tensor, ratio: float, starts: Sequence[int]) -> Tensor:
    """What a batch computes again: every token that is not valid and, per request, the best share of those that are.

    `starts` are offsets of requests; indices ascend.
    """
    chosen = []
    for start, stop in pairwise(starts):
        mine = valid[start:stop]
        best = choose(scores[start:stop], mine, budget(ratio, int(mine.sum())))
        chosen.append(start + torch.cat([(~mine).nonzero().flatten(), best]).sort().values)
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)


def merge(retrieved: Tensor, fresh: Tensor, at: Tensor) -> Tensor:
    """`retrieved` [tokens, ...] with rows `at` replaced by `fresh`."""
    out = retrieved.clone()
    out[at] = fresh.to(out.dtype)
    return out
