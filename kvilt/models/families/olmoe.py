"""OLMoE: experts in all layers, q and k normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from ...errors import Unsupported
from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, each_attention
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, HF_EXPERT_NAMES, MAX_EXPERTS, gguf_experts, with_experts
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """Files have the experts' width as that of the feed-forward; weights are never normalized."""
    fields = gguf_fields(checkpoint)
    if fields.has("attention.clamp_kqv"):
        raise Unsupported("attention.clamp_kqv: queries, keys and values that are clipped are not supported")
    experts = gguf_experts(fields, normalized=False, hidden=fields.integer("feed_forward_length"))
    return _olmoe(gguf_spec(checkpoint, "olmoe"), experts)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    if config.has("clip_qkv"):
        raise Unsupported("clip_qkv: queries, keys and values that are clipped are not supported")
    experts = ExpertsSpec(
        config.integer("num_experts", 64, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 8),
        FeedForwardSpec(config.integer("intermediate_size"), config.activation("hidden_act", "silu")),
        config.flag("norm_topk_prob"),
    )
    return _olmoe(hf_spec(checkpoint, "olmoe"), experts)


def _olmoe(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    spec = each_attention(spec, lambda _layer, a: replace(a, qk_norm=True, qk_norm_whole=True))
    return with_experts(spec, experts, lambda _layer: True)


OLMOE = Family(
    "olmoe",
    (
        CheckpointDialect("gguf", ("olmoe",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS),
        CheckpointDialect("hf", ("OlmoeForCausalLM",), from_hf, HF_EXPERT_NAMES, HF_IGNORED),
    ),
)
