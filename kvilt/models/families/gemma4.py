"""Gemma 4 (text): windowed and full layers with heads of their own sizes, values that are keys, scaled layers.

E2B and E4B also have inputs of each layer's own, and layers that read the KV of others. 26B-A4B has experts beside the
dense block of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...errors import Unsupported, WeightError
from ...kv.layout import Full, Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, ProportionalScaling, RopeSpec
from ..stream_spec import PerLayerSpec
from . import gemma_gguf
from .expert_fields import MAX_EXPERTS
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields, even_dims, hf_rope, layer_kinds, whole_heads
from .gemma import HF_NAMES as GEMMA_NAMES
from .gemma3n import HF_NAMES as GEMMA3N_NAMES
from .gemma3n import OTHER_SENSES, UNUSED_KV
from .plain import HF_IGNORED
from .shared_kv import shared_layers

PATTERN = 6
DEFAULT_WINDOW = 512
GLOBAL_HEAD_DIM = 512
PER_LAYER_WIDTH = 256  # what a config means that does not say it
ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    }
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GEMMA_NAMES,
        **{ours: name for ours, name in GEMMA3N_NAMES.items() if ours.startswith("layer_")},
        "output_scale": "model.layers.{i}.layer_scalar",
        "router": "model.layers.{i}.router.proj.weight",
        "router_norm": "model.layers.{i}.router.scale",
        "expert_factors": "model.layers.{i}.router.per_expert_scale",
        "dense_norm": "model.layers.{i}.post_feedforward_layernorm_1.weight",
        "experts_norm": "model.layers.{i}.pre_feedforward_layernorm_2.weight",
        "experts_out_norm": "model.layers.{i}.post_feedforward_layernorm_2.weight",
    }
)
NESTED_NAMES: Mapping[str, str] = MappingProxyType(
    {ours: name.replace("model.", "model.language_model.", 1) for ours, name in HF_NAMES.items()}
)


def _stacks(layers: str) -> Mapping[str, StackedTensor]:
    both = f"{layers}.{{i}}.experts.gate_up_proj"
    opening = {f"experts.{name}": StackedTensor(both, share, 2) for share, name in enumerate(("gate", "up"))}
    return MappingProxyType(opening | {"experts.down": StackedTensor(f"{layers}.{{i}}.experts.down_proj")})


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    _refuse(config)
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers", high=1 << 12)
    kinds = list(layer_kinds(config, layers) or _alternating(layers))
    kinds[-1] = "full_attention"  # whatever the config says, as in transformers
    shared = shared_layers(kinds, config.count("num_kv_shared_layers", 0), "num_kv_shared_layers")
    each = (
        LayerSpec(
            replace(_attention(checkpoint, config, index, kind), shared_with=shared[index]),
            _block(config, shared[index] is not None),
            post_norms=True,
            output_scale=True,
        )
        for index, kind in enumerate(kinds)
    )
    return ModelSpec(
        family="gemma4",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        context=config.integer("max_position_embeddings"),
        layers=tuple(each),
        norm_eps=config.number("rms_norm_eps"),
        tied_head=config.flag("tie_word_embeddings", True),
        embed_scale=hidden**0.5,
        final_soft_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
        per_layer=_per_layer(config),
    )


def _block(config: Fields, shared: bool) -> FeedForwardSpec | ExpertsSpec:
    wide = 2 if shared and config.flag("use_double_wide_mlp") else 1
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    dense = FeedForwardSpec(wide * config.integer("intermediate_size"), activation)
    if not config.flag("enable_moe_block"):
        return dense
    expert = FeedForwardSpec(config.integer("moe_intermediate_size"), activation)
    experts = config.integer("num_experts", high=MAX_EXPERTS)
    return ExpertsSpec(experts, config.integer("top_k_experts"), expert, dense=dense)


def _per_layer(config: Fields) -> PerLayerSpec | None:
    width = config.count("hidden_size_per_layer_input", PER_LAYER_WIDTH, high=1 << 16)
    return PerLayerSpec(width, config.integer("vocab_size_per_layer_input", 262144)) if width else None


def from_nested(checkpoint: Checkpoint) -> ModelSpec:
    """The text model of one that also sees and hears."""
    text = checkpoint.config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightError("text_config", "missing from the model's configuration")
    return from_hf(replace(checkpoint, config=text))


def _refuse(config: Fields) -> None:
    """What would mean other logits."""
    if config.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise Unsupported("use_bidirectional_attention is for encoders; kvilt runs causal attention")


def _attention(checkpoint: Checkpoint, config: Fields, index: int, kind: str) -> AttentionSpec:
    heads, own = config.integer("num_attention_heads", high=1 << 12), _overrides(config, index, kind)
    full, bias = kind == "full_attention", config.flag("attention_bias")
    head_dim, kv_heads = own.integer("head_dim", high=1 << 12), own.integer("num_key_value_heads")
    whole_heads(heads, kv_heads)
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))
    return AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        1.0,
        _rope(checkpoint, kind, head_dim),
        Full() if full else window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        v_norm=True,
        values_are_keys=full and config.flag("attention_k_eq_v"),
    )


def _overrides(config: Fields, index: int, kind: str) -> Fields:
    """Head size and KV heads of a layer; full layers have their own."""
    plain = {"head_dim": config.integer("head_dim", 256), "num_key_value_heads": config.integer("num_key_value_heads")}
    named = config.values.get("per_layer_config")
    if named is not None:
        if not isinstance(named, Mapping):
            raise WeightError("per_layer_config", "must map layers to what is their own")
        own = named.get(str(index), {})
        if not isinstance(own, Mapping) or not own.keys() <= plain.keys():
            raise WeightError("per_layer_config", f"layer {index} may have head_dim and num_key_value_heads")
        return Fields(plain | dict(own))
    if kind == "full_attention":
        plain["head_dim"] = config.integer("global_head_dim", GLOBAL_HEAD_DIM)
        if config.flag("attention_k_eq_v") and config.has("num_global_key_value_heads"):
            plain["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    return Fields(plain)


def _rope(checkpoint: Checkpoint, kind: str, head_dim: int) -> RopeSpec:
    ropes = checkpoint.config.get("rope_parameters") or ROPES
    own = ropes.get(kind) if isinstance(ropes, Mapping) else None
    if not isinstance(own, Mapping):
        raise WeightError("rope_parameters", f"must have a rope for {kind}")
    fields = Fields(own)
    if own.get("rope_type") != "proportional":
        rope = hf_rope({**checkpoint.config, "rope_parameters": own})
        if rope.partial != 1.0:
            raise WeightError("partial_rotary_factor", "is of proportional ropes alone")
        return RopeSpec(rope.theta, even_dims(head_dim, head_dim), scaling=rope.scaling)
    share = fields.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise WeightError("partial_rotary_factor", f"must be at most 1, not {share:g}")
    scaling = ProportionalScaling(int(share * head_dim // 2), fields.number("factor", 1.0))
    return RopeSpec(fields.number("rope_theta"), even_dims(head_dim, head_dim), scaling=scaling)


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(layers))


_NESTED, _IGNORED = ("Gemma4ForConditionalGeneration",), HF_IGNORED + UNUSED_KV
GEMMA4 = Family(
    "gemma4",
    (
        gemma_gguf.gemma4_dialect("blk.0.ffn_gate_exps.weight", gemma_gguf.APART),
        gemma_gguf.gemma4_dialect("", gemma_gguf.TOGETHER),
        CheckpointDialect("hf", ("Gemma4ForCausalLM",), from_hf, HF_NAMES, _IGNORED, stacks=_stacks("model.layers")),
        CheckpointDialect(
            "hf",
            _NESTED,
            from_nested,
            NESTED_NAMES,
            _IGNORED + OTHER_SENSES,
            stacks=_stacks("model.language_model.layers"),
        ),
    ),
)
