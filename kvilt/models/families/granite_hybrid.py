"""Granite 4 hybrid: Mamba-2 with attention between, Granite's multipliers, and experts beside a shared block."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...ops.contract import FoldHeads
from ...weights.source import Checkpoint
from ..recurrent_spec import Mamba2Spec
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, NoRope, SharedExpertSpec, each_attention
from . import granite
from .expert_fields import MAX_EXPERTS
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields
from .plain import HF_IGNORED, HF_NAMES

_EXPERTS = "model.layers.{i}.block_sparse_moe"
NAMES = MappingProxyType(
    {
        **HF_NAMES,
        "gate_up": "model.layers.{i}.shared_mlp.input_linear.weight",
        "down": "model.layers.{i}.shared_mlp.output_linear.weight",
        "shared_gate_up": "model.layers.{i}.shared_mlp.input_linear.weight",
        "shared.down": "model.layers.{i}.shared_mlp.output_linear.weight",
        "router": f"{_EXPERTS}.router.layer.weight",
        "mamba_in": "model.layers.{i}.mamba.in_proj.weight",
        "conv": "model.layers.{i}.mamba.conv1d.weight",
        "conv_bias": "model.layers.{i}.mamba.conv1d.bias",
        "dt_bias": "model.layers.{i}.mamba.dt_bias",
        "a_log": "model.layers.{i}.mamba.A_log",
        "skip": "model.layers.{i}.mamba.D",
        "memory_norm": "model.layers.{i}.mamba.norm.weight",
        "memory_out": "model.layers.{i}.mamba.out_proj.weight",
    }
)
FUSED = MappingProxyType(
    {
        "gate_up": ("gate", "up"),
        "shared_gate_up": ("shared.gate", "shared.up"),
        "mamba_in": ("z", "qkv", "a"),
    }
)
STACKS = MappingProxyType(
    {
        "experts.gate": StackedTensor(f"{_EXPERTS}.input_linear.weight", 0, 2),
        "experts.up": StackedTensor(f"{_EXPERTS}.input_linear.weight", 1, 2),
        "experts.down": StackedTensor(f"{_EXPERTS}.output_linear.weight"),
    }
)
_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    spec, mamba = replace(granite.from_hf(checkpoint), family="granite_hybrid"), mamba2_spec(config)
    block, is_mamba = _feed_forward(config), _mamba_layers(config, len(spec.layers))
    layers = (
        replace(layer, feed_forward=block, recurrent=mamba if own else None)
        for layer, own in zip(spec.layers, is_mamba, strict=True)
    )
    spec = replace(spec, layers=tuple(layers))
    if config.values.get("position_embedding_type") == "rope":
        return spec
    return each_attention(spec, lambda _layer, attention: replace(attention, rope=NoRope()))


def mamba2_spec(config: Fields) -> Mamba2Spec:
    """The Mamba-2 blocks of a config.json."""
    if config.flag("mamba_proj_bias"):
        raise Unsupported("Mamba-2 with biases in its projections is not supported")
    if config.values.get("hidden_act", "silu") != "silu":
        raise Unsupported("Mamba-2 with another activation than silu is not supported")
    limit = config.values.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or limit[:1] != [0.0] or limit[1:] not in _NO_LIMIT):
        raise Unsupported("Mamba-2 with limits of its step size is not supported")
    heads, expand = config.integer("mamba_n_heads", 128, high=1 << 12), config.integer("mamba_expand", 2)
    inner = expand * config.integer("hidden_size")
    given = config.values.get("mamba_d_head", "auto")
    dim = inner // heads if given == "auto" else config.integer("mamba_d_head", high=1 << 12)
    if dim * heads != inner:
        raise WeightError("mamba_n_heads", f"{heads} heads of {dim} do not make up the inner size {inner}")
    groups, state = config.integer("mamba_n_groups", 1), config.integer("mamba_d_state", 256, high=1 << 12)
    width = config.integer("mamba_d_conv", 4, high=64)
    return Mamba2Spec(FoldHeads(groups, heads, state, dim), width, config.flag("mamba_conv_bias", True))


_NO_LIMIT = ([float("inf")], [{"__float__": "Infinity"}])


def _feed_forward(config: Fields) -> FeedForwardSpec | ExpertsSpec:
    activation = config.activation("hidden_act", "silu")
    shared = FeedForwardSpec(config.integer("shared_intermediate_size", 1024), activation)
    if config.values.get("num_local_experts") == 0:
        return shared
    return ExpertsSpec(
        config.integer("num_local_experts", 8, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 2),
        FeedForwardSpec(config.integer("intermediate_size"), activation),
        shared=SharedExpertSpec(shared),
    )


def _mamba_layers(config: Fields, layers: int) -> list[bool]:
    kinds = config.values.get("layer_types") or config.values.get("layers_block_type") or ["mamba"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise WeightError("layer_types", f"must name the kind of each of {layers} layers: {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]


GRANITE_HYBRID = Family(
    "granite_hybrid",
    (CheckpointDialect("hf", ("GraniteMoeHybridForCausalLM",), from_hf, NAMES, HF_IGNORED, FUSED, stacks=STACKS),),
)
