"""Weights of 8-bit floats (float8_e4m3fn) with scales for blocks of rows and columns, as FP8 checkpoints have them.

A block is 128 x 128 elements, a row, or the whole weight: one scale for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .ggml_blocks import Dequantizer

CODES, SCALES = "codes", "scales"  # the planes
BLOCK = 128  # rows and columns, where blocks are neither rows nor the whole
_SLAB_ELEMENTS = 1 << 20


def by_scales(rows: int, columns: int) -> Dequantizer:
    """A dequantizer for a scale of each block of `rows` x `columns`."""

    def dequantize(planes: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = planes[CODES], planes[SCALES]
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        step = max(1, _SLAB_ELEMENTS // shape[-1])
        for start in range(0, len(codes), step):
            part = codes[start : start + step]
            block = torch.arange(start, start + len(part), device=codes.device) // rows
            wide = scales[block].repeat_interleave(min(columns, shape[-1]), 1)[:, : shape[-1]]
            out[start : start + step] = part.float() * wide
        return out.view(shape)

    return dequantize
