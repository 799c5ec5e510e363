"""Qwen 3.5 (text, dense and experts): Qwen3-Next with separate projections, alone or as part of a larger model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ...weights.source import Checkpoint
from ..spec import ModelSpec
from .expert_fields import with_experts
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields
from .gguf_hybrid import JOINED, gated_experts
from .plain import HF_IGNORED, gguf_fields, hf_spec
from .qwen2_moe import HF_NAMES as EXPERT_NAMES
from .qwen3_next import gguf_dialect, gguf_hybrid_spec, hybrid_experts, hybrid_spec, q_gate_order

NAMES = MappingProxyType(
    {
        **EXPERT_NAMES,
        "q_and_gate": "model.layers.{i}.self_attn.q_proj.weight",
        "qkv": "model.layers.{i}.linear_attn.in_proj_qkv.weight",
        "z": "model.layers.{i}.linear_attn.in_proj_z.weight",
        "b": "model.layers.{i}.linear_attn.in_proj_b.weight",
        "a": "model.layers.{i}.linear_attn.in_proj_a.weight",
        "conv": "model.layers.{i}.linear_attn.conv1d.weight",
        "dt_bias": "model.layers.{i}.linear_attn.dt_bias",
        "a_log": "model.layers.{i}.linear_attn.A_log",
        "memory_norm": "model.layers.{i}.linear_attn.norm.weight",
        "memory_out": "model.layers.{i}.linear_attn.out_proj.weight",
    }
)


def inside(names: Mapping[str, str]) -> Mapping[str, str]:
    """What a text model's tensors are called where it is part of one that sees images."""
    return MappingProxyType({ours: name.replace("model.", "model.language_model.", 1) for ours, name in names.items()})


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the configuration of its text model."""
    config = checkpoint.config.get("text_config")
    if not isinstance(config, Mapping):
        raise WeightError("text_config", "missing from the model's configuration")
    tied = config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))
    return replace(checkpoint, config={**config, "tie_word_embeddings": tied})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    # The converter lets value heads take the key heads in turn, as ggml repeats them.
    return gguf_hybrid_spec(checkpoint, "qwen3_5", tiled=True)


def moe_from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec, experts = gguf_hybrid_spec(checkpoint, "qwen3_5_moe", tiled=True), gated_experts(gguf_fields(checkpoint))
    return with_experts(spec, experts, lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    return hybrid_spec(hf_spec(checkpoint, "qwen3_5", partial=0.25), Fields(checkpoint.config))


def moe_from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    # Every layer has experts, so configs may leave out how wide a dense one would be.
    dense = {"intermediate_size": config.integer("moe_intermediate_size", 512), **checkpoint.config}
    spec = hf_spec(replace(checkpoint, config=dense), "qwen3_5_moe", partial=0.25)
    experts = hybrid_experts(Fields({**config.values, "norm_topk_prob": True}))
    return with_experts(hybrid_spec(spec, config), experts, lambda _layer: True)


def _dialect(
    architecture: str, spec: Callable[[Checkpoint], ModelSpec], names: Mapping[str, str] = NAMES, stacked: bool = False
) -> CheckpointDialect:
    """`stacked`: checkpoints that have the maps of all experts in one tensor, as the published ones do."""
    whole = names["experts.gate"].replace("{e}.gate_proj.weight", "gate_up_proj")
    stacks = {
        "experts.gate": StackedTensor(whole, 0, 2),
        "experts.up": StackedTensor(whole, 1, 2),
        "experts.down": StackedTensor(whole.replace("gate_up", "down")),
    }
    return CheckpointDialect(
        "hf",
        (architecture,),
        spec,
        names,
        IGNORED,
        FUSED,
        ORDERS,
        stacks if stacked else {},
        when=whole.format(i=0) if stacked else "",
        norm_shift=1.0,
    )


def _moe_from_nested(checkpoint: Checkpoint) -> ModelSpec:
    return moe_from_hf(text_part(checkpoint))


FUSED = MappingProxyType({"q_and_gate": ("q", "q_gate")})
ORDERS = MappingProxyType({"q_and_gate": q_gate_order})
IGNORED = (*HF_IGNORED, "mtp.*", "model.visual.*")  # a drafting layer, and what sees images

QWEN3_5 = Family(
    "qwen3_5",
    (
        gguf_dialect("qwen35", from_gguf, ("q_and_gate",)),
        _dialect("Qwen3_5ForCausalLM", from_hf),
        _dialect("Qwen3_5ForConditionalGeneration", lambda one: from_hf(text_part(one)), inside(NAMES)),
    ),
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    (
        gguf_dialect("qwen35moe", moe_from_gguf, ("q_and_gate",), *JOINED),
        gguf_dialect("qwen35moe", moe_from_gguf, ("q_and_gate",)),
        _dialect("Qwen3_5MoeForCausalLM", moe_from_hf, stacked=True),
        _dialect("Qwen3_5MoeForCausalLM", moe_from_hf),
        _dialect("Qwen3_5MoeForConditionalGeneration", _moe_from_nested, inside(NAMES), stacked=True),
        _dialect("Qwen3_5MoeForConditionalGeneration", _moe_from_nested, inside(NAMES)),
    ),
)
