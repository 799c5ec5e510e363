"""LFM2 with experts (LFM2-8B-A1B): sigmoid routing with a selection bias, dense layers first."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, RouterSpec
from . import lfm2
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, MAX_EXPERTS, gguf_experts, with_experts
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields

ROUTER = RouterSpec("sigmoid", epsilon=1e-6)
NAMES = MappingProxyType(
    {
        **lfm2.NAMES,
        "router": "model.layers.{i}.feed_forward.gate.weight",
        "selection_bias": "model.layers.{i}.feed_forward.expert_bias",
        "experts.gate": "model.layers.{i}.feed_forward.experts.{e}.w1.weight",
        "experts.up": "model.layers.{i}.feed_forward.experts.{e}.w3.weight",
        "experts.down": "model.layers.{i}.feed_forward.experts.{e}.w2.weight",
    }
)
GGUF_NAMES = MappingProxyType({**GGUF_EXPERT_NAMES, **lfm2.GGUF_NAMES})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec, fields = replace(lfm2.from_gguf(checkpoint), family="lfm2_moe"), gguf_fields(checkpoint)
    biased = any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors.names())
    experts = gguf_experts(fields, normalized=True, router=replace(ROUTER, selection_bias=biased))
    dense = fields.count("leading_dense_block_count", 0)
    return with_experts(spec, experts, lambda index: index >= dense)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    # The width of its dense layers is given as it is.
    config = Fields({**checkpoint.config, "block_auto_adjust_ff_dim": False})
    spec = replace(lfm2.from_hf(replace(checkpoint, config=config.values)), family="lfm2_moe")
    scale, biased = config.number("routed_scaling_factor", 1.0), config.flag("use_expert_bias", True)
    experts = ExpertsSpec(
        config.integer("num_experts", 32, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 4),
        FeedForwardSpec(config.integer("moe_intermediate_size", 1792)),
        config.flag("norm_topk_prob", True),
        replace(ROUTER, scale=scale, selection_bias=biased),
    )
    dense = config.count("num_dense_layers", 2)
    return with_experts(spec, experts, lambda index: index >= dense)


LFM2_MOE = Family(
    "lfm2_moe",
    (
        CheckpointDialect("gguf", ("lfm2moe",), from_gguf, GGUF_NAMES, GGUF_IGNORED, lfm2.FUSED, stacks=GGUF_STACKS),
        CheckpointDialect("hf", ("Lfm2MoeForCausalLM",), from_hf, NAMES, HF_IGNORED, lfm2.FUSED),
    ),
)
