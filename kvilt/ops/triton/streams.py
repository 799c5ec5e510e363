"""Residual streams on CUDA: kernels for what sums over a row, so that its order is fixed; plain torch for the rest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..streams import LEAST_SQUARE, TorchStreams
from .overlap import await_inputs, launch_next, overlap


class TritonStreams(TorchStreams):
    """Products and sums of whole tensors have one order in torch as well."""

    def match_rms(self, x: Tensor, like: Tensor) -> Tensor:
        x, like = x.contiguous(), like.contiguous()
        out, (rows, width) = torch.empty_like(x), x.shape
        _match_rms[(rows,)](x, like, out, width, LEAST_SQUARE, **_options(width), **overlap(x))
        return out

    def gaussian_relu(self, x: Tensor, cut: float) -> Tensor:
        x = x.contiguous()
        out, (rows, width) = torch.empty_like(x), x.shape
        _gaussian_relu[(rows,)](x, out, width, cut, **_options(width), **overlap(x))
        return out


def _options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": 8 if block >= 4096 else 4 if block >= 512 else 1}


@triton.jit
def _match_rms(x, like, out, width, least, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < width
    own = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(like + row * width + i, mask=inside, other=0.0).to(tl.float32)
    square = tl.maximum(tl.sum(own * own, 0) / width, least)
    scale = tl.sqrt(tl.sum(other * other, 0) / width) / tl.sqrt(square)
    tl.store(out + row * width + i, own * scale, mask=inside)


@triton.jit
def _gaussian_relu(x, out, width, cut, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < width
    own = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(own, 0) / width
    centred = tl.where(inside, own - mean, 0.0)
    floor = mean + tl.sqrt(tl.sum(centred * centred, 0) / width) * cut
    tl.store(out + row * width + i, tl.maximum(own - floor, 0.0), mask=inside)
