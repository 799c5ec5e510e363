"""Codes and scales for blocks of numbers, so that the weighted squared error is small.

Each fit tries some twenty steps around the obvious one, rounds to codes, and solves for the scale (and the minimum)
that serves these codes best. Knows no format's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TRIES = [0.1 * i for i in range(-9, 10)]  # added to the largest code
_POLISH = 2


@dataclass(frozen=True, slots=True)
class Fit:
    """Blocks [blocks, n] as scale * codes - minimum; `error` is what is left, weighted, of each block."""

    codes: Tensor  # [blocks, n], whole numbers as floats
    scale: Tensor  # [blocks]
    minimum: Tensor  # [blocks], not negative; zeros in a symmetric fit
    error: Tensor  # [blocks]

    def better(self, other: Fit) -> Fit:
        """Block by block the one with the smaller error."""
        new = other.error < self.error
        return Fit(
            torch.where(new[:, None], other.codes, self.codes),
            torch.where(new, other.scale, self.scale),
            torch.where(new, other.minimum, self.minimum),
            torch.where(new, other.error, self.error),
        )


def fit_symmetric(x: Tensor, weights: Tensor, half: int) -> Fit:
    """Codes from -half to half - 1. The largest number gets the code -half, which has no positive twin."""
    at = x.abs().argmax(1, keepdim=True)
    largest = x.gather(1, at)[:, 0]
    found = _symmetric(x, weights, half, -half / _nonzero(largest))
    for more in _TRIES:
        found = found.better(_symmetric(x, weights, half, -(half + more) / _nonzero(largest)))
    for _ in range(_POLISH):
        found = found.better(_symmetric(x, weights, half, inverse_of(found.scale)))
    return found


def _symmetric(x: Tensor, weights: Tensor, half: int, inverse: Tensor) -> Fit:
    codes = (x * inverse[:, None]).round_().clamp_(-half, half - 1)
    weighted = weights * codes
    scale = (weighted * x).sum(1) / _positive((weighted * codes).sum(1))
    return Fit(codes, scale, torch.zeros_like(scale), error_of(x, weights, codes, scale, 0.0))


def fit_affine(x: Tensor, weights: Tensor, levels: int) -> Fit:
    """Codes from 0 to `levels`, with a minimum that is zero or below."""
    low = x.amin(1).clamp_(max=0.0)
    span = x.amax(1) - low
    inverse = torch.where(span > 0, levels / _positive(span), 0.0)
    found = _affine(x, weights, levels, inverse, low)
    for more in _TRIES:
        found = found.better(_affine(x, weights, levels, inverse * ((levels + more) / levels), low))
    for _ in range(_POLISH):  # codes for the scale, then the scale for these codes
        found = found.better(_affine(x, weights, levels, inverse_of(found.scale), -found.minimum))
    return found


def _affine(x: Tensor, weights: Tensor, levels: int, inverse: Tensor, low: Tensor) -> Fit:
    codes = ((x - low[:, None]) * inverse[:, None]).round_().clamp_(0, levels)
    scale, minimum = solve_affine(x, weights, codes)
    return Fit(codes, scale, minimum, error_of(x, weights, codes, scale, minimum))


def solve_affine(x: Tensor, weights: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum, neither negative, with the least error for these codes."""
    weighted = weights * codes
    w, wx, wc = weights.sum(1), (weights * x).sum(1), weighted.sum(1)
    wcc, wxc = (weighted * codes).sum(1), (weighted * x).sum(1)
    determinant = w * wcc - wc * wc
    solvable = determinant > 1e-12 * w * wcc
    safe = torch.where(solvable, determinant, 1.0)
    scale, minimum = (w * wxc - wx * wc) / safe, (wc * wxc - wcc * wx) / safe
    plain = ~solvable | (minimum < 0)  # then without a minimum
    scale = torch.where(plain, wxc / _positive(wcc), scale).clamp_(min=0.0)
    # Where all codes are zero, numbers are their minimum.
    alone = torch.where(wcc > 0, 0.0, (-wx / _positive(w)).clamp_(min=0.0))
    return scale, torch.where(plain, alone, minimum)


def error_of(x: Tensor, weights: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | float) -> Tensor:
    """The weighted squared error of each block."""
    shift = minimum[:, None] if isinstance(minimum, Tensor) else minimum
    return (weights * (codes * scale[:, None] - shift - x).square_()).sum(1)


def inverse_of(x: Tensor) -> Tensor:
    """One over each number; 0 for 0."""
    return torch.where(x == 0, 0.0, 1.0 / _nonzero(x))


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def _positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)
