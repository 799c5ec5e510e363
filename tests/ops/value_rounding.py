"""How far attention may be from float32 where an instruction set rounds values and weights to bfloat16."""

from __future__ import annotations

from kvilt.ops.contract import Ops, PageShape
from kvilt.ops.kv_dtypes import FLOAT32

# A bfloat16 has eight bits, so rounding moves a number by 2^-8 of itself at most. A value and its weight are rounded.
_BOTH = (1 + 2**-8) ** 2 - 1
_ROUNDING = ("avx512bf16", "amx-bf16", "amx-attention")


def value_rounding(ops: Ops, shape: PageShape) -> float:
    """How far the rounding may move attention over such pages, relative to the same weights' mean of |value|.

    Zero where all products are float32: in other instruction sets, over pages of float32 and over latent ones.
    """
    rounds = ops.numerics.partition("/")[2] in _ROUNDING and shape.dtype is not FLOAT32 and not shape.latent
    return _BOTH if rounds else 0.0
