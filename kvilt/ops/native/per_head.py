"""Linear maps of single heads on the native backend: floats of the checkpoint's width, with outputs as lanes.

What the bytes mean is written in csrc/per_head.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ...errors import Unsupported
from ..contract import PackedWeight, Prepared
from .border import FLOATS, check, check_dims, checked, f32, floats
from .memory import Buffers

if TYPE_CHECKING:
    from _kvilt_native import KernelRunner

_LANES = 16


def pack(weight: Tensor) -> PackedWeight:
    """Floats [heads, out, in] as the kernels read them: [heads, in, out padded to whole lanes]."""
    import _kvilt_native as module

    if not hasattr(module.KernelRunner, "per_head_linear"):
        raise Unsupported("the installed native kernels are older than latent attention; reinstall kvilt to build them")
    check_dims("weight", weight, 3)
    heads, outputs, inputs = weight.shape
    weight = weight if weight.dtype in FLOATS else weight.to(torch.float32)
    numbers = F.pad(weight.transpose(1, 2), (0, -outputs % _LANES)).clone(memory_format=torch.contiguous_format)
    kind = module.WeightKind[str(numbers.dtype).removeprefix("torch.")]
    return PackedWeight(f"per_head_{kind.name}", (heads, outputs, inputs), numbers.view(torch.uint8), (numbers, kind))


def linear(runner: KernelRunner, buffers: Buffers, x: Tensor, weight: Prepared, moved: int) -> Tensor:
    """Each head of `x` times its own matrix; see the contract."""
    assert isinstance(weight, PackedWeight), "a weight of another backend"
    check_dims("x", x, 3)
    tokens, (heads, outputs, inputs), (numbers, kind) = len(x), weight.shape, weight.handle
    check(moved >= 0, "moved", "must be a number of dimensions")
    x = checked("x", x.contiguous(), (tokens, heads, inputs + moved))
    out = buffers.empty(tokens, heads, moved + outputs)
    runner.per_head_linear(f32(x), tokens, heads, inputs, moved, floats(numbers), kind, outputs, f32(out))
    return out
