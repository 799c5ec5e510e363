"""Recurrent blocks, each in the place of a layer's attention: gated delta net, Mamba-2, short convolution.

Tokens of a row are folded into its state in order; where the state comes from and goes to stands in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import Decay, Ops, StatePlace
from .attention import Attention
from .layers import AnyNorm, LayerContext, Linear, Norm
from .recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Weights of one gated delta net, and the place of its state."""

    spec: GatedDeltaSpec
    place: LayerSlot
    qkv: Linear
    z: Linear
    b: Linear
    a: Linear
    conv: Tensor  # float32 [channels, width]
    decay: Decay
    norm: Norm
    out: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """`x` [tokens, hidden], normalized first, to [tokens, hidden], plus `residual`; writes states."""
        ops, place = context.ops, _state(context, self.place)
        qkv, z, b, a = context.linears(x, (self.qkv, self.z, self.b, self.a), norm)
        mixed = ops.causal_conv(qkv, self.conv, None, True, place)
        read = ops.gated_delta(mixed, a, b, self.decay, self.spec.heads, place)
        return context.linear(ops.gated_norm(read, self.norm.pair, z), self.out, residual)


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A root-mean-square norm of each of several parts of a vector, with a learned scale of all of it."""

    weight: Tensor  # float32 [groups * size]
    groups: int
    eps: float

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        if self.groups == 1:
            return ops.rms_norm(x, self.weight, self.eps)
        parts = x.reshape(-1, x.shape[-1] // self.groups)
        plain = ops.rms_norm(parts, torch.ones_like(self.weight[: parts.shape[-1]]), self.eps)
        return (plain.view(x.shape) * self.weight).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Weights of one Mamba-2 block, and the place of its state."""

    spec: Mamba2Spec
    place: LayerSlot
    z: Linear
    qkv: Linear
    a: Linear
    conv: Tensor  # float32 [channels, width]
    conv_bias: Tensor | None  # float32 [channels]
    decay: Decay
    skip: Tensor  # float32 [value_heads]
    norm: GroupNorm | None
    out: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """As `GatedDeltaNet`."""
        ops, place = context.ops, _state(context, self.place)
        z, qkv, step = context.linears(x, (self.z, self.qkv, self.a), norm)
        if self.spec.scales:  # those of values, keys and queries are in the convolution
            z, step = z * self.spec.scales[0], step * self.spec.scales[-1]
        mixed = ops.causal_conv(qkv, self.conv, self.conv_bias, True, place)
        read = ops.mamba2(mixed, step, self.skip, self.decay, self.spec.heads, place).view(z.shape)
        return context.linear(self._gated(read, z, ops), self.out, residual)

    def _gated(self, read: Tensor, z: Tensor, ops: Ops) -> Tensor:
        if self.norm is None:
            return ops.act_mul(z, read, "silu")
        if self.spec.gate_first:
            return self.norm(ops.act_mul(z, read, "silu"), ops)
        return ops.act_mul(z, self.norm(read, ops), "silu")


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Weights of one short convolution, and the place of its state: out(c * conv(b * x))."""

    spec: ShortConvSpec
    place: LayerSlot
    conv_b: Linear
    conv_c: Linear
    conv_x: Linear
    conv: Tensor  # float32 [channels, width]
    out: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """As `GatedDeltaNet`."""
        b, c, own = context.linears(x, (self.conv_b, self.conv_c, self.conv_x), norm)
        mixed = context.ops.causal_conv(b * own, self.conv, None, False, _state(context, self.place))
        return context.linear(c * mixed, self.out, residual)


Recurrent = GatedDeltaNet | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class AttentionAndRecurrent:
    """Both of the same normed input, each with a factor of what it adds (Falcon-H1)."""

    attention: Attention
    recurrent: Recurrent
    attention_scale: float
    recurrent_scale: float

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """As `GatedDeltaNet`."""
        ops = context.ops
        normed = x if norm is None else norm(x, ops)
        read = self.recurrent(normed, context) * self.recurrent_scale
        made = ops.add(read, self.attention(normed, context), self.attention_scale)
        return made if residual is None else ops.add(residual, made)


def _state(context: LayerContext, place: LayerSlot) -> StatePlace:
    assert context.state_store is not None
    assert context.states is not None
    return StatePlace(context.state_store, place.layer, context.states)
