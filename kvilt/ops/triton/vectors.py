"""Small kernels on activations: norms, rotation, gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, RmsNorm, Rotation, TemperatureScaling
from .overlap import await_inputs, launch_next, overlap

_ACTIVATIONS: dict[Activation, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "swiglu_oai": 3,
    "tanh": 5,
    "relu2": 6,
    "relu": 7,
}
_SIGMOID = 4  # the gate itself, of what is no activation of a feed-forward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, times `weight`."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = 8 if block >= 4096 else 4 if block >= 512 else 1
    _rms_norm[(x.numel() // width,)](x, weight, out, width, eps, BLOCK=block, num_warps=warps, **overlap(x))
    return out


@triton.jit
def _rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < width
    own = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 0) / width + eps)
    normed = own * scale * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + row * width + i, normed, mask=inside)


def together(xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> bool:
    """Whether `rms_norms` takes them: two tensors of heads of one size, and one epsilon."""
    if len(xs) != 2 or any(x.dim() != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2] for x in xs):
        return False
    return xs[0].shape[2] == xs[1].shape[2] and norms[0][1] == norms[1][1]


def rms_norms(xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> list[Tensor]:
    """The norms of two tensors [tokens, heads, dim] in one launch; their tokens may stand apart."""
    (first, second), ((first_weight, eps), (second_weight, _)) = xs, norms
    tokens, heads, dim = first.shape
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    _rms_norms[(tokens, heads + second.shape[1])](
        first, second, first_weight, second_weight, *outs, first.stride(0), second.stride(0), eps,
        HEADS=heads, MORE=second.shape[1], D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1, **overlap(first),
    )  # fmt: skip
    return outs


@triton.jit
def _rms_norms(
    first, second, first_weight, second_weight, first_out, second_out, first_stride, second_stride, eps,
    HEADS: tl.constexpr, MORE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    x, weight, out = first + token * first_stride + head * D, first_weight, first_out + (token * HEADS + head) * D
    if head >= HEADS:
        head -= HEADS
        x, weight = second + token * second_stride + head * D, second_weight
        out = second_out + (token * MORE + head) * D
    own = tl.load(x + i, mask=i < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 0) / D + eps)
    tl.store(out + i, own * scale * tl.load(weight + i, mask=i < D, other=0.0), mask=i < D)


def gated_norm(x: Tensor, norm: RmsNorm, gate: Tensor) -> Tensor:
    """Norms of heads [tokens, heads, dim], times silu of `gate` [tokens, heads * dim], whose rows may stand apart."""
    (tokens, heads, dim), (weight, eps), x = x.shape, norm, x.contiguous()
    out = torch.empty((tokens, heads * dim), dtype=x.dtype, device=x.device)
    _gated_norm[(tokens, heads)](
        x, weight, gate, out, gate.stride(0), eps,
        HEADS=heads, D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1, **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _gated_norm(
    x, weight, gate, out, stride_gate, eps, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    place, inside = (token * HEADS + head) * D + i, i < D
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + token * stride_gate + head * D + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 0) / D + eps) * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + place, own * scale * activated(g, 0), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Mean and variance norm over the last axis, times `weight`, plus `bias`."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = 8 if block >= 4096 else 4 if block >= 512 else 1
    _layer_norm[(x.numel() // width,)](
        x, weight, weight if bias is None else bias, out, width, eps,
        BIAS=bias is not None, BLOCK=block, num_warps=warps, **overlap(x),
    )  # fmt: skip
    return out


@triton.jit
def _layer_norm(x, weight, bias, out, width, eps, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = i < width
    own = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, own - tl.sum(own, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + i, mask=inside, other=0.0)
    if BIAS:
        normed += tl.load(bias + i, mask=inside, other=0.0)
    tl.store(out + row * width + i, normed, mask=inside)


def scale_queries(query: Tensor, positions: Tensor, scaling: TemperatureScaling) -> Tensor:
    """`query` [tokens, heads, dim], each token times the factor of its position."""
    query, width = query.contiguous(), query.shape[1] * query.shape[2]
    out, block = torch.empty_like(query), triton.next_power_of_2(width)
    _scale_queries[(len(query),)](
        query, positions, out, width, scaling.beta, scaling.length, scaling.offset, BLOCK=block, **overlap(query)
    )
    return out


@triton.jit
def _scale_queries(query, positions, out, width, beta, length, offset, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    steps = (tl.load(positions + token) + offset) // length
    factor = 1 + beta * tl.log(1 + steps.to(tl.float32))
    own = tl.load(query + token * width + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, own * factor, mask=i < width)


def angles(positions: Tensor, inv_freq: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` [tokens] times `inv_freq` [pairs], times `mscale`, in one launch."""
    tokens, pairs = len(positions), len(inv_freq)
    cos = torch.empty((tokens, pairs), dtype=torch.float32, device=positions.device)
    sin, block = torch.empty_like(cos), triton.next_power_of_2(pairs)
    _angles[(tokens,)](positions, inv_freq, cos, sin, mscale, PAIRS=pairs, BLOCK=block, num_warps=1, **overlap(cos))
    return cos, sin


