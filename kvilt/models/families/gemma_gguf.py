"""Gemma 3n and Gemma 4 as GGUF files: names, and what their metadata says of single layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...kv.layout import Full, Window
from ...weights.source import Checkpoint
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    FactorScaling,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NoScaling,
    ProportionalScaling,
    RopeSpec,
    Scaling,
)
from ..stream_spec import AltUpSpec, PerLayerSpec
from .expert_fields import GGUF_STACKS, MAX_EXPERTS, gguf_experts
from .family import CheckpointDialect, StackedTensor
from .fields import Fields, even_dims, gguf_scaling, whole_heads
from .gemma import GGUF_NAMES as GEMMA_NAMES
from .plain import GGUF_IGNORED, gguf_fields, gguf_vocab_size
from .shared_kv import shared_layers

PATTERN_3N = 5
SPARSE_LAYERS, SPARSE_CUT = 10, 1.6448533535003662  # of files that do not say it: 0.95 of all numbers are below
STILL = 1e20  # a divisor that stops a pair from turning
NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GEMMA_NAMES,
        "output_scale": "blk.{i}.layer_output_scale.weight",
        "layer_embedding": "per_layer_token_embd.weight",
        "layer_inputs": "per_layer_model_proj.weight",
        "layer_inputs_norm": "per_layer_proj_norm.weight",
        "layer_gate": "blk.{i}.inp_gate.weight",
        "layer_projection": "blk.{i}.proj.weight",
        "layer_input_norm": "blk.{i}.post_norm.weight",
        "stream_spread": "altup_proj.weight",
        "stream_gather": "altup_unembd_proj.weight",
        "stream_router": "blk.{i}.altup_router.weight",
        "stream_router_norm": "blk.{i}.altup_router_norm.weight",
        "stream_predict": "blk.{i}.altup_predict_coef.weight",
        "stream_correct": "blk.{i}.altup_correct_coef.weight",
        "stream_scale": "blk.{i}.altup_correct_scale.weight",
        "laurel_left": "blk.{i}.laurel_l.weight",
        "laurel_right": "blk.{i}.laurel_r.weight",
        "laurel_norm": "blk.{i}.laurel_post_norm.weight",
        "router": "blk.{i}.ffn_gate_inp.weight",
        "router_norm": "blk.{i}.ffn_gate_inp.scale",
        "expert_factors": "blk.{i}.ffn_down_exps.scale",
        "dense_norm": "blk.{i}.post_ffw_norm_1.weight",
        "experts_norm": "blk.{i}.pre_ffw_norm_2.weight",
        "experts_out_norm": "blk.{i}.post_ffw_norm_2.weight",
    }
)
_BOTH = "blk.{i}.ffn_gate_up_exps.weight"
# Gate and up of all experts are one tensor, or two.
TOGETHER = MappingProxyType(
    {
        "experts.gate": StackedTensor(_BOTH, 0, 2),
        "experts.up": StackedTensor(_BOTH, 1, 2),
        "experts.down": GGUF_STACKS["experts.down"],
    }
)
APART = MappingProxyType({name: stack for name, stack in GGUF_STACKS.items() if not name.endswith("_bias")})
# Keys and values of layers that read those of others may be there.
IGNORED = (*GGUF_IGNORED, "*.attn_k.weight", "*.attn_v.weight", "*.attn_k_norm.weight")


def gemma3n(checkpoint: Checkpoint) -> ModelSpec:
    fields = gguf_fields(checkpoint)
    layers = fields.integer("block_count", high=1 << 12)
    kinds, cuts = _kinds(fields, layers), _cuts(fields, layers)
    head_dim = fields.integer("attention.key_length", 256, high=1 << 12)
    ropes = {
        "full_attention": _rope(
            fields, "rope.freq_base", 1e6, head_dim, gguf_scaling(checkpoint, fields, head_dim // 2)
        ),
        "sliding_attention": _rope(fields, "rope.freq_base_swa", 1e4, head_dim),
    }
    streams = fields.integer("altup.num_inputs", 4, high=64)
    return _model(
        checkpoint,
        "gemma3n",
        [_attention(fields, i, kind, ropes[kind]) for i, kind in enumerate(kinds)],
        kinds,
        cuts,
        PerLayerSpec(fields.integer("embedding_length_per_layer_input", 256), _rows(checkpoint)),
        AltUpSpec(streams, fields.count("altup.active_idx", 0, high=63), _laurel_rank(checkpoint)),
    )


def gemma4_dialect(when: str, stacks: Mapping[str, StackedTensor]) -> CheckpointDialect:
    """Of files that have the tensor `when`."""
    return CheckpointDialect("gguf", ("gemma4",), gemma4, NAMES, IGNORED, stacks=stacks, when=when)


def gemma4(checkpoint: Checkpoint) -> ModelSpec:
    fields, names = gguf_fields(checkpoint), checkpoint.tensors.names()
    layers = fields.integer("block_count", high=1 << 12)
    kinds = _kinds(fields, layers)
    wide = fields.integer("attention.key_length", high=1 << 12)
    narrow = fields.integer("attention.key_length_swa", wide, high=1 << 12)
    ropes = {
        "full_attention": _rope(fields, "rope.freq_base", 1e6, wide, _proportional(checkpoint, fields, wide)),
        "sliding_attention": _rope(fields, "rope.freq_base_swa", 1e4, narrow),
    }
    if fields.integer("rope.dimension_count_swa", narrow) != narrow:
        raise Unsupported("Gemma 4 whose windowed layers turn a part of each head is not supported")
    width = fields.count("embedding_length_per_layer_input", 0, high=1 << 16)
    each = []
    for i, kind in enumerate(kinds):
        joined = kind == "full_attention" and NAMES["v"].format(i=i) not in names
        each.append(_attention(fields, i, kind, ropes[kind], joined))
    per_layer = PerLayerSpec(width, _rows(checkpoint)) if width else None
    spec = _model(checkpoint, "gemma4", each, kinds, [None] * layers, per_layer, None)
    if not fields.count("expert_count", 0, high=MAX_EXPERTS):
        return spec
    experts = gguf_experts(fields, normalized=True)
    experts = replace(experts, expert=replace(experts.expert, activation="gelu_tanh"))
    return replace(spec, layers=tuple(_with_experts(layer, experts) for layer in spec.layers))


def _with_experts(layer: LayerSpec, experts: ExpertsSpec) -> LayerSpec:
    """The experts beside the layer's dense block."""
    assert isinstance(layer.feed_forward, FeedForwardSpec)
    return replace(layer, feed_forward=replace(experts, dense=layer.feed_forward))


