"""GPT-2: learned positions, LayerNorm with bias, a feed-forward without a gate; its matrices are stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NoRope
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import gguf_fields, gguf_vocab_size
from .starcoder2 import GGUF_EPS
from .starcoder2 import GGUF_NAMES as STARCODER_GGUF_NAMES

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **STARCODER_GGUF_NAMES,
        "position_embedding": "position_embd.weight",
        "qkv": "blk.{i}.attn_qkv.weight",
        "qkv_bias": "blk.{i}.attn_qkv.bias",
    }
)
PLAIN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "wte.weight",
        "position_embedding": "wpe.weight",
        "norm": "ln_f.weight",
        "norm_bias": "ln_f.bias",
        "head": "lm_head.weight",
        "attention_norm": "h.{i}.ln_1.weight",
        "attention_norm_bias": "h.{i}.ln_1.bias",
        "qkv": "h.{i}.attn.c_attn.weight",
        "qkv_bias": "h.{i}.attn.c_attn.bias",
        "out": "h.{i}.attn.c_proj.weight",
        "out_bias": "h.{i}.attn.c_proj.bias",
        "feed_forward_norm": "h.{i}.ln_2.weight",
        "feed_forward_norm_bias": "h.{i}.ln_2.bias",
        "up": "h.{i}.mlp.c_fc.weight",
        "up_bias": "h.{i}.mlp.c_fc.bias",
        "down": "h.{i}.mlp.c_proj.weight",
        "down_bias": "h.{i}.mlp.c_proj.bias",
    }
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {ours: name if ours == "head" else f"transformer.{name}" for ours, name in PLAIN_NAMES.items()}
)
HF_IGNORED = ("*.attn.bias", "*.attn.masked_bias")  # causal masks of older files
TRANSPOSED = frozenset({"qkv", "out", "up", "down"})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields = gguf_fields(checkpoint)
    heads, width = fields.integer("attention.head_count", high=1 << 12), fields.integer("embedding_length")
    head_dim = max(1, width // heads)
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, NoRope(), qkv_bias=True, out_bias=True)
    block = FeedForwardSpec(fields.integer("feed_forward_length"), "gelu_tanh", bias=True, gated=False)
    layers = (LayerSpec(attention, block),) * fields.integer("block_count", high=1 << 12)
    tied = GGUF_NAMES["head"] not in checkpoint.tensors.names()
    sizes = (gguf_vocab_size(checkpoint), width, fields.integer("context_length"))
    return _gpt2(sizes, layers, fields.number(GGUF_EPS), tied)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    if config.flag("add_cross_attention"):
        raise Unsupported("GPT-2 with add_cross_attention is not supported: kvilt runs decoders alone")
    width, heads = config.integer("n_embd"), config.integer("n_head", high=1 << 12)
    head_dim = max(1, width // heads)
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    inner = config.integer("n_inner", 4 * width)
    block = FeedForwardSpec(inner, config.activation("activation_function", "gelu_new"), bias=True, gated=False)
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")

    def layer(index: int) -> LayerSpec:
        own = scale / (index + 1) if by_layer else scale
        return LayerSpec(AttentionSpec(heads, heads, head_dim, own, NoRope(), qkv_bias=True, out_bias=True), block)

    layers = tuple(layer(i) for i in range(config.integer("n_layer", high=1 << 12)))
    sizes = (config.integer("vocab_size"), width, config.integer("n_positions"))
    eps = config.number("layer_norm_epsilon", 1e-5)
    return _gpt2(sizes, layers, eps, config.flag("tie_word_embeddings", True))


def _gpt2(sizes: tuple[int, int, int], layers: tuple[LayerSpec, ...], eps: float, tied: bool) -> ModelSpec:
    spec = ModelSpec("gpt2", *sizes, layers, eps, tied)
    return replace(spec, norm_kind="layer", norm_bias=True, learned_positions=True)


_HF = CheckpointDialect("hf", ("GPT2LMHeadModel",), from_hf, HF_NAMES, HF_IGNORED, FUSED, transposed=TRANSPOSED)
GPT2 = Family(
    "gpt2",
    (
        CheckpointDialect("gguf", ("gpt2",), from_gguf, GGUF_NAMES, (), FUSED),
        replace(_HF, names=PLAIN_NAMES, when=PLAIN_NAMES["embedding"]),  # older files have no prefix
        _HF,
    ),
)
