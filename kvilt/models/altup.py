"""Layers of several residual streams (AltUp, Gemma 3n): one stream is computed, the others are predicted from it.

A token's streams lie beside each other, [tokens, streams * hidden], so a decoder cuts and joins them as one vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.contract import Ops
from .attention import Attention
from .experts import FeedForward
from .layers import AnyNorm, LayerContext, Linear, Norm
from .per_layer import PerLayerBlock
from .stream_spec import AltUpSpec

HALF = math.sqrt(0.5)  # of the sum of attention and Laurel


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """From an embedding to streams, and from the streams of the last layer back to one state."""

    spec: AltUpSpec
    spread: tuple[Linear, ...]  # [hidden, hidden], one for each stream but the first
    gather: tuple[Linear, ...]

    def enter(self, x: Tensor, ops: Ops) -> Tensor:
        """[tokens, hidden] to [tokens, streams * hidden], all streams of the size of the first."""
        others = [ops.streams.match_rms(linear(x, ops), x) for linear in self.spread]
        return torch.cat([x, *others], dim=1)

    def leave(self, x: Tensor, ops: Ops) -> Tensor:
        """The sum of the streams [tokens, hidden], brought to the size of the first; its norm has the mean's factor."""
        first, *others = x.view(len(x), self.spec.streams, -1).unbind(1)
        whole = first = first.contiguous()
        for linear, one in zip(self.gather, others, strict=True):
            whole = ops.add(whole, ops.streams.match_rms(linear(one.contiguous(), ops), first))
        return whole


@dataclass(frozen=True, slots=True)
class StreamRouter:
    """The weights by which streams are predicted, and corrected, from one of them."""

    norm: Norm  # has the factor of what the router reads
    router: Linear
    predict: Linear  # its bias keeps each stream as it was
    correct: Linear  # its bias gives each stream the whole change

    def weights(self, x: Tensor, linear: Linear, context: LayerContext) -> Tensor:
        """[tokens, out] of a stream `x`, by one of the two maps."""
        (routed,) = context.linears(x, (self.router,), self.norm)
        return context.linear(context.ops.activate(routed, "tanh"), linear)


@dataclass(frozen=True, slots=True)
class Laurel:
    """A learned augmented residual: right(left(x)), normed; the norm has the factor of the sum."""

    left: Linear
    right: Linear
    norm: AnyNorm

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        (low,) = context.linears(x, (self.left,))
        return self.norm(context.linear(low, self.right), context.ops)


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """A layer of the active stream, between the prediction of all streams and their correction."""

    spec: AltUpSpec
    router: StreamRouter
    laurel: Laurel
    attention_norm: AnyNorm
    attention: Attention
    post_attention_norm: AnyNorm  # has the factor of the sum
    feed_forward_norm: AnyNorm
    feed_forward: FeedForward
    post_feed_forward_norm: AnyNorm
    scale: Tensor | None  # [hidden], of the corrected stream as the per-layer input reads it
    per_layer: PerLayerBlock
    others: Tensor  # [streams]: 1 for each stream that takes the per-layer input

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """`x` [tokens, streams * hidden] to the same."""
        ops, tokens, active = context.ops, len(x), self.spec.active
        predicted = self._predicted(x, context)
        old = predicted[:, active].contiguous()
        new = self._computed(old, context)
        corrected = ops.streams.add(
            predicted, ops.add(new, old, -1.0), self.router.weights(new, self.router.correct, context)
        )
        read = corrected[:, active].contiguous()
        made = self.per_layer(read if self.scale is None else read * self.scale, context)
        return ops.streams.add(corrected, made, self.others.expand(tokens, -1)).view(tokens, -1)

    def narrow(self, x: Tensor, context: LayerContext, tokens: Tensor, wanted: LayerContext) -> Tensor:
        """As `Layer.narrow`."""
        old = self._predicted(x, context)[:, self.spec.active].contiguous()
        self.attention.write(old, context, self.attention_norm)
        return self(x[tokens], wanted) if len(tokens) else x[tokens]

    def _predicted(self, x: Tensor, context: LayerContext) -> Tensor:
        """All streams [tokens, streams, hidden] as the layer expects them."""
        streams = x.view(len(x), self.spec.streams, -1)
        weights = self.router.weights(streams[:, self.spec.active].contiguous(), self.router.predict, context)
        return context.ops.streams.mix(streams, weights)

    def _computed(self, x: Tensor, context: LayerContext) -> Tensor:
        """The active stream through attention beside Laurel, and through the feed-forward block."""
        ops, normed = context.ops, self.attention_norm(x, context.ops)
        attended = self.post_attention_norm(self.attention(normed, context), ops)
        residual = ops.add(self.laurel(normed, context), normed, HALF)
        x = ops.add(residual, ops.add(attended, x, HALF))
        made = self.feed_forward(x, context, None, self.feed_forward_norm)
        return ops.add(x, self.post_feed_forward_norm(made, ops))
