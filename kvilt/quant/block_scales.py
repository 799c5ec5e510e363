"""Scales inside GGML's blocks: where they are, and whether they are numbers.

A scale that is none makes every weight of its block NaN or infinite, and with it every logit of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .tensor import QuantTensor

# Bytes of a block at which its float16 scales begin.
HALF_SCALES: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "Q4_0": (0,),
        "Q4_1": (0, 2),
        "Q5_0": (0,),
        "Q5_1": (0, 2),
        "Q8_0": (0,),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "IQ4_NL": (0,),
        "IQ4_XS": (0,),
        "IQ3_S": (0,),
        "IQ2_XS": (0,),
    }
)
_EXPONENT = 0x7C00  # of a float16: all ones are NaN and infinity
_NO_EXPONENT = 255  # of MXFP4's exponents, in the first byte
_SLAB_BLOCKS = 1 << 20


def has_finite_scales(weight: QuantTensor) -> bool:
    """Whether all scales of a weight in a format of GGML are numbers; True for formats without scales in blocks.

    By numpy: on tensors this small torch's threads would wait for each other longer than they compute.
    """
    name = weight.format.name
    blocks = weight.blocks.view(-1, weight.format.block_bytes).numpy()
    for start in range(0, len(blocks), _SLAB_BLOCKS):
        slab = blocks[start : start + _SLAB_BLOCKS]
        if name == "MXFP4" and (slab[:, 0] == _NO_EXPONENT).any():
            return False
        for at in HALF_SCALES.get(name, ()):
            bits = slab.view("<u2")[:, at // 2]
            if (bits & _EXPONENT).max() == _EXPONENT:
                return False
    return True
