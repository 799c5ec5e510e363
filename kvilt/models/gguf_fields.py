"""The metadata of a GGUF file that says what a spec says: the inverse of what families read.

One writer for all families. What it says is read back by the family and compared, so a field that a family does not
know is harmless, and one that is missing is found out. `_MULTIPLIERS` has what single families call their factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kv.layout import Window
from .recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from .rope import frequencies
from .spec import (
    AttentionSpec,
    ExpertsSpec,
    FactorScaling,
    FeedForwardSpec,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelSpec,
    NoScaling,
    RopeSpec,
    YarnScaling,
)

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def _granite(spec: ModelSpec) -> dict[str, Any]:
    return {
        "embedding_scale": spec.embed_scale,
        "attention.scale": spec.layers[0].attention.scale,
        "residual_scale": spec.layers[0].residual_scale,
        "logit_scale": 1 / spec.logit_scale,
    }


def _granite_hybrid(spec: ModelSpec) -> dict[str, Any]:
    turns = any(layer.has_attention and isinstance(layer.attention.rope, RopeSpec) for layer in spec.layers)
    return {**_granite(spec), "rope.scaling.finetuned": turns}


_MULTIPLIERS: Mapping[str, Callable[[ModelSpec], dict[str, Any]]] = MappingProxyType(
    {"granite": _granite, "granite_hybrid": _granite_hybrid, "cohere": lambda spec: {"logit_scale": spec.logit_scale}}
)


def gguf_metadata(spec: ModelSpec, architecture: str, name: str) -> dict[str, Any]:
    """The metadata but for the tokenizer's."""
    attentions = [layer.attention for layer in spec.layers if layer.has_attention]
    wide = next((one for one in attentions if not isinstance(one.reach, Window)), attentions[0])
    norm = "attention.layer_norm_rms_epsilon" if spec.norm_kind == "rms" else "attention.layer_norm_epsilon"
    own = {
        "block_count": len(spec.layers),
        "context_length": spec.context,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": _feed_forward(spec),
        "attention.head_count": wide.heads,
        "attention.head_count_kv": _kv_heads(spec, wide),
        **_head_sizes(wide),
        norm: spec.norm_eps,
        "vocab_size": spec.vocab_size,
        **_rope(attentions, wide),
        **_reach(attentions),
        **({"final_logit_softcapping": spec.final_soft_cap} if spec.final_soft_cap else {}),
        **_experts(spec),
        **_recurrent(spec),
        **(_MULTIPLIERS[spec.family](spec) if spec.family in _MULTIPLIERS else {}),
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }


def _feed_forward(spec: ModelSpec) -> int:
    """The width of dense blocks; of models that have none, that of an expert."""
    blocks = [layer.feed_forward for layer in spec.layers]
    dense = [one.hidden for one in blocks if isinstance(one, FeedForwardSpec)]
    return (dense or [one.expert.hidden for one in blocks if isinstance(one, ExpertsSpec)])[0]


def _kv_heads(spec: ModelSpec, wide: AttentionSpec) -> int | list[int]:
    """Of all layers; of each, where some layers have something else in the place of attention."""
    listed = any(isinstance(layer.recurrent, Mamba2Spec | ShortConvSpec) for layer in spec.layers)
    counts = [wide.kv_heads if layer.has_attention else 0 for layer in spec.layers]
    return counts if listed and 0 in counts else wide.kv_heads


def _head_sizes(wide: AttentionSpec) -> dict[str, Any]:
    if wide.latent is None:
        return {"attention.key_length": wide.head_dim, "attention.value_length": wide.head_dim}
    latent = wide.latent
    return {
        "attention.key_length": latent.plain_dim + latent.rope_dim,
        "attention.value_length": latent.value_dim,
        "attention.kv_lora_rank": latent.kv_rank,
        **({"attention.q_lora_rank": latent.q_rank} if latent.q_rank else {}),
    }


