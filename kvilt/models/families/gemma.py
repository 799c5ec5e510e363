"""Gemma 3 (text): windowed and global layers with a rope each, QK-norm, norms around both blocks, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import WeightError
from ...kv.layout import Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from .family import Dialect, Family
from .fields import Fields, gguf_scaling, hf_rope, whole_heads
from .llama import GGUF_IGNORED, HF_IGNORED
from .llama import GGUF_NAMES as LLAMA_GGUF_NAMES
from .llama import HF_NAMES as LLAMA_HF_NAMES

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_GGUF_NAMES,
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "post_attention_norm": "blk.{i}.post_attention_norm.weight",
        "post_feed_forward_norm": "blk.{i}.post_ffw_norm.weight",
    }
)

HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_HF_NAMES,
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "feed_forward_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_feed_forward_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)

LOCAL_THETA = 10000.0
PATTERN = 6  # every sixth layer is global
LAYERS_OF_27B = 62  # the one size that scales queries by hidden / heads; GGUF files do not say so themselves


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields = Fields(checkpoint.config, "gemma3.")
    names = checkpoint.tensors.names()
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count", high=1 << 12)
    kv_heads = fields.integer("attention.head_count_kv")
    whole_heads(heads, kv_heads)
    head_dim = fields.integer("attention.key_length", 256, high=1 << 12)
    layers = fields.integer("block_count", high=1 << 12)
    scaling = gguf_scaling(checkpoint, fields, head_dim // 2)
    attention = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        (hidden / heads if layers == LAYERS_OF_27B else head_dim) ** -0.5,
        RopeSpec(fields.number("rope.freq_base", 1000000.0), head_dim, scaling=scaling),
        qk_norm=True,
    )
    local = RopeSpec(fields.number("rope.freq_base_swa", LOCAL_THETA), head_dim)
    pattern = fields.integer("attention.sliding_window_pattern", PATTERN)
    kinds = tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))
    return ModelSpec(
        family="gemma",
        vocab_size=checkpoint.tensors.shape("token_embd.weight")[0] if "token_embd.weight" in names else 1,
        hidden_size=hidden,
        context=fields.integer("context_length"),
        layers=_layers(
            kinds, attention, local, fields.integer("attention.sliding_window"), fields.integer("feed_forward_length")
        ),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in names,
        embed_scale=hidden**0.5,
    )


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    heads, kv_heads = config.integer("num_attention_heads", high=1 << 12), config.integer("num_key_value_heads")
    whole_heads(heads, kv_heads)
    head_dim = config.integer("head_dim", 256, high=1 << 12)
    wide = hf_rope(checkpoint.config, "full_attention", 1000000.0)
    attention = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        RopeSpec(wide.theta, head_dim, scaling=wide.scaling),
        qk_norm=True,
    )
    hidden = config.integer("hidden_size")
    return ModelSpec(
        family="gemma",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        context=config.integer("max_position_embeddings"),
        layers=_layers(
            _kinds(config),
            attention,
            _local_rope(checkpoint, config, head_dim),
            config.integer("sliding_window"),
            config.integer("intermediate_size"),
        ),
        norm_eps=config.number("rms_norm_eps"),
        tied_head=config.flag("tie_word_embeddings", True),
        embed_scale=hidden**0.5,
        final_soft_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else 0.0,
    )


def _local_rope(checkpoint: Checkpoint, config: Fields, head_dim: int) -> RopeSpec:
    if not config.has("rope_parameters"):
        return RopeSpec(config.number("rope_local_base_freq", LOCAL_THETA), head_dim)
    local = hf_rope(checkpoint.config, "sliding_attention", LOCAL_THETA)
    return RopeSpec(local.theta, head_dim, scaling=local.scaling)


def _kinds(config: Fields) -> tuple[str, ...]:
    layers = config.integer("num_hidden_layers", high=1 << 12)
    kinds = config.values.get("layer_types")
    if kinds is None:
        pattern = config.integer("sliding_window_pattern", PATTERN)
        return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise WeightError("layer_types", f"must name the kind of each of the {layers} layers")
    return tuple(str(kind) for kind in kinds)


def _layers(
    kinds: tuple[str, ...], wide: AttentionSpec, local: RopeSpec, window: int, hidden: int
) -> tuple[LayerSpec, ...]:
    narrow = replace(wide, rope=local, reach=Window(window))
    table = {"sliding_attention": narrow, "full_attention": wide}
    if unknown := [kind for kind in kinds if kind not in table]:
        raise WeightError("layer_types", f"{unknown[0]!r} is not a kind of layer; there are {', '.join(table)}")
    feed_forward = FeedForwardSpec(hidden, "gelu_tanh")
    return tuple(LayerSpec(table[kind], feed_forward, post_norms=True) for kind in kinds)


GEMMA = Family(
    "gemma",
    (
        Dialect("gguf", ("gemma3",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        Dialect("hf", ("Gemma3ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED, norm_shift=1.0),
    ),
)
