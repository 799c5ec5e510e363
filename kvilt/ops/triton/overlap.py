"""Programmatic dependent launch: a kernel starts, and loads what no other kernel writes, before the last one has ended.

Each kernel waits for the one before it before it reads or writes anything that a kernel makes. Weights are made by
none, so a product has its first tile of them when its input is ready.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = 9  # the first compute capability that has it


def overlap(x: Tensor) -> dict[str, Any]:
    """The constants and options of a launch on the device of `x`."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _has_it(x.device.index) else {"PDL": False}


@cache
def _has_it(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= HOPPER


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Let the next kernel start beside this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(at, PDL: tl.constexpr):
    """Bring lines of memory that no kernel writes into the cache, before the last kernel has ended."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait until the kernel before this one has written all it writes."""
    if PDL:
        tl.extra.cuda.gdc_wait()
