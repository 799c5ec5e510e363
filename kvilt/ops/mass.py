"""How much attention keys receive, in plain torch for every backend: that is fast enough for a short question."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import AttentionMask

QUERY_BLOCK = 128  # bounds the score matrix: heads * 128 * keys floats


def first_seen(positions: Tensor, mask: AttentionMask) -> int:
    """The oldest key that any of these queries sees."""
    return int(mask.first_seen(positions).min())


def key_mass(query: Tensor, keys: Tensor, first: int, positions: Tensor, mask: AttentionMask) -> Tensor:
    """Attention of `query` [tokens, heads, dim] on `keys` [n, kv_heads, dim] that stand at `first` and after.

    Summed over queries, averaged over heads: float32 [first + n].
    """
    at = torch.arange(first, first + len(keys), device=keys.device)
    mass = torch.zeros(first + len(keys), device=keys.device)
    by_head = keys.float().permute(1, 2, 0)  # [kv_heads, dim, n]
    for start in range(0, len(query), QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        mass[first:] += _block(query[block], by_head, at, positions[block], mask)
    return mass / query.shape[1]


def _block(query: Tensor, keys: Tensor, at: Tensor, positions: Tensor, mask: AttentionMask) -> Tensor:
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[0]
    q = query.float().view(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.matmul(q, keys).view(kv_heads, -1, tokens, len(at)) * mask.scale
    if mask.soft_cap:
        scores = mask.soft_cap * torch.tanh(scores / mask.soft_cap)
    hidden = at > positions.unsqueeze(1)
    if mask.window:
        hidden |= at < mask.first_seen(positions).unsqueeze(1)
    return softmax_with_sinks(scores.masked_fill_(hidden, float("-inf")), mask.sinks).sum((0, 1, 2))


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of `scores` [kv_heads, group, tokens, keys]; those of a head with a sink sum to less than one."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
