"""The repair step of blending: tokens take a share of what the anchors have changed by, on their way into pages.

One launch does what the contract's `interpolate` says: a program takes some tokens and one head, sums the changes of
the anchors in float32, turns the keys, and stores both as `pages.py` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..contract import Interpolation, Rotation
from ..reference import ReferencePages
from .overlap import await_inputs, launch_next, overlap
from .pages import (
    larger_of,
    largest_of,
    layer_of,
    packed_scale,
    packed_values,
    page_constants,
    scale_of,
    scaled_by,
)

TOKENS, ANCHORS = 16, 32  # of a program, and at a time


def interpolate(
    pages: ReferencePages,
    layer: int,
    slots: Tensor,
    how: Interpolation,
    kept: tuple[Tensor, Tensor],
    fresh: tuple[Tensor, Tensor],
    rotation: Rotation | None,
) -> None:
    """Put keys and values of the tokens of `how` into `slots`; see the contract."""
    if not len(slots):
        return
    angles = (slots, slots) if rotation is None else (rotation.cos, rotation.sin)  # not read without a rotation
    old, constants = [one.contiguous() for one in kept], page_constants(pages, rotation)
    constants |= {name: max(16, constants[name]) for name in ("D_PAD", "PAIRS_PAD")}  # of a product of tiles
    _interpolate[(triton.cdiv(len(slots), TOKENS), pages.shape.kv_heads)](
        *old, *fresh, how.tokens, how.anchors, how.weights, slots, *angles, *layer_of(pages, layer),
        len(slots), len(how.anchors), *fresh[0].stride()[:2], *fresh[1].stride()[:2], how.weights.stride(0),
        **constants, TOKENS=TOKENS, ANCHORS=ANCHORS, num_warps=4, **overlap(slots),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "anchor_count", "stride_weights"])
def _interpolate(
    old_keys, old_values, new_keys, new_values, tokens, anchors, weights, slots, cos, sin,
    key_pages, value_pages, key_scales, value_scales,
    count, anchor_count, key_token, key_head, value_token, value_head, stride_weights,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, HALF: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, ANCHORS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    await_inputs(PDL)
    t, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    known = t < count
    token = tl.load(tokens + t, mask=known, other=0)
    place = tl.load(slots + t, mask=known, other=0) * KV_HEADS + head
    shares = weights + t * stride_weights
    i = tl.arange(0, D_PAD)
    WORD: tl.constexpr = 2 if PACKED else 1
    WIDTH: tl.constexpr = DV // WORD
    own = _changed(
        old_values + head * DV, new_values + head * value_head, token, anchors, shares, known, WORD * i, i < WIDTH,
        anchor_count, KV_HEADS * DV, value_token, ANCHORS,
    )  # fmt: skip
    inside = known[:, None] & (i < WIDTH)[None, :]
    if PACKED:
        odd = _changed(
            old_values + head * DV, new_values + head * value_head, token, anchors, shares, known, 2 * i + 1, i < WIDTH,
            anchor_count, KV_HEADS * DV, value_token, ANCHORS,
        )  # fmt: skip
        scale = packed_scale(own, odd)
        tl.store(value_scales + place, scale, mask=known)
        own = packed_values(own, odd, scale)
    elif LARGEST > 0:
        scale = scale_of(largest_of(own), LARGEST)
        tl.store(value_scales + place, scale, mask=known)
        own = scaled_by(own, scale, LARGEST, WHOLE)
    tl.store(value_pages + place[:, None] * WIDTH + i[None, :], own.to(value_pages.dtype.element_ty), mask=inside)
    _keys(
        old_keys + head * D, new_keys + head * key_head, token, anchors, shares, known, t, cos, sin,
        key_pages + place * D, key_scales + place, anchor_count, key_token,
        KV_HEADS, D, D_PAD, PAIRS, PAIRS_PAD, HALF, LARGEST, WHOLE, ANCHORS,
    )  # fmt: skip


@triton.jit
def _changed(
    old, new, token, anchors, shares, known, column, inside, anchor_count, old_token, new_token, ANCHORS: tl.constexpr
):  # fmt: skip
    """Some columns of a head of some tokens, with their share of the change of every anchor: float32."""
    at = token[:, None] * old_token + column[None, :]
    total = tl.load(old + at, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
    for start in range(0, anchor_count, ANCHORS):
        a = start + tl.arange(0, ANCHORS)
        there = a < anchor_count
        anchor, both = tl.load(anchors + a, mask=there, other=0), there[:, None] & inside[None, :]
        before = tl.load(old + anchor[:, None] * old_token + column[None, :], mask=both, other=0.0).to(tl.float32)
        after = tl.load(new + a[:, None] * new_token + column[None, :], mask=both, other=0.0).to(tl.float32)
        share = tl.load(shares[:, None] + a[None, :], mask=known[:, None] & there[None, :], other=0.0)
        total = tl.dot(share, after - before, total, input_precision="ieee")
    return total


@triton.jit
def _keys(
    old, new, token, anchors, shares, known, t, cos, sin, target, scales, anchor_count, new_token,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    HALF: tl.constexpr, LARGEST: tl.constexpr, WHOLE: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    """Keys of some tokens, changed, turned and scaled; dimensions past the pairs are not turned."""
    j = tl.arange(0, D_PAD)
    kind: tl.constexpr = target.dtype.element_ty
    past = (j >= 2 * PAIRS) & (j < D)
    most = tl.zeros_like(known.to(tl.float32))
    if 2 * PAIRS < D:
        rest = _changed(
            old, new, token, anchors, shares, known, j, past, anchor_count, KV_HEADS * D, new_token, ANCHORS
        )
        most = largest_of(rest)
    if PAIRS > 0:
        i = tl.arange(0, PAIRS_PAD)
        pair = known[:, None] & (i < PAIRS)[None, :]
        left, right = i if HALF else 2 * i, i + PAIRS if HALF else 2 * i + 1
        a = _changed(
            old, new, token, anchors, shares, known, left, i < PAIRS, anchor_count, KV_HEADS * D, new_token, ANCHORS
        )
        b = _changed(
            old, new, token, anchors, shares, known, right, i < PAIRS, anchor_count, KV_HEADS * D, new_token, ANCHORS
        )
        c = tl.load(cos + t[:, None] * PAIRS + i[None, :], mask=pair, other=0.0)
        s = tl.load(sin + t[:, None] * PAIRS + i[None, :], mask=pair, other=0.0)
        a, b = a * c - b * s, b * c + a * s
        most = larger_of(most, larger_of(largest_of(a), largest_of(b)))
    if LARGEST > 0:
        scale = scale_of(most, LARGEST)
        tl.store(scales, scale, mask=known)
        if 2 * PAIRS < D:
            rest = scaled_by(rest, scale, LARGEST, WHOLE)
        if PAIRS > 0:
            a, b = scaled_by(a, scale, LARGEST, WHOLE), scaled_by(b, scale, LARGEST, WHOLE)
    if 2 * PAIRS < D:
        tl.store(target[:, None] + j[None, :], rest.to(kind), mask=known[:, None] & past[None, :])
    if PAIRS > 0:
        tl.store(target[:, None] + left[None, :], a.to(kind), mask=pair)
        tl.store(target[:, None] + right[None, :], b.to(kind), mask=pair)
