"""Mixtral: Mistral whose feed-forward is one of experts. Its GGUF files call themselves llama."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...kv.layout import Window
from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, each_attention
from .expert_fields import HF_EXPERT_NAMES, MAX_EXPERTS, gguf_experts, with_experts
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import HF_IGNORED, gguf_fields, gguf_spec, hf_spec

HF_NAMES = MappingProxyType(
    {
        **HF_EXPERT_NAMES,
        "router": "model.layers.{i}.block_sparse_moe.gate.weight",
        "experts.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight",
        "experts.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight",
        "experts.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight",
    }
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """A file of the architecture llama that has experts."""
    spec, fields = gguf_spec(checkpoint, "mixtral", interleaved=True), gguf_fields(checkpoint)
    experts = gguf_experts(fields, normalized=True, hidden=fields.integer("feed_forward_length"))
    return with_experts(spec, experts, lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), hf_spec(checkpoint, "mixtral", theta=1000000.0)
    experts = ExpertsSpec(
        config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 2),
        FeedForwardSpec(config.integer("intermediate_size"), config.activation("hidden_act", "silu")),
    )
    if config.has("sliding_window"):
        window = Window(config.integer("sliding_window"))
        spec = each_attention(spec, lambda _layer, a: replace(a, reach=window))
    spec = each_attention(spec, lambda _layer, a: replace(a, qkv_bias=False, out_bias=False))
    return with_experts(spec, experts, lambda _layer: True)


MIXTRAL = Family("mixtral", (CheckpointDialect("hf", ("MixtralForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),))
