"""Granite 4 hybrid: Mamba-2 with attention between, Granite's multipliers, and experts beside a shared block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...ops.contract import FoldHeads
from ...weights.source import Checkpoint
from ..recurrent_spec import Mamba2Spec
from ..spec import ExpertsSpec, FeedForwardSpec, ModelSpec, NoRope, SharedExpertSpec, each_attention
from . import granite
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, MAX_EXPERTS
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields
from .gguf_hybrid import STATE_NAMES, TRANSFORMS, attention_layers, mamba2
from .plain import GGUF_IGNORED, HF_IGNORED, HF_NAMES, gguf_fields

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
GGUF_NAMES = MappingProxyType({**GGUF_EXPERT_NAMES, **STATE_NAMES})
GGUF_FUSED = MappingProxyType({"mamba_in": FUSED["mamba_in"]})
_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    spec, mamba = granite.from_hf(checkpoint), mamba2_spec(config)
    is_mamba = _mamba_layers(config, len(spec.layers))
    spec = _hybrid(spec, _feed_forward(config), [mamba if own else None for own in is_mamba])
    return spec if config.values.get("position_embedding_type") == "rope" else _without_rope(spec)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    plain, attends = attention_layers(checkpoint)
    spec, fields, names = granite.from_gguf(plain), gguf_fields(plain), checkpoint.tensors.names()
    mamba = mamba2(fields, any(name.endswith("ssm_conv1d.bias") for name in names))
    spec = _hybrid(spec, _gguf_feed_forward(fields), [None if own else mamba for own in attends])
    return spec if fields.flag("rope.scaling.finetuned") else _without_rope(spec)


def _hybrid(spec: ModelSpec, block: FeedForwardSpec | ExpertsSpec, recurrent: Sequence[Mamba2Spec | None]) -> ModelSpec:
    layers = (
        replace(layer, feed_forward=block, recurrent=own) for layer, own in zip(spec.layers, recurrent, strict=True)
    )
    return replace(spec, family="granite_hybrid", layers=tuple(layers))


def _without_rope(spec: ModelSpec) -> ModelSpec:
    return each_attention(spec, lambda _layer, attention: replace(attention, rope=NoRope()))


def mamba2_spec(config: Fields, inner: int | None = None) -> Mamba2Spec:
    """The Mamba-2 blocks of a config.json; `inner`: their width, where it is not a multiple of the stream's."""
    if config.flag("mamba_proj_bias"):
        raise Unsupported("Mamba-2 with biases in its projections is not supported")
    if config.values.get("hidden_act", "silu") != "silu":
        raise Unsupported("Mamba-2 with another activation than silu is not supported")
    limit = config.values.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or limit[:1] != [0.0] or limit[1:] not in _NO_LIMIT):
        raise Unsupported("Mamba-2 with limits of its step size is not supported")
    heads = config.integer("mamba_n_heads", 128, high=1 << 12)
    inner = inner or config.integer("mamba_expand", 2) * config.integer("hidden_size")
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


def _gguf_feed_forward(fields: Fields) -> FeedForwardSpec | ExpertsSpec:
    width = fields.integer("feed_forward_length")
    shared = FeedForwardSpec(fields.integer("expert_shared_feed_forward_length", width))
    experts = fields.count("expert_count", 0, high=MAX_EXPERTS)
    if not experts:
        return shared
    top_k, expert = fields.integer("expert_used_count"), FeedForwardSpec(width)
    return ExpertsSpec(experts, top_k, expert, shared=SharedExpertSpec(shared))


def _mamba_layers(config: Fields, layers: int) -> list[bool]:
    kinds = config.values.get("layer_types") or config.values.get("layers_block_type") or ["mamba"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
        raise WeightError("layer_types", f"must name the kind of each of {layers} layers: {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]


GRANITE_HYBRID = Family(
    "granite_hybrid",
    (
        CheckpointDialect(
            "gguf",
            ("granitehybrid",),
            from_gguf,
            GGUF_NAMES,
            GGUF_IGNORED,
            GGUF_FUSED,
            stacks=GGUF_STACKS,
            pairs_qk=True,
            transforms=TRANSFORMS,
        ),
        CheckpointDialect("hf", ("GraniteMoeHybridForCausalLM",), from_hf, NAMES, HF_IGNORED, FUSED, stacks=STACKS),
    ),
)
