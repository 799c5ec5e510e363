"""Qwen3-Next: gated delta nets with full attention between them, whose heads have an output gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...ops.contract import FoldHeads
from ...weights.source import Checkpoint
from ..recurrent_spec import GatedDeltaSpec
from ..spec import ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, SharedExpertSpec, each_attention
from . import gguf_hybrid
from .expert_fields import GGUF_STACKS, MAX_EXPERTS, sparse_layers, with_experts
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec
from .qwen2_moe import HF_NAMES as EXPERT_NAMES

NAMES = MappingProxyType(
    {
        **EXPERT_NAMES,
        "q_and_gate": "model.layers.{i}.self_attn.q_proj.weight",
        "in_qkvz": "model.layers.{i}.linear_attn.in_proj_qkvz.weight",
        "in_ba": "model.layers.{i}.linear_attn.in_proj_ba.weight",
        "conv": "model.layers.{i}.linear_attn.conv1d.weight",
        "dt_bias": "model.layers.{i}.linear_attn.dt_bias",
        "a_log": "model.layers.{i}.linear_attn.A_log",
        "memory_norm": "model.layers.{i}.linear_attn.norm.weight",
        "memory_out": "model.layers.{i}.linear_attn.out_proj.weight",
    }
)


def delta_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers are gated delta nets."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        every = config.integer("full_attention_interval", 4)
        return [bool((i + 1) % every) for i in range(layers)]
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise WeightError("layer_types", f"must name the kind of each of {layers} layers, {' or '.join(known)}")
    return [kind == "linear_attention" for kind in kinds]


def gated_delta_spec(config: Fields) -> GatedDeltaSpec:
    """The gated delta nets of a config.json."""
    heads = FoldHeads(
        config.integer("linear_num_key_heads", high=1 << 12),
        config.integer("linear_num_value_heads", high=1 << 12),
        config.integer("linear_key_head_dim", high=1 << 12),
        config.integer("linear_value_head_dim", high=1 << 12),
    )
    return GatedDeltaSpec(heads, config.integer("linear_conv_kernel_dim", high=64))


def hybrid_spec(spec: ModelSpec, config: Fields) -> ModelSpec:
    """The spec with gated delta nets in their layers, and gated attention in the others."""
    if config.values.get("hidden_act", "silu") != "silu":
        raise Unsupported("gated delta nets with another activation than silu are not supported")
    return _with_delta(spec, gated_delta_spec(config), delta_layers(config, len(spec.layers)))


def _with_delta(spec: ModelSpec, delta: GatedDeltaSpec, kinds: Sequence[bool]) -> ModelSpec:
    layers = [
        replace(layer, recurrent=delta) if is_delta else layer
        for layer, is_delta in zip(spec.layers, kinds, strict=True)
    ]
    gated = replace(spec, layers=tuple(layers))
    return each_attention(gated, lambda _layer, a: replace(a, qk_norm=True, output_gate=True))


def gguf_hybrid_spec(checkpoint: Checkpoint, family: str, tiled: bool = False) -> ModelSpec:
    """The same of a GGUF, without the layers behind the last one that predict further tokens, and without experts."""
    fields = gguf_fields(checkpoint)
    # Files of models with experts in every layer may leave out how wide a dense one would be.
    width, experts = (fields.prefix + name for name in ("feed_forward_length", "expert_feed_forward_length"))
    config = {width: checkpoint.config.get(experts), **checkpoint.config}
    spec = gguf_spec(replace(checkpoint, config=config), family)
    layers = spec.layers[: len(spec.layers) - fields.count("nextn_predict_layers", 0)]
    delta, kinds = gguf_hybrid.gated_delta(fields, tiled), gguf_hybrid.delta_layers(fields, len(layers))
    return _with_delta(replace(spec, layers=layers), delta, kinds)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    experts = gguf_hybrid.gated_experts(gguf_fields(checkpoint))
    return with_experts(gguf_hybrid_spec(checkpoint, "qwen3_next"), experts, lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    spec = hybrid_spec(hf_spec(checkpoint, "qwen3_next", partial=0.25), config)
    return with_experts(spec, hybrid_experts(config), sparse_layers(config, len(spec.layers)))


def hybrid_experts(config: Fields) -> ExpertsSpec:
    """Experts of a config.json beside a shared one behind a sigmoid."""
    expert = FeedForwardSpec(config.integer("moe_intermediate_size", 512))
    shared = FeedForwardSpec(config.integer("shared_expert_intermediate_size", 512))
    return ExpertsSpec(
        config.integer("num_experts", 512, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 10),
        expert,
        config.flag("norm_topk_prob", True),
        shared=SharedExpertSpec(shared, gated=True),
    )


def qkvz_order(layer: LayerSpec) -> Sequence[int]:
    """Checkpoints have queries, keys, values and gates of each key head together."""
    assert isinstance(layer.recurrent, GatedDeltaSpec)
    heads = layer.recurrent.heads
    values = heads.value_heads // heads.key_heads * heads.value_dim
    return _by_head(heads.key_heads, (heads.key_dim, heads.key_dim, values, values))


def ba_order(layer: LayerSpec) -> Sequence[int]:
    """The same for what scales updates and what forgets."""
    assert isinstance(layer.recurrent, GatedDeltaSpec)
    heads = layer.recurrent.heads
    return _by_head(heads.key_heads, (heads.value_heads // heads.key_heads,) * 2)


def q_gate_order(layer: LayerSpec) -> Sequence[int]:
    """Checkpoints have the query and the gate of each head together."""
    return _by_head(layer.attention.heads, (layer.attention.head_dim,) * 2)


def _by_head(heads: int, parts: Sequence[int]) -> list[int]:
    """Rows that lie head by head, in the order of their parts."""
    order, at = [], 0
    for size in parts:
        order += [head * sum(parts) + at + i for head in range(heads) for i in range(size)]
        at += size
    return order


FUSED = MappingProxyType({"q_and_gate": ("q", "q_gate"), "in_qkvz": ("qkv", "z"), "in_ba": ("b", "a")})
ORDERS = MappingProxyType({"q_and_gate": q_gate_order, "in_qkvz": qkvz_order, "in_ba": ba_order})


def gguf_dialect(
    architecture: str,
    spec: Callable[[Checkpoint], ModelSpec],
    fused: Sequence[str],
    stacks: Mapping[str, StackedTensor] = GGUF_STACKS,
    when: str = "",
) -> CheckpointDialect:
    """A GGUF architecture with these fused tensors; `when`: the tensor that other files of it do not have."""
    return CheckpointDialect(
        "gguf",
        (architecture,),
        spec,
        gguf_hybrid.DELTA_NAMES,
        GGUF_IGNORED,
        {whole: FUSED[whole] for whole in fused},
        {whole: ORDERS[whole] for whole in fused},
        stacks,
        extra_layers=True,
        when=when,
        transforms=gguf_hybrid.TRANSFORMS,
    )


QWEN3_NEXT = Family(
    "qwen3_next",
    (
        gguf_dialect("qwen3next", from_gguf, tuple(FUSED), when="blk.0.ssm_in.weight"),
        gguf_dialect("qwen3next", from_gguf, ("q_and_gate", "in_ba"), *gguf_hybrid.JOINED),
        gguf_dialect("qwen3next", from_gguf, ("q_and_gate", "in_ba")),
        CheckpointDialect(
            "hf",
            ("Qwen3NextForCausalLM",),
            from_hf,
            NAMES,
            (*HF_IGNORED, "mtp.*"),
            FUSED,
            row_orders=ORDERS,
            norm_shift=1.0,
        ),
    ),
)
