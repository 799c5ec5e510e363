"""Weights in the layout of the native kernels: tiles of sixteen outputs, interleaved so that lanes are outputs.

What the bytes mean is written in csrc/packed.h, and C++ moves them: this file chooses.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from ...quant.formats import Format
from ...quant.tensor import QuantTensor, Weight
from ...quant.unpack import dequantize
from ..contract import PackedWeight
from .border import checked
from .memory import Slabs

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner

_PLAIN = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})


def packs(format_: Format) -> bool:
    """Whether the kernels multiply with weights of a format as they are; others become float32."""
    import _kvilt_native as module

    return format_.ggml_id is not None and module.packed_size(format_.name, 1, format_.block_elements) is not None


def pack(runner: KernelRunner, slabs: Slabs, weight: Weight) -> PackedWeight:
    """The weight as the kernels want it; formats without kernels of their own become float32."""
    import _kvilt_native as module

    outputs, inputs = weight.shape
    if isinstance(weight, QuantTensor) and packs(weight.format):
        name, source = weight.format.name, weight.blocks
    else:
        plain = dequantize(weight) if isinstance(weight, QuantTensor) else weight
        source = plain if plain.dtype in _PLAIN else plain.to(torch.float32)
        name = _PLAIN[source.dtype]
    source = checked("weight", source.contiguous(), source.shape, source.dtype)
    size = module.packed_size(name, outputs, inputs)
    assert size is not None, name
    kind, size_bytes = size
    data = slabs.take(size_bytes)
    runner.pack(name, source.view(torch.uint8), inputs, data)
    return PackedWeight(kind.name, (outputs, inputs), data, module.Weight(kind, outputs, inputs, data))
