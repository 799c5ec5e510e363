"""Rotary position embedding: frequencies from a spec, and the rotation of a step's positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.contract import Rotation
from .spec import FactorScaling, LinearScaling, Llama3Scaling, NoScaling, RopeSpec


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


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    shortest = scaling.original_context / scaling.high
    longest = scaling.original_context / scaling.low
    share = (scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)
    smooth = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelength > longest, plain / scaling.factor, plain)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, smooth, stretched)


def rotation(spec: RopeSpec, radians: Tensor, positions: Tensor) -> Rotation:
    """Cosines and sines for `positions` [tokens]; computed once a step and shared by layers with the same rope."""
    angles = positions.float().unsqueeze(1) * radians
    return Rotation(angles.cos(), angles.sin(), spec.pairing)
