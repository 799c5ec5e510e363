"""Logits processors between a model's logits and a draw, in Hugging Face's order, as functions over float32 rows.

Those whose names end in an underscore write into the scores they are given; the others write into nothing.
Order: logit bias, repetition, frequency and presence penalties, bans, temperature, top-k, top-p, min-p, typical-p. A
row's result is the same bits whatever stands beside it, so nothing here reduces a row in an order that depends on the
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .params import SamplingParams

# Rows with more candidates than this are filtered one by one, so that they do not widen their neighbours' padding.
_NARROW = 4096
_LOWEST = torch.finfo(torch.float32).min
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class PenalizedTokens:
    """The tokens of some rows that history changes, one entry per (row, token); no pair stands twice."""

    rows: Tensor  # [entries] int64
    ids: Tensor  # [entries] int64
    counts: Tensor  # [entries] float32, how often the token was generated (0: it stands in the prompt alone)
    repetition: Tensor  # [entries] float32
    frequency: Tensor  # [entries] float32
    presence: Tensor  # [entries] float32


@dataclass(frozen=True, slots=True)
class Filters:
    """Which tokens each row may still draw from."""

    top_k: Tensor  # [rows] int64, the size of the vocabulary where off
    top_p: Tensor  # [rows] float64, 1 where off
    min_p: Tensor  # [rows] float64, 0 where off
    typical_p: Tensor  # [rows] float64, 1 where off

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | None = None) -> Filters:
        """The filters of these params, one row each."""
        ks = [min(p.top_k, vocab_size) or vocab_size for p in params]
        return cls(
            top_k=torch.tensor(ks, dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
            typical_p=torch.tensor([p.typical_p for p in params], dtype=torch.float64, device=device),
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the filters left of some rows: token ids in ascending order, `-inf` where a place holds no candidate."""

    rows: Tensor  # [group] int64, which of the filtered rows these are
    ids: Tensor  # [group, width] int64
    scores: Tensor  # [group, width] float32


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a tensor, in ascending order: the tensor itself, not a copy, when that is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def add_bias_(scores: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Add `bias` [entries] to scores [rows, vocab] at (rows, ids); no pair may stand twice."""
    return scores.index_put_((rows, ids), scores[rows, ids] + bias)


def penalize_(scores: Tensor, touched: PenalizedTokens) -> Tensor:
    """Apply the repetition, then the frequency and presence penalties to the touched tokens of scores [rows, vocab]."""
    old = scores[touched.rows, touched.ids]
    new = torch.where(old < 0, old * touched.repetition, old / touched.repetition)
    new = new - touched.counts * touched.frequency
    new = new - (touched.counts > 0) * touched.presence
    return scores.index_put_((touched.rows, touched.ids), new)


def ban_(scores: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Set scores [rows, vocab] at (rows, ids) to -inf; a pair may stand twice."""
    return scores.index_put_((rows, ids), scores.new_tensor(_NEVER))


def mask_(scores: Tensor, rows: Sequence[int], allowed: Tensor) -> Tensor:
    """Set all but the allowed tokens [given, vocab] of the given rows of scores [rows, vocab] to -inf."""
    if len(rows) == len(scores):
        return scores.masked_fill_(~allowed, _NEVER)
    kept = torch.where(allowed, scores[rows], _NEVER)
    return scores.index_copy_(0, torch.tensor(rows, device=scores.device), kept)


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [rows, vocab] divided by each row's temperature [rows]."""
    return logits / temperatures[:, None]


def filter_rows(scores: Tensor, filters: Filters) -> list[Candidates]:
    """Top-k, top-p, min-p, then typical-p over tempered scores [rows, vocab]; each row is in exactly one group."""
    peak = scores.amax(-1, keepdim=True)  # [rows, 1]
    mass = _row_mass(scores, peak, filters)  # [rows]
    floor = _floors(scores, peak[:, 0], mass, filters)
    mask = scores >= floor[:, None]
    return [_filter_group(scores, mask, mass, filters, rows) for rows in _groups(mask.sum(-1).tolist())]


def _groups(widths: Sequence[int]) -> list[list[int]]:
    """The narrow rows together, every wide row alone."""
    narrow = [row for row, width in enumerate(widths) if width <= _NARROW]
    wide = [[row] for row, width in enumerate(widths) if width > _NARROW]
    return [narrow, *wide] if narrow else wide


def _row_mass(scores: Tensor, peak: Tensor, filters: Filters) -> Tensor:
    """Sum of exp(score - peak) in float64 for rows with top-p and no top-k [rows]; 0 for the others, which need none.

    By cumsum, since torch adds a cumsum strictly in order, but splits a sum among threads by the shape of the batch.
    """
    mass = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    rows = _where((filters.top_p < 1) & (filters.top_k >= scores.shape[-1]))
    if rows:
        weights = (take_rows(scores, rows) - take_rows(peak, rows)).exp()
        mass[rows] = weights.cumsum(-1, dtype=torch.float64)[:, -1]
    return mass


def _where(condition: Tensor) -> list[int]:
    return [row for row, true in enumerate(condition.tolist()) if true]


def _floors(scores: Tensor, peak: Tensor, mass: Tensor, filters: Filters) -> Tensor:
    """A score per row that no survivor is below, so that only few tokens are ever sorted [rows].

    Exact for top-k. For top-p: tokens below (1 - p) / vocab cannot together reach the mass that is cut. For min-p: its
    own threshold. The last two leave a margin for rounding, and the exact comparison follows over what is left.
    """
    vocab = scores.shape[-1]
    nucleus = ((1 - filters.top_p) * mass / vocab * 0.99).log()  # -inf where mass is 0
    relative = torch.where(filters.top_p < 1, nucleus, filters.min_p.log() - 0.01)
    floor = (peak + relative).float()
    limited = _where(filters.top_k < vocab)
    if limited:
        ks = filters.top_k[limited]
        best = take_rows(scores, limited).topk(int(ks.max()), dim=-1).values
        floor[limited] = best.gather(1, ks[:, None] - 1)[:, 0]
    return floor.clamp(min=_LOWEST)  # a token at -inf is out already


def _filter_group(scores: Tensor, mask: Tensor, mass: Tensor, filters: Filters, rows: list[int]) -> Candidates:
    """The exact top-p, min-p and typical-p of some rows over the candidates that `mask` leaves them."""
    ids, left = _compact(take_rows(scores, rows), take_rows(mask, rows))
    top_p, min_p = filters.top_p[rows], filters.min_p[rows]
    weights = (left - left.amax(-1, keepdim=True)).exp()  # [group, width], 0 where padded
    out = weights < min_p.float()[:, None]
    if bool((top_p < 1).any()):
        out |= _below_nucleus(left, weights, mass[rows], top_p)
    kept = left.masked_fill(out, _NEVER)
    typical_p = filters.typical_p[rows]
    if bool((typical_p < 1).any()):
        kept = kept.masked_fill(_untypical(kept, typical_p), _NEVER)
    return Candidates(torch.tensor(rows, device=scores.device), ids, kept)


def _compact(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The masked tokens of every row moved to the left: ids [rows, width] ascending, and scores padded with -inf."""
    rows, ids = mask.nonzero(as_tuple=True)  # row after row, ids ascending
    if len(mask) == 1:
        return ids[None], scores[:, ids]
    widths = torch.bincount(rows, minlength=len(mask))
    places = torch.arange(len(ids), device=ids.device) - (widths.cumsum(0) - widths)[rows]
    shape = (len(mask), int(widths.max()))
    packed = ids.new_zeros(shape)
    left = scores.new_full(shape, _NEVER)
    packed[rows, places] = ids
    left[rows, places] = scores[rows, ids]
    return packed, left


def _below_nucleus(left: Tensor, weights: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """Which candidates lie in the lowest 1 - p of their row's probability [group, width].

    Ascending like Hugging Face, and stable, so that which of several equal scores stays is settled by id. Padding comes
    first and adds exact zeros, hence a row's sums do not depend on the width of its group.
    """
    order = left.sort(dim=-1, stable=True).indices
    rising = weights.gather(1, order)
    own = rising.cumsum(-1, dtype=torch.float64)[:, -1:]
    total = torch.maximum(mass[:, None], own)  # candidates of top-k are all there is; those of a floor left a rest
    below = (total - own) / total
    probs = (rising / total).float()
    out = (below + probs.cumsum(-1, dtype=torch.float64)).float() <= (1 - top_p).float()[:, None]
    out[:, -1] = False
    out &= (top_p < 1)[:, None]
    return torch.zeros_like(out).scatter(1, order, out)


def _untypical(left: Tensor, typical_p: Tensor) -> Tensor:
    """Which candidates lie farther from their row's entropy than the nearest ones that make up p [group, width].

    Sums go by cumsum, and candidates of no probability add exact zeros, as in the nucleus.
    """
    heights = (left - left.amax(-1, keepdim=True)).double()  # [group, width], -inf where there is no candidate
    weights = heights.exp()
    total = weights.cumsum(-1)[:, -1:]
    probs, surprise = weights / total, total.log() - heights
    entropy = torch.where(probs > 0, probs * surprise, 0.0).cumsum(-1)[:, -1:]
    distance = (surprise - entropy).abs()
    limits = [_reach(*row) for row in zip(distance, probs, typical_p.tolist(), strict=True)]
    return distance > torch.tensor(limits, dtype=torch.float64, device=left.device)[:, None]


def _reach(distance: Tensor, probs: Tensor, mass: float) -> float:
    """The smallest distance within which a row's candidates [width] make up `mass`; any distance if that is 1.

    Only what lies near is sorted, if it is certain to suffice: a stable sort of it begins the sort of all.
    """
    if mass >= 1:
        return float("inf")
    for guess in (1.0, 4.0, 16.0):
        near = distance <= guess
        if float(probs[near].sum()) > mass + 1e-9:
            distance, probs = distance[near], probs[near]
            break
    rising, order = distance.sort(stable=True)
    below = (probs[order].cumsum(-1) < mass).sum()
    return float(rising[below.clamp(max=len(rising) - 1)])  # rounding may leave the whole row just short of it
