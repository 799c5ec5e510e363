"""The border to the kernels, which read and write raw memory: no address leaves Python unless its tensor was checked.

Knows dtypes, shapes and devices; refuses to know operations. A recorded step is checked once, while it is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError

F32, I64 = torch.float32, torch.int64


def checked(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = F32) -> Tensor:
    """The tensor, if it has this dtype and shape, lies on the CPU, and has no gaps; else InputError by name."""
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.shape != shape or not tensor.is_contiguous():
        raise InputError(
            f"{what}: the native kernels take contiguous {_named(dtype, shape)} on the CPU, "
            f"not {_named(tensor.dtype, tensor.shape)} on {tensor.device}, {tensor.layout}; convert it first"
        )
    return tensor


def check(condition: bool, what: str, reason: str) -> None:
    """Sizes that must fit each other."""
    if not condition:
        raise InputError(f"{what}: {reason}")


def check_dims(what: str, tensor: Tensor, dims: int) -> None:
    """A tensor whose extents are read before it is checked."""
    check(tensor.dim() == dims, what, f"must have {dims} dimensions, not {tensor.dim()}")


def _named(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
