"""Log-probabilities of tokens in plain torch: for backends without reductions of their own, and the oracle of the rest.

Prompts and drawn tokens are both scored by this one definition. Refuses to know which of them it looks at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import RowLogprobs


def row_logprobs(logits: Tensor, tokens: Tensor, top: int) -> RowLogprobs:
    """Of `tokens` [rows] under raw float32 logits [rows, vocab], with the `top` likeliest beside them."""
    peak = logits.amax(-1, keepdim=True)
    log_mass = (logits - peak).exp_().sum(-1, keepdim=True, dtype=torch.float64).log()
    broken = ~peak[:, 0].isfinite()
    ids = torch.stack([_likeliest(row, top) for row in logits.masked_fill(broken[:, None], 0.0)])

    def logprobs(at: Tensor) -> Tensor:
        found = logits.gather(1, at).double() - peak.double() - log_mass
        return found.float().masked_fill_(broken[:, None], float("nan"))

    return RowLogprobs(
        logprobs=logprobs(tokens[:, None])[:, 0],
        ranks=_ranks(logits, tokens).masked_fill_(broken, 0),
        top_ids=ids,
        top_logprobs=logprobs(ids),
    )


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """The place of each row's token [rows] among all of its logits, from 1 on."""
    own = logits.gather(1, tokens[:, None])
    lower = torch.arange(logits.shape[-1], device=tokens.device) < tokens[:, None]
    return ((logits > own) | ((logits == own) & lower)).sum(-1) + 1


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest, and among equals the lower ids first: topk alone promises no order."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    ids = (logits >= logits.topk(count).values[-1]).nonzero()[:, 0]
    return ids[logits[ids].sort(descending=True, stable=True).indices[:count]]
