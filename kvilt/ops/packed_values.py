"""Values of 4 bits, two to a byte, as pages of `k8v4` keep them: what every backend must make of them, bit for bit.

The scale of a head takes its largest value to -8 and so has the other sign; codes are 0 to 15 for -8 to 7. A byte holds
an even dimension in its low half and the next one in its high half.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIDDLE = 8  # the code of zero


def pack_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values [..., dim] as bytes [..., dim / 2] and float32 scales [..., 1]."""
    if not x.shape[-1]:
        return x.to(torch.uint8), torch.zeros((*x.shape[:-1], 1), device=x.device)
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    largest = torch.where(high >= -low, high, low)
    scale = torch.where(largest.isnan(), float("nan"), largest / -MIDDLE)
    scale = scale.masked_fill(scale.abs() < torch.finfo(torch.float32).tiny, 0.0)  # one over it would be no number
    scaled = x * torch.where(scale == 0, 0.0, 1 / scale)
    whole = torch.where(scaled > -MIDDLE, scaled, -float(MIDDLE)).clamp(max=MIDDLE - 1).round()
    codes = (whole + MIDDLE).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def unpack_values(packed: Tensor) -> Tensor:
    """Bytes [..., width] as whole float32 numbers [..., 2 * width], to be multiplied with their scales."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float() - MIDDLE
