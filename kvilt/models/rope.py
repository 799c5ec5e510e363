"""Rotary position embedding: frequencies from a spec, and the rotation of a step's positions."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..ops.contract import Ops, Rotation
from .spec import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NoScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)


def frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [dims / 2]."""
    exponents = torch.arange(0, spec.dims, 2, dtype=torch.int64).float() / spec.dims
    plain = 1.0 / (spec.theta**exponents)
    match spec.scaling:
        case NoScaling():
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FactorScaling(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, spec, scaling)
        case ProportionalScaling(pairs, factor):
            return plain / factor * (torch.arange(spec.dims // 2) < pairs)
        case LongScaling():
            raise AssertionError("at_context chooses the divisors before a model is assembled")


def magnitude(spec: RopeSpec) -> float:
    """The factor by which rotation scales vectors (mscale)."""
    match spec.scaling:
        case FactorScaling(magnitude=factor) | YarnScaling(magnitude=factor) | LongScaling(magnitude=factor):
            return factor
        case _:
            return 1.0


def _yarn(plain: Tensor, spec: RopeSpec, scaling: YarnScaling) -> Tensor:
    def pair(turns: float) -> float:
        """The pair (a fraction) that makes this many turns over the original context."""
        context = scaling.original_context / (turns * 2 * math.pi)
        return spec.dims * math.log(context) / (2 * math.log(spec.theta))

    first, last = pair(scaling.fast_turns), pair(scaling.slow_turns)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dims - 1)
    width = (last - first) or 0.001
    ramp = ((torch.arange(spec.dims // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    shortest = scaling.original_context / scaling.high
    longest = scaling.original_context / scaling.low
    share = (scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)
    smooth = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelength > longest, plain / scaling.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, smooth, stretched)


def rotation(spec: RopeSpec, inv_freq: Tensor, positions: Tensor, ops: Ops) -> Rotation:
    """Cosines and sines for `positions` [tokens]; computed once a step and shared by layers with the same rope.

    With [axes, tokens] each pair of dimensions turns by the axis that `sections` gives it to.
    """
    if positions.dim() == 1:
        return ops.rotation(positions, inv_freq, magnitude(spec), spec.pairing)
    each = [ops.rotation(axis.contiguous(), inv_freq, magnitude(spec), spec.pairing) for axis in positions]
    spans = list(pairwise([0, *accumulate(spec.sections)]))
    cos = torch.cat([one.cos[:, a:b] for one, (a, b) in zip(each, spans, strict=True)], dim=1)
    sin = torch.cat([one.sin[:, a:b] for one, (a, b) in zip(each, spans, strict=True)], dim=1)
    return Rotation(cos, sin, spec.pairing)