def _model(
    checkpoint: Checkpoint,
    family: str,
    attentions: Sequence[AttentionSpec],
    kinds: Sequence[str],
    cuts: Sequence[float | None],
    per_layer: PerLayerSpec | None,
    altup: AltUpSpec | None,
) -> ModelSpec:
    fields, names, layers = gguf_fields(checkpoint), checkpoint.tensors.names(), len(kinds)
    hidden, name = fields.integer("embedding_length"), "attention.shared_kv_layers"
    shared = shared_layers(kinds, fields.count(name, 0), fields.prefix + name)
    each = [
        LayerSpec(
            _sharing(attention, source),
            FeedForwardSpec(_of_layer(fields, "feed_forward_length", i, layers), "gelu_tanh", sparse_cut=cuts[i]),
            post_norms=True,
            output_scale=NAMES["output_scale"].format(i=i) in names,
        )
        for i, (attention, source) in enumerate(zip(attentions, shared, strict=True))
    ]
    return ModelSpec(
        family=family,
        vocab_size=gguf_vocab_size(checkpoint),
        hidden_size=hidden,
        context=fields.integer("context_length"),
        layers=tuple(each),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_head=NAMES["head"] not in names,
        embed_scale=hidden**0.5,
        final_soft_cap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
        per_layer=per_layer,
        altup=altup,
    )


