"""Recurrent blocks, each in the place of a layer's attention: gated delta net, Mamba-2, short convolution.

Tokens of a row are folded into its state in order; where the state comes from and goes to stands in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import Decay, StatePlace
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
        gated = ops.act_mul(z, self.norm(read, ops).view(z.shape), "silu")
        return context.linear(gated, self.out, residual)


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
    norm: Norm
    out: Linear

    def __call__(
        self, x: Tensor, context: LayerContext, residual: Tensor | None = None, norm: AnyNorm | None = None
    ) -> Tensor:
        """As `GatedDeltaNet`."""
        ops, place = context.ops, _state(context, self.place)
        z, qkv, step = context.linears(x, (self.z, self.qkv, self.a), norm)
        mixed = ops.causal_conv(qkv, self.conv, self.conv_bias, True, place)
        read = ops.mamba2(mixed, step, self.skip, self.decay, self.spec.heads, place)
        gated = self.norm(ops.act_mul(z, read.view(z.shape), "silu"), ops)
        return context.linear(gated, self.out, residual)


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


def _state(context: LayerContext, place: LayerSlot) -> StatePlace:
    assert context.state_store is not None
    assert context.states is not None
    return StatePlace(context.state_store, place.layer, context.states)
