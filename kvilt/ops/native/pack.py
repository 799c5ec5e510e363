"""Weights in the layout of the native kernels: tiles of sixteen outputs, interleaved so that lanes are outputs.

What the bytes mean is written in csrc/packed.h, and C++ moves them: this file chooses.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...quant.tensor import QuantTensor, Weight
from ...quant.unpack import dequantize
from ..contract import PackedWeight
from .border import checked
from .memory import Slabs

# In the order of csrc/kernels.h.
KINDS = (
    "float32", "float16", "bfloat16", "4 bits", "4 bits, minimum", "5 bits", "5 bits, minimum", "8 bits",
    "4 bits, k", "5 bits, k", "6 bits, k",
)  # fmt: skip
_PLAIN = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})


def pack(module: Any, engine: Any, slabs: Slabs, weight: Weight) -> PackedWeight:
    """The weight as the kernels want it; formats without kernels of their own become float32."""
    outputs, inputs = weight.shape
    if isinstance(weight, QuantTensor) and module.packed(weight.format.name, outputs, inputs) is not None:
        name, source = weight.format.name, weight.data
    else:
        plain = dequantize(weight) if isinstance(weight, QuantTensor) else weight
        source = plain if plain.dtype in _PLAIN else plain.to(torch.float32)
        name = _PLAIN[source.dtype]
    source = checked("weight", source.contiguous(), source.shape, source.dtype)
    kind, size_bytes = module.packed(name, outputs, inputs)
    data = slabs.take(size_bytes)
    engine.pack(name, source.data_ptr(), source.nbytes, outputs, inputs, data.data_ptr(), size_bytes)
    handle = module.Weight(kind, outputs, inputs, data.data_ptr(), size_bytes)
    return PackedWeight(KINDS[kind], (outputs, inputs), data, handle)
