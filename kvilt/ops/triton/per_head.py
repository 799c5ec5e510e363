"""Linear maps of single heads: each head of a token times a matrix of its own, as latent attention has them.

One tile for any number of tokens, and inputs in ascending order: the bits of a token do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import await_inputs, launch_next, overlap

TOKENS, OUTPUTS, INPUTS = 16, 64, 64  # of a tile


def linear(x: Tensor, weight: Tensor, moved: int) -> Tensor:
    """`x` [tokens, heads, in + moved] times `weight` [heads, out, in]: [tokens, heads, moved + out]."""
    tokens, (heads, outputs, inputs) = len(x), weight.shape
    out = torch.empty((tokens, heads, moved + outputs), dtype=x.dtype, device=x.device)
    _linear[(heads, triton.cdiv(outputs, OUTPUTS), triton.cdiv(tokens, TOKENS))](
        x, weight, out, tokens, x.stride(0), x.stride(1), HEADS=heads, IN=inputs, OUT=outputs, MOVED=moved,
        MOVED_PAD=triton.next_power_of_2(max(moved, 1)), TOKENS=TOKENS, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2, enable_fp_fusion=False,
        **overlap(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x, weight, out, tokens, stride_token, stride_head,
    HEADS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, MOVED: tl.constexpr, MOVED_PAD: tl.constexpr,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    n, c, known = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS), token < tokens
    x_at = x + token[:, None] * stride_token + head * stride_head
    out_at = out + (token[:, None] * HEADS + head) * (MOVED + OUT)
    weight_at = weight + head * OUT * IN + n[None, :] * IN + c[:, None]
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, IN, INPUTS):
        inside = start + c < IN
        own = tl.load(x_at + start + c[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_at + start, mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        sums = tl.dot(own, w, sums, input_precision=PRECISION)
    tl.store(out_at + MOVED + n[None, :], sums, mask=known[:, None] & (n < OUT)[None, :])
    if MOVED > 0:
        if block == 0:
            i = tl.arange(0, MOVED_PAD)[None, :]
            there = known[:, None] & (i < MOVED)
            tl.store(out_at + i, tl.load(x_at + IN + i, mask=there, other=0.0), mask=there)
