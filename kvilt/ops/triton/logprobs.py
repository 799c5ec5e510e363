"""Log-probabilities of tokens on the device, for many rows at once and without a word to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import RowLogprobs

_LOW_WORD = (1 << 32) - 1


def row_logprobs(logits: Tensor, tokens: Tensor, top: int) -> RowLogprobs:
    """Of `tokens` [rows] under raw float32 logits [rows, vocab], with the `top` likeliest beside them."""
    peak = logits.amax(-1, keepdim=True)
    log_mass = (logits - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64).log()
    broken = ~peak.isfinite()
    order = _order(logits)
    ids = _LOW_WORD - (order.topk(top, dim=-1).values & _LOW_WORD)

    def logprobs(at: Tensor) -> Tensor:
        found = logits.gather(1, at).double() - peak.double() - log_mass
        return found.float().masked_fill_(broken, float("nan"))

    return RowLogprobs(
        logprobs=logprobs(tokens[:, None])[:, 0],
        ranks=((order > order.gather(1, tokens[:, None])).sum(-1) + 1).masked_fill_(broken[:, 0], 0),
        top_ids=ids,
        top_logprobs=logprobs(ids),
    )


def _order(logits: Tensor) -> Tensor:
    """Whole numbers in the order of logits; among equals the lower id is larger. No two of a row are equal."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (keys << 32) | (_LOW_WORD - torch.arange(logits.shape[-1], device=logits.device))
