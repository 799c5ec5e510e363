"""Log-probabilities of tokens on the device, for many rows at once and without a word to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import RowLogprobs

BLOCK = 4096  # tokens that are summed at a time
_LOW_WORD = (1 << 32) - 1


def row_logprobs(logits: Tensor, tokens: Tensor, top: int) -> RowLogprobs:
    """Of `tokens` [rows] under raw float32 logits [rows, vocab], with the `top` likeliest beside them."""
    logits = logits.contiguous()
    peak = logits.amax(-1, keepdim=True)
    log_mass = _mass(logits, peak).log_()
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


def _mass(logits: Tensor, peak: Tensor) -> Tensor:
    """The sum of exponentials of each row [rows, 1], float64, in an order that the number of rows does not change."""
    out = torch.empty((len(logits), 1), dtype=torch.float64, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(logits.shape[1]))
    _sum_exponentials[(len(logits),)](logits, peak, out, logits.shape[1], BLOCK=block, num_warps=8)
    return out


@triton.jit
def _sum_exponentials(logits, peaks, out, vocab, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    peak, mass = tl.load(peaks + row), tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + row * vocab + start + i, mask=start + i < vocab, other=float("-inf"))
        mass += tl.exp(x - peak).to(tl.float64)
    tl.store(out + row, tl.sum(mass, 0))
