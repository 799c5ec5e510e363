"""What most families share: tensor names, and the spec of a decoder in which all layers are alike.

A family starts from here and changes what is its own with `each_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import WeightError
from ...ops.contract import Pairing
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
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
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "sinks": "blk.{i}.attn_sinks.weight",
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
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "sinks": "model.layers.{i}.self_attn.sinks",
    }
)

GGUF_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
HF_IGNORED = ("*.rotary_emb.inv_freq",)


def gguf_fields(checkpoint: Checkpoint) -> Fields:
    """The metadata under the checkpoint's own architecture."""
    return Fields(checkpoint.config, f"{checkpoint.config['general.architecture']}.")


def gguf_vocab_size(checkpoint: Checkpoint) -> int:
    """Rows of the embedding; 1 where it is missing, which matching tensors will report."""
    embedding = GGUF_NAMES["embedding"]
    return checkpoint.tensors.shape(embedding)[0] if embedding in checkpoint.tensors.names() else 1


def gguf_spec(
    checkpoint: Checkpoint, family: str, *, interleaved: bool = False, eps: str = "attention.layer_norm_rms_epsilon"
) -> ModelSpec:
    """The spec of a GGUF; `interleaved` where pairs are neighbours, by nature or since the converter reordered them."""
    fields, names = gguf_fields(checkpoint), checkpoint.tensors.names()
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
        heads,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        rope,
        qkv_bias=GGUF_NAMES["q_bias"].format(i=0) in names,
        out_bias=GGUF_NAMES["out_bias"].format(i=0) in names,
    )
    layer = LayerSpec(attention, FeedForwardSpec(fields.integer("feed_forward_length")))
    return ModelSpec(
        family=family,
        vocab_size=gguf_vocab_size(checkpoint),
        hidden_size=hidden,
        context=fields.integer("context_length"),
        layers=(layer,) * fields.integer("block_count", high=1 << 12),
        norm_eps=fields.number(eps),
        tied_head=GGUF_NAMES["head"] not in names,
    )


def hf_spec(
    checkpoint: Checkpoint,
    family: str,
    *,
    theta: float = 10000.0,
    tied: bool = False,
    partial: float | None = None,
    pairing: Pairing = "half",
    eps: str = "rms_norm_eps",
    activation: str = "silu",
) -> ModelSpec:
    """The spec of a config.json; `theta`, `tied`, `partial` and `activation` are what it means by leaving them out.

    Without `partial` the family rotates whole heads, and a config that says otherwise is refused.
    """
    config = Fields(checkpoint.config)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads", high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", heads)
    whole_heads(heads, kv_heads)
    head_dim = config.integer("head_dim", max(1, hidden // heads), high=1 << 12)
    rope = hf_rope(checkpoint.config, theta=theta, partial=partial or 1.0)
    if partial is None and rope.partial != 1.0:
        raise WeightError("partial_rotary_factor", f"must be 1 in this family, not {rope.partial:g}")
    rope_spec = RopeSpec(rope.theta, even_dims(int(head_dim * rope.partial), head_dim), pairing, rope.scaling)
    bias = config.flag("attention_bias")
    attention = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope_spec, qkv_bias=bias, out_bias=bias)
    feed_forward = FeedForwardSpec(
        config.integer("intermediate_size"), config.activation("hidden_act", activation), config.flag("mlp_bias")
    )
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        context=config.integer("max_position_embeddings"),
        layers=(LayerSpec(attention, feed_forward),) * config.integer("num_hidden_layers", high=1 << 12),
        norm_eps=config.number(eps),
        tied_head=config.flag("tie_word_embeddings", tied),
    )
