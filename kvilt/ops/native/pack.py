"""Weights in the layout of the native kernels: tiles of sixteen outputs, interleaved so that lanes are outputs.

What the bytes mean is written in csrc/packed.h, and C++ moves them: this file chooses.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from ...quant.byte_blocks import byte_blocks
from ...quant.formats import FLOAT8, FORMATS, Format
from ...quant.tensor import QuantTensor, Weight
from ...quant.unpack import dequantize
from ..contract import PackedWeight
from .border import checked
from .memory import Slabs

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner

_PLAIN = MappingProxyType({torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})
_BYTES = frozenset({FLOAT8, "IQ3_S", "IQ2_XS"})  # formats that become blocks of bytes


def packs(format_: Format) -> bool:
    """Whether the kernels multiply with weights of a format, as they are or as blocks of bytes."""
    return _kind(format_) is not None


def kernel(format_: Format) -> str:
    """The tiles that weights of a format are packed into."""
    kind = _kind(format_)
    if kind is None:
        return "float32 tiles, unpacked at load"
    return f"{kind} tiles" + (", rounded to 8 bits at load" if format_.name in _BYTES else "")


def _kind(format_: Format) -> str | None:
    import _kvilt_native as module

    own = FORMATS["Q8_0"] if format_.name in _BYTES else format_
    size = None if own.ggml_id is None else module.packed_size(own.name, 1, own.block_elements)
    return None if size is None else size[0].name


def pack(runner: KernelRunner, slabs: Slabs, weight: Weight) -> PackedWeight:
    """The weight as the kernels want it; formats without kernels of their own become float32."""
    import _kvilt_native as module

    outputs, inputs = weight.shape
    if isinstance(weight, QuantTensor) and weight.format.name in _BYTES:
        weight = byte_blocks(weight)
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
    runner.pack(name, source.view(torch.uint8), weight.shape[1], data)  # blocks of bytes are filled up with zeros
    return PackedWeight(kind.name, (outputs, inputs), data, module.Weight(kind, outputs, inputs, data))
