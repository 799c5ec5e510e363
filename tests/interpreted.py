"""Triton's interpreter, for machines without a GPU: kernels run as numpy, one program after the other.

Importing this switches it on, so it comes before any import of kernels.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6 turns arrays of one element into ints, which numpy 2.4 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor

_create_dot = interpreter.InterpreterBuilder.create_dot


def _widened(handle: Any) -> Any:
    """bfloat16 is kept as bits, which the interpreter multiplies as whole numbers."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """Floats are multiplied in float64 and rounded once: numpy sums rows of one product in orders of their own."""
    a, b = _widened(a), _widened(b)
    if a.dtype.scalar != tl.float32 or b.dtype.scalar != tl.float32 or d.dtype.scalar != tl.float32:
        return _create_dot(self, a, b, d, *rest)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _dot

_cast = interpreter.InterpreterBuilder.cast_impl


def _rounded(self: Any, src: Any, dst_type: Any) -> Any:
    """To bfloat16 by rounding to the nearest, as a GPU does; the interpreter cuts bits off."""
    if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
        src = _cast(self, src, tl.float32)
    if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
        return _cast(self, src, dst_type)
    bits = np.ascontiguousarray(src.data).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), rounded), dst_type.scalar)


interpreter.InterpreterBuilder.cast_impl = _rounded

_launch = interpreter.GridExecutor.__call__
_patched: set[int] = set()  # modules, in the launch in progress


def _launched(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    return _launch(self, *args, **kwargs)


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls. To patch the language in each call, as triton does, takes most of a run."""
    module = id(self.fn.__globals__)
    if module not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(module)
    return self.rewrite()(*args, **kwargs)


interpreter.GridExecutor.__call__ = _launched
interpreter.InterpretedFunction.__call__ = _called


_create_fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
_TORCH = {tl.float8e4nv: torch.float8_e4m3fn, tl.float32: torch.float32, tl.bfloat16: torch.bfloat16}


def _eight_bits(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """To and from float8 as torch does it; the interpreter cuts bits off."""
    kinds = src.dtype.scalar, dst_type.scalar
    if tl.float8e4nv not in kinds or any(kind not in _TORCH for kind in kinds):
        return _create_fp_to_fp(self, src, dst_type, rounding_mode)
    own, other = (_TORCH[kind] for kind in kinds)
    data = torch.from_numpy(np.ascontiguousarray(src.data).view(np.uint8)).view(own).to(other)
    return interpreter.TensorHandle(data.view(torch.uint8).numpy().view(interpreter._get_np_dtype(kinds[1])), kinds[1])


interpreter.InterpreterBuilder.create_fp_to_fp = _eight_bits
