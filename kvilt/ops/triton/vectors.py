"""Small kernels on activations and pages: norms, rotation, gates, and keys and values into their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Activation, Rotation
from ..reference import ReferencePages
from .overlap import await_inputs, launch_next, overlap

_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


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


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding of `x` [tokens, heads, dim]."""
    tokens, heads, dim = x.shape
    pairs = rotation.cos.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotate[(tokens, heads)](
        x, rotation.cos, rotation.sin, out, x.stride(0), x.stride(1),
        HEADS=heads, D=dim, D_PAD=triton.next_power_of_2(dim), PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        HALF=rotation.pairing == "half", num_warps=1,
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
    _turn_heads(source, cos, sin, token, target, head < HEADS, D, D_PAD, PAIRS, PAIRS_PAD, HALF)


def write(
    pages: ReferencePages, layer: int, slots: Tensor, keys: Tensor, values: Tensor, rotation: Rotation | None
) -> None:
    """Put `keys` and `values` [tokens, kv_heads, dim] into `slots`; keys are rotated on the way."""
    shape = pages.shape
    pairs = 0 if rotation is None else rotation.cos.shape[1]
    angles = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)  # not read without a rotation
    _write[(len(slots), shape.kv_heads)](
        keys, values, slots, *angles, pages.keys[layer], pages.values[layer],
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        KV_HEADS=shape.kv_heads, D=shape.key_dim, DV=shape.value_dim,
        D_PAD=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
        PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(max(pairs, 1)),
        HALF=rotation is None or rotation.pairing == "half", num_warps=1,
    )  # fmt: skip


@triton.jit
def _write(
    keys, values, slots, cos, sin, key_pages, value_pages, key_token, key_head, value_token, value_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    _write_heads(
        keys + token * key_token + head * key_head, values + token * value_token + head * value_head, slots, cos, sin,
        key_pages, value_pages, token, head, KV_HEADS, D, DV, D_PAD, PAIRS, PAIRS_PAD, HALF,
    )  # fmt: skip


@triton.jit
def _write_heads(
    keys, values, slots, cos, sin, key_pages, value_pages, token, head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Keys, turned, and values of some heads of a token, into its slot."""
    known, i = head < KV_HEADS, tl.arange(0, D_PAD)
    place = tl.load(slots + token) * KV_HEADS + head
    inside = known[:, None] & (i < DV)[None, :]
    own = tl.load(values[:, None] + i[None, :], mask=inside, other=0.0)
    tl.store(value_pages + place[:, None] * DV + i[None, :], own, mask=inside)
    _turn_heads(keys, cos, sin, token, key_pages + place * D, known, D, D_PAD, PAIRS, PAIRS_PAD, HALF)


def rotate_and_write(
    pages: ReferencePages, layer: int, slots: Tensor, query: Tensor, keys: Tensor, values: Tensor, rotation: Rotation
) -> Tensor:
    """`query` rotated, in one launch with `write`."""
    shape, (tokens, heads, dim) = pages.shape, query.shape
    pairs = rotation.cos.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=query.dtype, device=query.device)
    block = min(triton.next_power_of_2(heads), 16 if tokens > 512 else 1)  # heads of a program; few tokens need many
    _rotate_and_write[(tokens, triton.cdiv(heads, block) + triton.cdiv(shape.kv_heads, block))](
        query, keys, values, slots, rotation.cos, rotation.sin, out, pages.keys[layer], pages.values[layer],
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, KV_HEADS=shape.kv_heads, D=dim, DV=shape.value_dim,
        D_PAD=triton.next_power_of_2(max(dim, shape.value_dim)), PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        HALF=rotation.pairing == "half", BLOCK=block, num_warps=1 if block == 1 else 4, **overlap(query),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_and_write(
    query, keys, values, slots, cos, sin, out, key_pages, value_pages,
    query_token, query_head, key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    if block < first:
        head = block * BLOCK + tl.arange(0, BLOCK)
        source, target = query + token * query_token + head * query_head, out + (token * HEADS + head) * D
        _turn_heads(source, cos, sin, token, target, head < HEADS, D, D_PAD, PAIRS, PAIRS_PAD, HALF)
    else:
        head = (block - first) * BLOCK + tl.arange(0, BLOCK)
        _write_heads(
            keys + token * key_token + head * key_head, values + token * value_token + head * value_head, slots,
            cos, sin, key_pages, value_pages, token, head, KV_HEADS, D, DV, D_PAD, PAIRS, PAIRS_PAD, HALF,
        )  # fmt: skip


@triton.jit
def _turn_heads(
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
    i = tl.arange(0, PAIRS_PAD)
    inside = known[:, None] & (i < PAIRS)[None, :]
    left = (i if HALF else 2 * i)[None, :]
    right = (i + PAIRS if HALF else 2 * i + 1)[None, :]
    a = tl.load(source[:, None] + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + right, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * PAIRS + i, mask=i < PAIRS, other=0.0)[None, :]
    s = tl.load(sin + token * PAIRS + i, mask=i < PAIRS, other=0.0)[None, :]
    tl.store(target[:, None] + left, a * c - b * s, mask=inside)
    tl.store(target[:, None] + right, b * c + a * s, mask=inside)


def act_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up, of rows that may stand apart."""
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
    block = 1024
    _act_mul[(rows, triton.cdiv(width, block))](
        gate, up, out, width, gate.stride(0), up.stride(0), KIND=_ACTIVATIONS[activation], BLOCK=block, **overlap(gate)
    )
    return out


@triton.jit
def activated(x, KIND: tl.constexpr):
    """silu, tanh-gelu or gelu of float32."""
    if KIND == 0:
        return x * tl.sigmoid(x)
    if KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2 * inner)
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _act_mul(gate, up, out, width, stride_gate, stride_up, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_next(PDL)
    await_inputs(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    g = tl.load(gate + row * stride_gate + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, activated(g, KIND) * u, mask=inside)
