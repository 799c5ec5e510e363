"""Qwen3 with experts: Qwen3 whose feed-forward is one of experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ...weights.source import Checkpoint
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec
from . import qwen3
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import HF_IGNORED, HF_NAMES

NAMES = MappingProxyType(
    {
        **HF_NAMES,
        "router": "model.layers.{i}.mlp.gate.weight",
        "experts.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
        "experts.up": "model.layers.{i}.mlp.experts.{e}.up_proj.weight",
        "experts.down": "model.layers.{i}.mlp.experts.{e}.down_proj.weight",
    }
)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), replace(qwen3.from_hf(checkpoint), family="qwen3_moe")
    count = "num_local_experts" if "num_local_experts" in checkpoint.config else "num_experts"
    experts = ExpertsSpec(
        config.integer(count, high=1 << 12),
        config.integer("num_experts_per_tok"),
        FeedForwardSpec(config.integer("moe_intermediate_size"), config.activation("hidden_act", "silu")),
        config.flag("norm_topk_prob"),
    )
    dense, every = _dense_layers(checkpoint, len(spec.layers)), config.integer("decoder_sparse_step", 1)
    layers = (
        layer if i in dense or (i + 1) % every else replace(layer, feed_forward=experts)
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _dense_layers(checkpoint: Checkpoint, layers: int) -> set[int]:
    """Layers that the config names as having no experts."""
    named = checkpoint.config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(i) is not int or not 0 <= i < layers for i in named):
        raise WeightError("mlp_only_layers", f"must be a list of layers below {layers}")
    return set(named)


QWEN3_MOE = Family("qwen3_moe", (CheckpointDialect("hf", ("Qwen3MoeForCausalLM",), from_hf, NAMES, HF_IGNORED),))
