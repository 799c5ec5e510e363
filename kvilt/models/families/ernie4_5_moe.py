"""ERNIE 4.5 with experts: softmax routing with a selection bias, shared experts, neighbouring pairs that turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, RopeSpec, RouterSpec, each_attention
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAX_EXPERTS,
    gguf_experts,
    shared_block,
    with_experts,
)
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec

THETA, NORM_MIN = 500000.0, 1e-12
HF_NAMES = MappingProxyType(
    {**HF_EXPERT_NAMES, "selection_bias": "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"}
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields, spec = gguf_fields(checkpoint), gguf_spec(checkpoint, "ernie4_5_moe", interleaved=True)
    biased = GGUF_EXPERT_NAMES["selection_bias"].format(i=len(spec.layers) - 1) in checkpoint.tensors.names()
    experts = gguf_experts(fields, True, RouterSpec(selection_bias=biased, floor=NORM_MIN))
    experts = replace(experts, shared=shared_block(experts.expert, fields.count("expert_shared_count", 0)))
    every, dense = fields.integer("interleave_moe_layer_step", 1), fields.count("leading_dense_block_count", 0)
    return with_experts(spec, experts, lambda index: index >= dense and (index + 1) % every == 0)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), hf_spec(checkpoint, "ernie4_5_moe", theta=THETA, tied=True)
    if config.flag("use_bias"):
        raise Unsupported("use_bias: an ERNIE 4.5 whose maps have biases is not supported")
    expert = FeedForwardSpec(config.integer("moe_intermediate_size", 1536), config.activation("hidden_act", "silu"))
    experts = ExpertsSpec(
        config.integer("moe_num_experts", 64, high=MAX_EXPERTS),
        config.integer("moe_k", 6),
        expert,
        router=RouterSpec(selection_bias=True, floor=config.number("moe_norm_min", NORM_MIN)),
        shared=shared_block(expert, config.count("moe_num_shared_experts", 2)),
    )
    spec = each_attention(spec, lambda _layer, a: _paired(a))
    return with_experts(spec, experts, _sparse(config, len(spec.layers)))


def _paired(attention: AttentionSpec) -> AttentionSpec:
    assert isinstance(attention.rope, RopeSpec)
    return replace(attention, rope=replace(attention.rope, pairing="interleaved"), qkv_bias=False, out_bias=False)


def _sparse(config: Fields, layers: int) -> Callable[[int], bool]:
    every, first = config.integer("moe_layer_interval", 1), config.count("moe_layer_start_index", 1)
    last = layers - 1 if config.values.get("moe_layer_end_index", -1) == -1 else config.count("moe_layer_end_index")
    return lambda index: first <= index <= last and (index + 1) % every == 0


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    (
        CheckpointDialect(
            "gguf", ("ernie4_5-moe",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS, pairs_qk=True
        ),
        CheckpointDialect("hf", ("Ernie4_5_MoeForCausalLM",), from_hf, HF_NAMES, HF_IGNORED, pairs_qk=True),
    ),
)