@triton.jit
def _angles(
    positions, inv_freq, cos, sin, mscale, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_inputs(PDL)  # and let no kernel start before the angles are there: all layers read them
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    turn = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + i, mask=i < PAIRS, other=0.0)
    tl.store(cos + token * PAIRS + i, tl.cos(turn) * mscale, mask=i < PAIRS)
    tl.store(sin + token * PAIRS + i, tl.sin(turn) * mscale, mask=i < PAIRS)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding of `x` [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    pairs = rotation.cos.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotate[(tokens, heads)](
        x, rotation.cos, rotation.sin, out, x.stride(0), x.stride(1),
        HEADS=heads, D=dim, D_PAD=triton.next_power_of_2(dim), PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        HALF=rotation.pairing == "half", num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    x, cos, sin, out, stride_token, stride_head,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    source, target = x + token * stride_token + head * stride_head, out + (token * HEADS + head) * D
    turn_heads(source, cos, sin, token, target, head < HEADS, D, D_PAD, PAIRS, PAIRS_PAD, HALF)


@triton.jit
def turn_heads(
    source, cos, sin, token, target, known,
    D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of a token, turned, from their places to others."""
    if 2 * PAIRS < D:
        j = tl.arange(0, D_PAD)
        rest = known[:, None] & ((j >= 2 * PAIRS) & (j < D))[None, :]
        tl.store(target[:, None] + j[None, :], tl.load(source[:, None] + j[None, :], mask=rest, other=0.0), mask=rest)
    if PAIRS == 0:
        return
    a, b, left, right, inside = turned_pairs(source, cos, sin, token, known, PAIRS, PAIRS_PAD, HALF)
    tl.store(target[:, None] + left, a, mask=inside)
    tl.store(target[:, None] + right, b, mask=inside)


@triton.jit
def turned_pairs(
    source, cos, sin, token, known, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Both halves of the pairs of some heads of a token, turned, in float32; their places, and which are there."""
    i = tl.arange(0, PAIRS_PAD)
    inside = known[:, None] & (i < PAIRS)[None, :]
    left = (i if HALF else 2 * i)[None, :]
    right = (i + PAIRS if HALF else 2 * i + 1)[None, :]
    a = tl.load(source[:, None] + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + right, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * PAIRS + i, mask=i < PAIRS, other=0.0)[None, :]
    s = tl.load(sin + token * PAIRS + i, mask=i < PAIRS, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s, left, right, inside


@triton.jit
def turned(
    source, cos, sin, inside, gain, eps,
    D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Vectors at `source` [n, 1], normalized and turned by the angles at `cos` and `sin` [n, 1]: float32 [n, D_PAD]."""
    d = tl.arange(0, D_PAD)[None, :]
    turns = inside & (d < 2 * PAIRS)
    if HALF:
        first, pair, partner = d < PAIRS, d % PAIRS, tl.where(d < PAIRS, d + PAIRS, d - PAIRS)
    else:
        first, pair, partner = d % 2 == 0, d // 2, tl.where(d % 2 == 0, d + 1, d - 1)
    x = tl.load(source + d, mask=inside & (d < D), other=0.0).to(tl.float32)
    y = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(gain + d, mask=d < D, other=0.0)
        y = y * scale * tl.load(gain + partner, mask=d < 2 * PAIRS, other=0.0)
    c, s = tl.load(cos + pair, mask=turns, other=1.0), tl.load(sin + pair, mask=turns, other=0.0)
    return x * c + tl.where(first, -y, y) * s


def act_mul(gate: Tensor, up: Tensor | None, activation: Activation | Literal["sigmoid"]) -> Tensor:
    """activation(gate) * up, of rows that may stand apart; without `up`, activation(gate)."""
    kind = _SIGMOID if activation == "sigmoid" else _ACTIVATIONS[activation]
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    block = 1024
    _act_mul[(rows, triton.cdiv(width, block))](
        gate, gate if up is None else up, out, width, gate.stride(0), gate.stride(0) if up is None else up.stride(0),
        KIND=kind, GATED=up is not None, BLOCK=block, **overlap(gate),
    )  # fmt: skip
    return out


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, tanh-gelu, gelu, tanh, relu or its square, of float32."""
    if KIND == 0:
        return x * tl.sigmoid(x)
    if KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2 * inner)
    if KIND == 5:
        return 2 * tl.sigmoid(2 * x) - 1
    if KIND == 6:
        above = tl.maximum(x, 0.0)
        return above * above
    if KIND == 7:
        return tl.maximum(x, 0.0)
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """activation(gate) * up of float32; that of gpt-oss clamps both and adds 1 to `up`."""
    if KIND == 3:
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate * tl.sigmoid(gate * 1.702) * (up + 1)
    if KIND == 4:
        return tl.sigmoid(gate) * up
    return activated(gate, KIND) * up


@triton.jit
def _act_mul(
    gate, up, out, width, stride_gate, stride_up,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    g = tl.load(gate + row * stride_gate + i, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        u = tl.load(up + row * stride_up + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + i, gated(g, u, KIND), mask=inside)
    else:
        tl.store(out + row * width + i, activated(g, KIND), mask=inside)
