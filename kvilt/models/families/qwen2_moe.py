"""Qwen2 with experts: Qwen1.5-MoE and Qwen2-57B-A14B. One expert is shared by all tokens, behind a sigmoid."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, SharedExpertSpec, each_attention
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAPS,
    MAX_EXPERTS,
    gguf_experts,
    sparse_layers,
    with_experts,
)
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields, layer_kinds
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec
from .qwen2 import DEFAULT_FULL_LAYERS

HF_NAMES = MappingProxyType(
    {
        **HF_EXPERT_NAMES,
        **{f"shared.{name}": f"model.layers.{{i}}.mlp.shared_expert.{name}_proj.weight" for name in MAPS},
        "shared_gate": "model.layers.{i}.mlp.shared_expert_gate.weight",
    }
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec = each_attention(gguf_spec(checkpoint, "qwen2_moe"), lambda _layer, a: replace(a, qkv_bias=True))
    fields, width = gguf_fields(checkpoint), spec.layers[0].feed_forward
    assert isinstance(width, FeedForwardSpec)
    shared = fields.integer("expert_shared_feed_forward_length", width.hidden)
    experts = gguf_experts(fields, normalized=False)
    experts = replace(experts, shared=SharedExpertSpec(FeedForwardSpec(shared), gated=True))
    return with_experts(spec, experts, lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), hf_spec(checkpoint, "qwen2_moe")
    activation, bias = config.activation("hidden_act", "silu"), config.flag("qkv_bias", True)
    experts = ExpertsSpec(
        config.integer("num_experts", 60, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 4),
        FeedForwardSpec(config.integer("moe_intermediate_size", 1408), activation),
        config.flag("norm_topk_prob"),
        shared=SharedExpertSpec(
            FeedForwardSpec(config.integer("shared_expert_intermediate_size", 5632), activation), gated=True
        ),
    )
    reaches = _reaches(config, len(spec.layers))
    spec = each_attention(spec, lambda i, a: replace(a, qkv_bias=bias, out_bias=False, reach=reaches[i]))
    return with_experts(spec, experts, sparse_layers(config, len(spec.layers)))


def _reaches(config: Fields, layers: int) -> tuple[Reach, ...]:
    """Windows where the config names them, else in every second of the lower layers."""
    kinds = layer_kinds(config, layers)
    if not config.flag("use_sliding_window"):
        if kinds and "sliding_attention" in kinds:
            raise WeightError("layer_types", "names layers with a window, and the config turns windows off")
        return (Full(),) * layers
    below = config.count("max_window_layers", DEFAULT_FULL_LAYERS)
    if kinds is None:
        kinds = tuple("sliding_attention" if (i + 1) % 2 and i < below else "full_attention" for i in range(layers))
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))
    return tuple(window if kind == "sliding_attention" else Full() for kind in kinds)


QWEN2_MOE = Family(
    "qwen2_moe",
    (
        CheckpointDialect("gguf", ("qwen2moe",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS),
        CheckpointDialect("hf", ("Qwen2MoeForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
