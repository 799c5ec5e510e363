"""What families with experts share: the names of their tensors, and how configurations describe experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, RouterSpec, SharedExpertSpec
from .family import StackedTensor
from .fields import Fields
from .plain import GGUF_NAMES, HF_NAMES

MAX_EXPERTS = 1 << 12
SOFTMAX = RouterSpec()
MAPS = ("gate", "up", "down")


def _of_each_map(prefix: str, pattern: str) -> dict[str, str]:
    return {f"{prefix}.{name}": pattern.format(name) for name in MAPS}


HF_EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **HF_NAMES,
        "router": "model.layers.{i}.mlp.gate.weight",
        "selection_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
        **_of_each_map("experts", "model.layers.{{i}}.mlp.experts.{{e}}.{}_proj.weight"),
        **_of_each_map("shared", "model.layers.{{i}}.mlp.shared_experts.{}_proj.weight"),
    }
)
GGUF_EXPERT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_NAMES,
        "router": "blk.{i}.ffn_gate_inp.weight",
        "router_bias": "blk.{i}.ffn_gate_inp.bias",
        "selection_bias": "blk.{i}.exp_probs_b.bias",
        **_of_each_map("shared", "blk.{{i}}.ffn_{}_shexp.weight"),
        "shared_gate": "blk.{i}.ffn_gate_inp_shexp.weight",
    }
)
GGUF_STACKS: Mapping[str, StackedTensor] = MappingProxyType(
    {f"experts.{name}": StackedTensor(f"blk.{{i}}.ffn_{name}_exps.weight") for name in MAPS}
    | {f"experts.{name}_bias": StackedTensor(f"blk.{{i}}.ffn_{name}_exps.bias") for name in MAPS}
)


def with_experts(spec: ModelSpec, experts: ExpertsSpec, sparse: Callable[[int], bool]) -> ModelSpec:
    """The spec with experts in the layers that are `sparse`."""
    layers = (
        replace(layer, feed_forward=experts) if sparse(index) else layer for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def sparse_layers(config: Fields, layers: int) -> Callable[[int], bool]:
    """Qwen's way to say which layers have experts: every so many, but for some by number."""
    named = config.values.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(i) is not int or not 0 <= i < layers for i in named):
        raise WeightError("mlp_only_layers", f"must be a list of layers below {layers}")
    every = config.integer("decoder_sparse_step", 1)
    return lambda index: index not in named and (index + 1) % every == 0


def gguf_experts(fields: Fields, normalized: bool, router: RouterSpec = SOFTMAX, hidden: int = 0) -> ExpertsSpec:
    """Experts without shared ones; `hidden`: their width where the file does not say it."""
    width = fields.integer("expert_feed_forward_length", hidden or None)
    return ExpertsSpec(
        fields.integer("expert_count", high=MAX_EXPERTS),
        fields.integer("expert_used_count"),
        FeedForwardSpec(width),
        normalized,
        router,
    )


def hf_grouped_router(config: Fields) -> RouterSpec:
    """The router of DeepSeek V3, as other families' config.json describe it."""
    return RouterSpec(
        "sigmoid",
        config.number("routed_scaling_factor", 1.0),
        selection_bias=True,
        groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1),
        group_score="two_best",
        epsilon=1e-20,
    )


def gguf_grouped(fields: Fields) -> ExpertsSpec:
    """Experts as the files of DeepSeek V3 and its kin describe them: groups, a selection bias, shared experts."""
    groups = fields.integer("expert_group_count", 1)
    router = RouterSpec(
        "softmax" if fields.integer("expert_gating_func", 2) == 1 else "sigmoid",
        fields.number("expert_weights_scale", 1.0),
        selection_bias=True,
        groups=groups,
        top_groups=fields.integer("expert_group_used_count", groups),
        group_score="two_best",
        epsilon=1e-20,
    )
    experts = gguf_experts(fields, fields.flag("expert_weights_norm", True), router)
    shared = fields.count("expert_shared_count", 0)
    return replace(experts, shared=shared_block(experts.expert, shared))


def shared_block(expert: FeedForwardSpec, count: int, gated: bool = False) -> SharedExpertSpec | None:
    """So many shared experts, which are one block of their widths together."""
    return SharedExpertSpec(replace(expert, hidden=expert.hidden * count), gated) if count else None
