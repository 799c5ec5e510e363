"""The border to the kernels, which read and write raw memory: no address leaves Python unless its tensor was checked.

Calls outside of steps hand over tensors, and the extension checks them. Calls inside of steps hand over addresses,
because a tensor takes microseconds to cross. Each address has a type of its own, which only this file makes and which
the extension's stub asks for: mypy refuses the address of a tensor that was not checked.

Knows dtypes, shapes and devices; refuses to know operations. A recorded step is checked once, while it is recorded.
"""

from __future__ import annotations

from typing import NewType

import torch
from torch import Tensor

from ...errors import InputError

F32, I32, I64 = torch.float32, torch.int32, torch.int64
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

F32Address = NewType("F32Address", int)  # of float32 numbers without gaps on the CPU; 0: none
I64Address = NewType("I64Address", int)  # of int64 numbers, likewise
I32Address = NewType("I32Address", int)  # of int32 numbers, likewise
FloatsAddress = NewType("FloatsAddress", int)  # of numbers of any of FLOATS, likewise
TableAddress = NewType("TableAddress", int)  # of the entries of a table of adapters (lora.py)


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


def f32(tensor: Tensor | None) -> F32Address:
    """Where the numbers of a float32 tensor lie."""
    if tensor is None:
        return F32Address(0)
    if tensor.dtype is not F32 or not tensor.is_cpu or not tensor.is_contiguous():
        checked("tensor", tensor, tensor.shape)
    return tensor.data_ptr()  # type: ignore[return-value]  # a call of F32Address takes as long as the rest


def i64(tensor: Tensor) -> I64Address:
    """Where the numbers of an int64 tensor lie."""
    if tensor.dtype is not I64 or not tensor.is_cpu or not tensor.is_contiguous():
        checked("tensor", tensor, tensor.shape, I64)
    return tensor.data_ptr()  # type: ignore[return-value]


def i32(tensor: Tensor) -> I32Address:
    """Where the numbers of an int32 tensor lie."""
    return I32Address(checked("tensor", tensor, tensor.shape, I32).data_ptr())


def floats(tensor: Tensor) -> FloatsAddress:
    """Where the numbers of a tensor of floats lie, of any width that the kernels know."""
    check(tensor.dtype in FLOATS, "tensor", f"must be floats, not {tensor.dtype}")
    return FloatsAddress(checked("tensor", tensor, tensor.shape, tensor.dtype).data_ptr())


def _named(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