def _recurrent(spec: ModelSpec) -> dict[str, Any]:
    kept = next((layer.recurrent for layer in spec.layers if layer.recurrent is not None), None)
    match kept:
        case None:
            return {}
        case ShortConvSpec(width=width):
            return {"shortconv.l_cache": width}
        case GatedDeltaSpec(heads, width) | Mamba2Spec(heads, width):
            first = next((i for i, layer in enumerate(spec.layers) if layer.has_attention), 0)
            return {
                "ssm.time_step_rank": heads.value_heads,
                "ssm.inner_size": heads.value_heads * heads.value_dim,
                "ssm.group_count": heads.key_heads,
                "ssm.state_size": heads.key_dim,
                "ssm.conv_kernel": width,
                **({"full_attention_interval": first + 1} if isinstance(kept, GatedDeltaSpec) else {}),
            }


def _reach(attentions: list[AttentionSpec]) -> dict[str, Any]:
    windows = [one.reach.tokens for one in attentions if isinstance(one.reach, Window) and not one.chunked]
    caps = [one.soft_cap for one in attentions if one.soft_cap]
    return {
        **({"attention.sliding_window": windows[0]} if windows else {}),
        **({"attn_logit_softcapping": caps[0]} if caps else {}),
    }


def _rope(attentions: list[AttentionSpec], wide: AttentionSpec) -> dict[str, Any]:
    ropes = [one.rope for one in attentions if isinstance(one.rope, RopeSpec)]
    if not ropes:
        return {}
    rope = wide.rope if isinstance(wide.rope, RopeSpec) else ropes[0]
    fields: dict[str, Any] = {"rope.dimension_count": rope.dims, "rope.freq_base": float(rope.theta), **_scaling(rope)}
    local = {one.theta for one in ropes if one.theta != rope.theta}
    if len(local) == 1:
        fields["rope.freq_base_swa"] = float(local.pop())
    if wide.temperature is not None:
        fields["attention.temperature_scale"] = wide.temperature.beta
        fields["rope.scaling.original_context_length"] = wide.temperature.length
    return fields


def _scaling(rope: RopeSpec) -> dict[str, Any]:
    match rope.scaling:
        case LinearScaling(factor):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}
        case YarnScaling(factor, original, magnitude, fast, slow):
            plain = 1 + 0.1 * math.log(factor)
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(factor),
                "rope.scaling.original_context_length": original,
                **({"rope.scaling.attn_factor": magnitude / plain} if abs(magnitude / plain - 1) > 1e-6 else {}),
                **({"rope.scaling.yarn_beta_fast": float(fast)} if fast != 32 else {}),
                **({"rope.scaling.yarn_beta_slow": float(slow)} if slow != 1 else {}),
            }
        case LongScaling(original_context=original, magnitude=magnitude):
            return {
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": float(magnitude),
            }
        case _:
            return {}


def _experts(spec: ModelSpec) -> dict[str, Any]:
    sparse = [i for i, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, ExpertsSpec)]
    if not sparse:
        return {}
    block = spec.layers[sparse[0]].feed_forward
    assert isinstance(block, ExpertsSpec)
    fields: dict[str, Any] = {
        "expert_count": block.experts,
        "expert_used_count": block.top_k,
        "expert_feed_forward_length": block.expert.hidden,
        "expert_weights_scale": float(block.router.scale),
        "expert_weights_norm": block.normalized,
        "expert_gating_func": _SIGMOID if block.router.scores == "sigmoid" else _SOFTMAX,
        "leading_dense_block_count": sparse[0],
        "interleave_moe_layer_step": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
    }
    if block.router.groups > 1:
        fields["expert_group_count"], fields["expert_group_used_count"] = block.router.groups, block.router.top_groups
    if block.shared is not None:
        fields["expert_shared_feed_forward_length"] = block.shared.block.hidden
        fields["expert_shared_count"] = block.shared.block.hidden // block.expert.hidden
    return fields


def rope_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """The divisors of rope frequencies that GGUF keeps as tensors."""
    ropes = [layer.attention.rope for layer in spec.layers if layer.has_attention]
    for rope in (one for one in ropes if isinstance(one, RopeSpec)):
        match rope.scaling:
            case LongScaling(short, long):
                return {
                    "rope_factors_short.weight": torch.tensor(short, dtype=torch.float32),
                    "rope_factors_long.weight": torch.tensor(long, dtype=torch.float32),
                }
            case Llama3Scaling() | FactorScaling():
                plain = frequencies(RopeSpec(rope.theta, rope.dims, rope.pairing, NoScaling()))
                return {"rope_freqs.weight": plain / frequencies(rope)}
    return {}