def _sharing(attention: AttentionSpec, source: int | None) -> AttentionSpec:
    return attention if source is None else replace(attention, shared_with=source, values_are_keys=False)


def _attention(fields: Fields, index: int, kind: str, rope: RopeSpec, joined: bool = False) -> AttentionSpec:
    """Of one layer; `joined`: its values are its keys."""
    layers = fields.integer("block_count", high=1 << 12)
    heads = fields.integer("attention.head_count", high=1 << 12)
    kv_heads = _of_layer(fields, "attention.head_count_kv", index, layers)
    whole_heads(heads, kv_heads)
    reach = Full() if kind == "full_attention" else Window(fields.integer("attention.sliding_window"))
    return AttentionSpec(
        heads, kv_heads, rope.dims, 1.0, rope, reach, qk_norm=True, v_norm=True, values_are_keys=joined
    )


def _rope(fields: Fields, base: str, theta: float, head_dim: int, scaling: Scaling | None = None) -> RopeSpec:
    return RopeSpec(fields.number(base, theta), even_dims(head_dim, head_dim), scaling=scaling or NoScaling())


def _proportional(checkpoint: Checkpoint, fields: Fields, head_dim: int) -> Scaling:
    """Files stop pairs by huge divisors; the first ones turn."""
    scaling = gguf_scaling(checkpoint, fields, head_dim // 2)
    if not isinstance(scaling, FactorScaling):
        return scaling
    turning = sum(one < STILL for one in scaling.factors)
    if set(scaling.factors[:turning]) <= {1.0} and all(one >= STILL for one in scaling.factors[turning:]):
        return ProportionalScaling(turning)
    return scaling


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """What each layer attends to."""
    name = fields.prefix + "attention.sliding_window_pattern"
    windows = fields.values.get(name)
    if windows is None and fields.prefix == "gemma3n.":
        windows = [bool((i + 1) % PATTERN_3N) for i in range(layers)]
    if not isinstance(windows, list) or len(windows) != layers or any(type(one) is not bool for one in windows):
        raise WeightError(name, f"must say of each of {layers} layers whether it has a window")
    return tuple("sliding_attention" if one else "full_attention" for one in windows)


def _cuts(fields: Fields, layers: int) -> list[float | None]:
    """The deviations above the mean that sparse activations begin at; minus infinity in a file: all of them pass."""
    name = "activation_sparsity_scale"
    found = fields.values.get(fields.prefix + name)
    if found is None:
        return [SPARSE_CUT if i < SPARSE_LAYERS else None for i in range(layers)]
    if not isinstance(found, list) or len(found) != layers or any(type(one) is not float for one in found):
        raise WeightError(fields.prefix + name, f"must be a number for each of {layers} layers")
    if any(one != one or one == math.inf for one in found):
        raise WeightError(fields.prefix + name, "must be numbers that some activations are above")
    return [None if one == -math.inf else one for one in found]


def _of_layer(fields: Fields, name: str, index: int, layers: int) -> int:
    """A size that a file gives for all layers, or for each of them."""
    found = fields.values.get(fields.prefix + name)
    if not isinstance(found, list):
        return fields.integer(name)
    if len(found) != layers:
        raise WeightError(fields.prefix + name, f"must be one number, or one for each of {layers} layers")
    return Fields({name: found[index]}).integer(name)


def _rows(checkpoint: Checkpoint) -> int:
    """Ids that have inputs of layers; 1 where there is no table, which matching tensors will report."""
    name = NAMES["layer_embedding"]
    return checkpoint.tensors.shape(name)[0] if name in checkpoint.tensors.names() else 1


def _laurel_rank(checkpoint: Checkpoint) -> int:
    name = NAMES["laurel_left"].format(i=0)
    return checkpoint.tensors.shape(name)[0] if name in checkpoint.tensors.names() else 1
