"""Qwen3 with experts: Qwen3 whose feed-forward is one of experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, each_attention
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAX_EXPERTS,
    gguf_experts,
    sparse_layers,
    with_experts,
)
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec = each_attention(gguf_spec(checkpoint, "qwen3_moe"), lambda _layer, a: replace(a, qk_norm=True))
    return with_experts(spec, gguf_experts(gguf_fields(checkpoint), normalized=True), lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), hf_spec(checkpoint, "qwen3_moe")
    # Unlike Qwen3, a window is one of all layers.
    windowed = config.flag("use_sliding_window") and not config.says_none("sliding_window")
    reach: Reach = Window(config.integer("sliding_window", DEFAULT_WINDOW)) if windowed else Full()
    count = "num_local_experts" if "num_local_experts" in checkpoint.config else "num_experts"
    experts = ExpertsSpec(
        config.integer(count, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok"),
        FeedForwardSpec(config.integer("moe_intermediate_size"), config.activation("hidden_act", "silu")),
        config.flag("norm_topk_prob"),
    )
    spec = each_attention(spec, lambda _layer, a: replace(a, qk_norm=True, reach=reach))
    return with_experts(spec, experts, sparse_layers(config, len(spec.layers)))


QWEN3_MOE = Family(
    "qwen3_moe",
    (
        CheckpointDialect("gguf", ("qwen3moe",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS),
        CheckpointDialect("hf", ("Qwen3MoeForCausalLM",), from_hf, HF_EXPERT_NAMES, HF_IGNORED),
    ),
)
