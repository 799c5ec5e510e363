"""Llama and what is built like it: Llama 2 and 3, SmolLM2, Mistral with its sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
from .family import Dialect, Family
from .fields import Fields, even_dims, gguf_scaling, hf_rope, whole_heads

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "token_embd.weight",
        "norm": "output_norm.weight",
        "head": "output.weight",
        "attention_norm": "blk.{i}.attn_norm.weight",
        "q": "blk.{i}.attn_q.weight",
        "k": "blk.{i}.attn_k.weight",
        "v": "blk.{i}.attn_v.weight",
        "out": "blk.{i}.attn_output.weight",
        "q_bias": "blk.{i}.attn_q.bias",
        "k_bias": "blk.{i}.attn_k.bias",
        "v_bias": "blk.{i}.attn_v.bias",
        "out_bias": "blk.{i}.attn_output.bias",
        "feed_forward_norm": "blk.{i}.ffn_norm.weight",
        "gate": "blk.{i}.ffn_gate.weight",
        "up": "blk.{i}.ffn_up.weight",
        "down": "blk.{i}.ffn_down.weight",
    }
)

HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attention_norm": "model.layers.{i}.input_layernorm.weight",
        "q": "model.layers.{i}.self_attn.q_proj.weight",
        "k": "model.layers.{i}.self_attn.k_proj.weight",
        "v": "model.layers.{i}.self_attn.v_proj.weight",
        "out": "model.layers.{i}.self_attn.o_proj.weight",
        "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
        "out_bias": "model.layers.{i}.self_attn.o_proj.bias",
        "feed_forward_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate": "model.layers.{i}.mlp.gate_proj.weight",
        "up": "model.layers.{i}.mlp.up_proj.weight",
        "down": "model.layers.{i}.mlp.down_proj.weight",
        "gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
        "up_bias": "model.layers.{i}.mlp.up_proj.bias",
        "down_bias": "model.layers.{i}.mlp.down_proj.bias",
    }
)

GGUF_IGNORED = ("rope_freqs.weight",)
HF_IGNORED = ("*.rotary_emb.inv_freq",)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    # llama.cpp's converter reorders q and k of this architecture for interleaved pairs.
    return gguf_spec(checkpoint, "llama", qkv_bias="blk.0.attn_q.bias" in checkpoint.tensors.names(), interleaved=True)


def gguf_spec(checkpoint: Checkpoint, family: str, *, qkv_bias: bool, interleaved: bool) -> ModelSpec:
    """The spec of a GGUF whose layers are all alike."""
    config = checkpoint.config
    fields = Fields(config, f"{config['general.architecture']}.")
    names = checkpoint.tensors.names()
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count", high=1 << 12)
    kv_heads = fields.integer("attention.head_count_kv", heads)
    whole_heads(heads, kv_heads)
    head_dim = fields.integer("attention.key_length", max(1, hidden // heads), high=1 << 12)
    dims = even_dims(fields.integer("rope.dimension_count", head_dim), head_dim)
    rope = RopeSpec(
        fields.number("rope.freq_base", 10000.0),
        dims,
        "interleaved" if interleaved else "half",
        gguf_scaling(checkpoint, fields, dims // 2),
    )
    attention = AttentionSpec(
        heads, kv_heads, head_dim, head_dim**-0.5, rope, qkv_bias=qkv_bias, out_bias="blk.0.attn_output.bias" in names
    )
    layer = LayerSpec(attention, FeedForwardSpec(fields.integer("feed_forward_length")))
    return ModelSpec(
        family=family,
        vocab_size=checkpoint.tensors.shape("token_embd.weight")[0] if "token_embd.weight" in names else 1,
        hidden_size=hidden,
        context=fields.integer("context_length"),
        layers=(layer,) * fields.integer("block_count", high=1 << 12),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in names,
    )


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    bias = config.flag("attention_bias")
    reach: Reach = Window(config.integer("sliding_window")) if config.has("sliding_window") else Full()
    layers = config.integer("num_hidden_layers", high=1 << 12)
    return hf_spec(checkpoint, "llama", (reach,) * layers, qkv_bias=bias, out_bias=bias)


def hf_spec(
    checkpoint: Checkpoint, family: str, reaches: tuple[Reach, ...], *, qkv_bias: bool, out_bias: bool
) -> ModelSpec:
    """The spec of a config.json whose layers differ at most in their reach."""
    config = Fields(checkpoint.config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads", high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", heads)
    whole_heads(heads, kv_heads)
    head_dim = config.integer("head_dim", max(1, hidden // heads), high=1 << 12)
    rope = hf_rope(checkpoint.config)
    rope_spec = RopeSpec(rope.theta, even_dims(int(head_dim * rope.partial), head_dim), "half", rope.scaling)
    feed_forward = FeedForwardSpec(
        config.integer("intermediate_size"), config.activation("hidden_act", "silu"), config.flag("mlp_bias")
    )
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        context=config.integer("max_position_embeddings"),
        layers=tuple(
            LayerSpec(
                AttentionSpec(
                    heads, kv_heads, head_dim, head_dim**-0.5, rope_spec, reach, qkv_bias=qkv_bias, out_bias=out_bias
                ),
                feed_forward,
            )
            for reach in reaches
        ),
        norm_eps=config.number("rms_norm_eps"),
        tied_head=config.flag("tie_word_embeddings"),
    )


LLAMA = Family(
    "llama",
    (
        Dialect("gguf", ("llama",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        Dialect("hf", ("LlamaForCausalLM", "MistralForCausalLM"), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
