"""Gumbel-max: the argmax of a row's tempered, filtered scores plus the noise of its key is a draw from their softmax.

By a backend's reductions where it has them, otherwise, and as their oracle, in torch. Refuses to know states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.contract import Draws, Reductions
from .noise import gumbel
from .params import SamplingParams
from .transforms import Filters, apply_temperature, filter_rows, take_rows

# Rows whose whole vocabulary gets noise go through in pieces of about this many float64 values.
_NOISE_VALUES = 1 << 18


def draw(
    scores: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    keys: Sequence[int],
    reductions: Reductions | None = None,
) -> Tensor:
    """A token for each of `rows` of scores [.., vocab], in ascending order; -1 where the largest is no number."""
    if reductions is not None:
        return reductions.draw(scores, draws_of(rows, params, keys))
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=scores.device)
    tempered = apply_temperature(take_rows(scores, rows), temperatures)
    sound = [i for i, finite in enumerate(tempered.amax(-1).isfinite().tolist()) if finite]
    tokens = torch.full((len(rows),), -1, dtype=torch.int64, device=scores.device)
    if sound:
        own = torch.tensor([keys[i] for i in sound], dtype=torch.int64, device=scores.device)
        tokens[sound] = _draw(take_rows(tempered, sound), [params[i] for i in sound], own)
    return tokens


def draws_of(rows: Sequence[int], params: Sequence[SamplingParams], keys: Sequence[int]) -> Draws:
    """The arguments of `draw` as a backend takes them."""
    return Draws(
        rows=rows,
        keys=keys,
        temperatures=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        typical_p=[p.typical_p for p in params],
    )


def argmax(scores: Tensor) -> Tensor:
    """The place of each row's largest score [rows]; ties go to the first, and NaN wins over everything.

    On the CPU by numpy, which compares a whole register at a time; torch's own takes thirteen times as long.
    """
    return torch.from_numpy(scores.numpy().argmax(-1)) if scores.device.type == "cpu" else scores.argmax(-1)


def _draw(scores: Tensor, params: Sequence[SamplingParams], keys: Tensor) -> Tensor:
    """Draws from tempered scores [rows, vocab]."""
    vocab = scores.shape[-1]
    filtered = [0 < p.top_k < vocab or p.top_p < 1 or p.min_p > 0 or p.typical_p < 1 for p in params]
    tokens = torch.empty(len(params), dtype=torch.int64, device=scores.device)
    if whole := [i for i, on in enumerate(filtered) if not on]:
        tokens[whole] = _draw_whole(take_rows(scores, whole), keys[whole])
    if narrow := [i for i, on in enumerate(filtered) if on]:
        filters = Filters.of([params[i] for i in narrow], vocab, scores.device)
        tokens[narrow] = _draw_filtered(take_rows(scores, narrow), filters, keys[narrow])
    return tokens


def _draw_whole(scores: Tensor, keys: Tensor) -> Tensor:
    """Draws from the whole vocabulary, a few rows at a time, since noise is float64 [rows, vocab]."""
    ids = torch.arange(scores.shape[-1], device=scores.device)
    at_once = max(1, _NOISE_VALUES // len(ids))
    pieces = [slice(start, start + at_once) for start in range(0, len(keys), at_once)]
    return torch.cat([argmax(gumbel(keys[rows], ids).add_(scores[rows])) for rows in pieces])


def _draw_filtered(scores: Tensor, filters: Filters, keys: Tensor) -> Tensor:
    """Draws from what the filters leave; noise is made for the candidates alone."""
    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    for group in filter_rows(scores, filters):
        best = gumbel(keys[group.rows], group.ids).add_(group.scores).argmax(-1, keepdim=True)
        tokens[group.rows] = group.ids.gather(1, best)[:, 0]
    return tokens
