"""What sampling returns: a token for each row, and log-probabilities for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.contract import RowLogprobs
from ..ops.logprobs import row_logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the raw logits, before any transform."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest; among equals the lower id comes first
    top_ids: tuple[int, ...]  # likeliest first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row, and its log-probabilities where the row's params ask for them."""

    tokens: Tensor  # [rows] int64
    logprobs: tuple[TokenLogprobs | None, ...]


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """The log-probability and rank of a token under raw logits [vocab], with the `top` likeliest beside it."""
    at = torch.tensor([token], device=logits.device)
    return logprob_entries(row_logprobs(logits[None].float(), at, min(top, len(logits))), [token], [top])[0]


def logprob_entries(found: RowLogprobs, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry for each row of what was found, with as many of the likeliest as it asked for."""
    columns = (found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    rows = zip(tokens, tops, *[column.tolist() for column in columns], strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:top]), tuple(logprobs[:top]))
        for token, top, logprob, rank, ids, logprobs in rows
    ]
