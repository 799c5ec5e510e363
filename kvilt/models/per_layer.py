"""Per-layer inputs: a small vector for each token and layer, from the token's id and its embedding (Gemma 3n, 4 E)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.contract import Activation, Ops, Prepared
from .layers import LayerContext, Linear, Norm


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """What makes the inputs of all layers: a table of ids, and a projection of the embedding."""

    table: Prepared  # [vocab, layers * width]
    vocab_size: int
    projection: Linear  # [layers * width, hidden]
    norm: Norm  # of each layer's part; has the factor of the sum, and the projection's in its epsilon
    scale: float  # of rows of the table

    def __call__(self, ids: Tensor, embedded: Tensor, ops: Ops, whole_vocab: int) -> Tensor:
        """[tokens, layers, width] of `ids` [tokens], whose embeddings are `embedded` [tokens, hidden]."""
        if self.vocab_size < whole_vocab:
            ids = torch.where(ids < self.vocab_size, ids, 0)
        known = ops.embed(self.table, ids, self.scale).view(len(ids), -1, len(self.norm.weight))
        return ops.add(self.norm(self.projection(embedded, ops).view(known.shape), ops), known)


@dataclass(frozen=True, slots=True)
class PerLayerBlock:
    """How a layer reads its input: projection(activation(gate(x)) * input), normed."""

    index: int
    activation: Activation
    gate: Linear
    projection: Linear
    norm: Norm

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """What is added to a stream `x` [tokens, hidden]."""
        assert context.layer_inputs is not None
        (opened,) = context.linears(x, (self.gate,))
        own = context.layer_inputs[:, self.index].contiguous()
        made = context.linear(context.ops.act_mul(opened, own, self.activation), self.projection)
        return self.norm(made, context.ops)
