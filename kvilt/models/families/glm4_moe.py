"""GLM-4 with experts (GLM-4.5, 4.6 and Air): sigmoid routing with a selection bias, shared experts, dense layers first.

The layers behind the last one, which predict further tokens, are left out.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, each_attention
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAX_EXPERTS,
    gguf_grouped,
    hf_grouped_router,
    shared_block,
    with_experts,
)
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec

PARTIAL = 0.5  # of a head that turns, where a config does not say it
GGUF_NAMES = MappingProxyType({**GGUF_EXPERT_NAMES, "feed_forward_norm": "blk.{i}.post_attention_norm.weight"})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields, spec = gguf_fields(checkpoint), gguf_spec(checkpoint, "glm4_moe")
    # The file counts the layers that predict further tokens.
    layers = spec.layers[: len(spec.layers) - fields.count("nextn_predict_layers", 0)]
    normed = GGUF_NAMES["q_norm"].format(i=0) in checkpoint.tensors.names()
    spec = each_attention(replace(spec, layers=layers), lambda _layer, a: replace(a, qk_norm=normed))
    dense = fields.count("leading_dense_block_count", 1)
    return with_experts(spec, gguf_grouped(fields), lambda index: index >= dense)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    values = {"partial_rotary_factor": PARTIAL, **checkpoint.config}
    config, spec = Fields(values), hf_spec(replace(checkpoint, config=values), "glm4_moe", partial=PARTIAL)
    expert = FeedForwardSpec(config.integer("moe_intermediate_size", 1408), config.activation("hidden_act", "silu"))
    router = hf_grouped_router(config)
    experts = ExpertsSpec(
        config.integer("n_routed_experts", 128, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 8),
        expert,
        config.flag("norm_topk_prob", True),
        router,
        shared_block(expert, config.integer("n_shared_experts", 1)),
    )
    normed, dense = config.flag("use_qk_norm"), config.count("first_k_dense_replace", 1)
    spec = each_attention(spec, lambda _layer, a: replace(a, qk_norm=normed, out_bias=False))
    return with_experts(spec, experts, lambda index: index >= dense)


GLM4_MOE = Family(
    "glm4_moe",
    (
        CheckpointDialect(
            "gguf", ("glm4moe",), from_gguf, GGUF_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS, extra_layers=True
        ),
        CheckpointDialect("hf", ("Glm4MoeForCausalLM",), from_hf, HF_EXPERT_NAMES, HF_IGNORED, extra_layers=True),
    ),
)
