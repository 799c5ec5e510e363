"""Gemma 2 and 3 (text): windowed and global layers, norms around both blocks, soft-caps (2) or QK-norm (3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...kv.layout import Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields, gguf_scaling, hf_rope, layer_kinds, whole_heads
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_vocab_size
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES
from .plain import HF_NAMES as PLAIN_HF_NAMES

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_GGUF_NAMES,
        "post_attention_norm": "blk.{i}.post_attention_norm.weight",
        "post_feed_forward_norm": "blk.{i}.post_ffw_norm.weight",
    }
)

HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_HF_NAMES,
        "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "feed_forward_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_feed_forward_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)


@dataclass(frozen=True, slots=True)
class GemmaVersion:
    """What tells the generations apart."""

    pattern: int  # every so many layers one is global
    theta: float
    local_theta: float
    qk_norm: bool
    soft_caps: bool
    layers_of_27b: int  # the one size that scales queries by hidden / heads; GGUF files do not say so themselves


SECOND = GemmaVersion(2, 10000.0, 10000.0, qk_norm=False, soft_caps=True, layers_of_27b=46)
THIRD = GemmaVersion(6, 1000000.0, 10000.0, qk_norm=True, soft_caps=False, layers_of_27b=62)


def from_gguf(generation: GemmaVersion) -> Callable[[Checkpoint], ModelSpec]:
    def read(checkpoint: Checkpoint) -> ModelSpec:
        fields, names = gguf_fields(checkpoint), checkpoint.tensors.names()
        hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count", high=1 << 12)
        head_dim = fields.integer("attention.key_length", 256, high=1 << 12)
        layers = fields.integer("block_count", high=1 << 12)
        scale_by = hidden / heads if layers == generation.layers_of_27b else head_dim
        scaling = gguf_scaling(checkpoint, fields, head_dim // 2)
        wide = AttentionSpec(
            heads,
            fields.integer("attention.head_count_kv"),
            head_dim,
            scale_by**-0.5,
            RopeSpec(fields.number("rope.freq_base", generation.theta), head_dim, scaling=scaling),
            qk_norm=generation.qk_norm,
            soft_cap=_cap(fields, "attn_logit_softcapping", generation),
        )
        local = RopeSpec(fields.number("rope.freq_base_swa", generation.local_theta), head_dim)
        pattern = fields.integer("attention.sliding_window_pattern", generation.pattern)
        return ModelSpec(
            family="gemma",
            vocab_size=gguf_vocab_size(checkpoint),
            hidden_size=hidden,
            context=fields.integer("context_length"),
            layers=_layers(
                _alternating(pattern, layers),
                wide,
                replace(wide, rope=local, reach=Window(fields.integer("attention.sliding_window"))),
                fields.integer("feed_forward_length"),
            ),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            tied_head=PLAIN_GGUF_NAMES["head"] not in names,
            embed_scale=hidden**0.5,
            final_soft_cap=_cap(fields, "final_logit_softcapping", generation),
        )

    return read


def from_hf(generation: GemmaVersion) -> Callable[[Checkpoint], ModelSpec]:
    def read(checkpoint: Checkpoint) -> ModelSpec:
        config = Fields(checkpoint.config)
        head_dim = config.integer("head_dim", 256, high=1 << 12)
        rope = hf_rope(checkpoint.config, "full_attention", generation.theta)
        bias = config.flag("attention_bias")
        wide = AttentionSpec(
            config.integer("num_attention_heads", high=1 << 12),
            config.integer("num_key_value_heads"),
            head_dim,
            config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            RopeSpec(rope.theta, head_dim, scaling=rope.scaling),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=generation.qk_norm,
            soft_cap=_cap(config, "attn_logit_softcapping", generation),
        )
        local = _local_rope(checkpoint, config, head_dim, generation)
        hidden = config.integer("hidden_size")
        return ModelSpec(
            family="gemma",
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            context=config.integer("max_position_embeddings"),
            layers=_layers(
                _kinds(config, generation),
                wide,
                replace(wide, rope=local, reach=Window(config.integer("sliding_window", DEFAULT_WINDOW))),
                config.integer("intermediate_size"),
            ),
            norm_eps=config.number("rms_norm_eps"),
            tied_head=config.flag("tie_word_embeddings", True),
            embed_scale=hidden**0.5,
            final_soft_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
        )

    return read


def _cap(fields: Fields, name: str, generation: GemmaVersion) -> float:
    return fields.number(name) if generation.soft_caps and fields.has(name) else 0.0


def _local_rope(checkpoint: Checkpoint, config: Fields, head_dim: int, generation: GemmaVersion) -> RopeSpec:
    if generation is SECOND:  # one rope for all layers
        rope = hf_rope(checkpoint.config, "", generation.theta)
        return RopeSpec(rope.theta, head_dim, scaling=rope.scaling)
    if not config.has("rope_parameters"):
        return RopeSpec(config.number("rope_local_base_freq", generation.local_theta), head_dim)
    rope = hf_rope(checkpoint.config, "sliding_attention", generation.local_theta)
    return RopeSpec(rope.theta, head_dim, scaling=rope.scaling)


def _alternating(pattern: int, layers: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))


def _kinds(config: Fields, generation: GemmaVersion) -> tuple[str, ...]:
    layers = config.integer("num_hidden_layers", high=1 << 12)
    kinds = layer_kinds(config, layers)
    return kinds or _alternating(config.integer("sliding_window_pattern", generation.pattern), layers)


def _layers(kinds: tuple[str, ...], wide: AttentionSpec, narrow: AttentionSpec, hidden: int) -> tuple[LayerSpec, ...]:
    whole_heads(wide.heads, wide.kv_heads)
    table = {"sliding_attention": narrow, "full_attention": wide}
    feed_forward = FeedForwardSpec(hidden, "gelu_tanh")
    return tuple(LayerSpec(table[kind], feed_forward, post_norms=True) for kind in kinds)


GEMMA = Family(
    "gemma",
    (
        CheckpointDialect("gguf", ("gemma3",), from_gguf(THIRD), GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("gguf", ("gemma2",), from_gguf(SECOND), GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("hf", ("Gemma3ForCausalLM",), from_hf(THIRD), HF_NAMES, HF_IGNORED, norm_shift=1.0),
        CheckpointDialect("hf", ("Gemma2ForCausalLM",), from_hf(SECOND), HF_NAMES, HF_IGNORED, norm_shift=1.0),
    ),
)
