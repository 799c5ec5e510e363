"""A model's architecture as data. A family makes a `ModelSpec` from a checkpoint's config.

Never holds devices, storage dtypes or file names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kv.layout import Full, KVLayout, LayerGroup, Reach
from ..ops.contract import Activation, PageShape, Pairing

# How rope frequencies are stretched.


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Frequencies as they are."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by a factor, high ones kept, a smooth band between."""

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """One divisor per frequency, as GGUF files carry them in `rope_freqs.weight`."""

    factors: tuple[float, ...]


Scaling = NoScaling | LinearScaling | Llama3Scaling | FactorScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dims` dimensions of each head."""

    theta: float
    dims: int
    pairing: Pairing = "half"
    scaling: Scaling = NoScaling()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    reach: Reach = Full()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    soft_cap: float = 0.0  # 0: none


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A gated feed-forward block."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One transformer layer; `post_norms` adds a norm after each block, before its residual."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    post_norms: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder needs to know besides the weights."""

    family: str
    vocab_size: int
    hidden_size: int
    context: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    embed_scale: float = 1.0
    final_soft_cap: float = 0.0  # 0: none


def kv_layout(spec: ModelSpec, page_tokens: int, dtype: torch.dtype) -> KVLayout:
    """The KV layout of a model: layers with the same reach and shape form a group."""
    kinds: dict[tuple[Reach, int, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        attention = layer.attention
        kinds.setdefault((attention.reach, attention.kv_heads, attention.head_dim), []).append(index)
    return KVLayout(
        tuple(
            LayerGroup(reach, tuple(layers), PageShape(len(layers), page_tokens, heads, dim, dim, dtype))
            for (reach, heads, dim), layers in kinds.items()
        )
    )
