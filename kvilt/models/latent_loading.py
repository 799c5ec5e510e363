"""The weights of latent attention: their shapes, and the form a backend takes them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import Ops
from .latent import LatentAttention, QueryProjection
from .layers import AnyNorm, Linear
from .spec import AttentionSpec, LatentSpec


class LatentLoader(Protocol):
    """Takes tensors out of a checkpoint by our names."""

    ops: Ops
    found: Mapping[str, str]

    def linear(self, name: str) -> Linear: ...

    def floats(self, name: str) -> Tensor: ...

    def norm(self, name: str, eps: float | None = None) -> AnyNorm: ...


def latent_shapes(spec: AttentionSpec, latent: LatentSpec, width: int) -> dict[str, tuple[int, ...]]:
    """All but the projections of single heads."""
    q = spec.heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_down": (latent.kv_rank, width),
        "k_rope": (latent.rope_dim, width),
        "kv_norm": (latent.kv_rank,),
        "out": (width, spec.heads * latent.value_dim),
    }
    if not latent.q_rank:
        return {"q": (q, width), **shapes}
    return {"q_down": (latent.q_rank, width), "q_down_norm": (latent.q_rank,), "q_up": (q, latent.q_rank), **shapes}


def per_head_shapes(heads: int, latent: LatentSpec, cut: bool) -> dict[str, tuple[int, ...]]:
    """The projections of single heads: one tensor, or `cut` into two as by llama.cpp's converter."""
    if not cut:
        return {"kv_up": (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank)}
    return {
        "key_up": (heads, latent.kv_rank, latent.plain_dim),
        "value_up": (heads, latent.value_dim, latent.kv_rank),
    }


def latent_attention(
    loader: LatentLoader, index: int, spec: AttentionSpec, latent: LatentSpec, place: LayerSlot
) -> LatentAttention:
    """The attention of one layer."""

    def at(name: str) -> str:
        return f"{index}.{name}"

    q: Linear | QueryProjection
    if latent.q_rank:
        norm = loader.norm(at("q_down_norm"), latent.norm_eps)
        q = QueryProjection(loader.linear(at("q_down")), norm, loader.linear(at("q_up")))
    else:
        q = loader.linear(at("q"))
    if at("kv_up") in loader.found:
        whole = loader.floats(at("kv_up")).view(spec.heads, -1, latent.kv_rank)
        key_up, value_up = whole[:, : latent.plain_dim].transpose(1, 2), whole[:, latent.plain_dim :]
    else:
        key_up, value_up = loader.floats(at("key_up")), loader.floats(at("value_up"))
    return LatentAttention(
        spec,
        place,
        q,
        kv_down=loader.linear(at("kv_down")),
        k_rope=loader.linear(at("k_rope")),
        kv_norm=loader.norm(at("kv_norm"), latent.norm_eps),
        key_up=loader.ops.prepare_per_head(key_up),
        value_up=loader.ops.prepare_per_head(value_up),
        out=loader.linear(at("out")),
    )
