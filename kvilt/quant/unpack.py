"""The reference way to unpack a weight: its format's entry in the table says how. Knows no file."""

from __future__ import annotations

import torch

from ..errors import Unsupported
from .formats import FORMATS
from .tensor import QuantTensor, Weight

UNPACKED_FORMATS = tuple(name for name, format_ in FORMATS.items() if format_.dequantize is not None)


def dequantize(weight: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight as an ordinary tensor; raises Unsupported for a format that has no dequantizer."""
    if weight.format.dequantize is None:
        known = ", ".join(UNPACKED_FORMATS)
        raise Unsupported(f"tensors in {weight.format.name} cannot be unpacked yet; use a model in one of {known}")
    return weight.format.dequantize(weight.planes, weight.shape, dtype)


def to_float(weight: Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any weight as an ordinary tensor of `dtype`; a tensor that already is one comes back as it is."""
    return dequantize(weight, dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)
