"""LFM2: short gated convolutions with full attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...weights.source import Checkpoint
from ..recurrent_spec import ShortConvSpec
from ..spec import FeedForwardSpec, ModelSpec, each_attention, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .gguf_hybrid import attention_layers
from .plain import GGUF_IGNORED, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES

NAMES = MappingProxyType(
    {
        **HF_NAMES,
        "norm": "model.embedding_norm.weight",
        "attention_norm": "model.layers.{i}.operator_norm.weight",
        "feed_forward_norm": "model.layers.{i}.ffn_norm.weight",
        "out": "model.layers.{i}.self_attn.out_proj.weight",
        "q_norm": "model.layers.{i}.self_attn.q_layernorm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_layernorm.weight",
        "gate": "model.layers.{i}.feed_forward.w1.weight",
        "up": "model.layers.{i}.feed_forward.w3.weight",
        "down": "model.layers.{i}.feed_forward.w2.weight",
        "conv_in": "model.layers.{i}.conv.in_proj.weight",
        "conv": "model.layers.{i}.conv.conv.weight",
        "memory_out": "model.layers.{i}.conv.out_proj.weight",
    }
)


GGUF_NAMES = MappingProxyType(
    {
        **PLAIN_GGUF_NAMES,
        "norm": "token_embd_norm.weight",  # the norm before the head, under the name it has in these files
        "conv_in": "blk.{i}.shortconv.in_proj.weight",
        "conv": "blk.{i}.shortconv.conv.weight",
        "memory_out": "blk.{i}.shortconv.out_proj.weight",
    }
)
FUSED = MappingProxyType({"conv_in": ("conv_b", "conv_c", "conv_x")})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    plain, attends = attention_layers(checkpoint)
    width = gguf_fields(plain).integer("shortconv.l_cache", high=64)
    return _hybrid(gguf_spec(plain, "lfm2"), width, attends)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    given = checkpoint.config
    changes = {"rms_norm_eps": given.get("norm_eps"), "intermediate_size": _inner(Fields(given))}
    config = Fields({**given, **changes})
    if config.flag("conv_bias"):
        raise Unsupported("LFM2 with biases in its convolutions is not supported")
    plain = replace(checkpoint, config=config.values)
    spec = hf_spec(plain, "lfm2", theta=1e6, tied=config.flag("tie_embedding", True))
    block, attention = FeedForwardSpec(config.integer("intermediate_size")), _attention_layers(config, len(spec.layers))
    spec = each_layer(spec, lambda _index, layer: replace(layer, feed_forward=block))
    attends = [i in attention for i in range(len(spec.layers))]
    return _hybrid(spec, config.integer("conv_L_cache", 3, high=64), attends)


def _hybrid(spec: ModelSpec, width: int, attends: Sequence[bool]) -> ModelSpec:
    """The spec with convolutions over `width` tokens in the layers without attention."""
    conv = ShortConvSpec(spec.hidden_size, width)
    layers = (replace(layer, recurrent=None if own else conv) for layer, own in zip(spec.layers, attends, strict=True))
    return each_attention(replace(spec, layers=tuple(layers)), lambda _layer, a: replace(a, qk_norm=True))


def _inner(config: Fields) -> int:
    """The width of the feed-forward, which configs give before it is adjusted."""
    inner = config.integer("block_ff_dim", config.integer("intermediate_size", 12288))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return inner
    multiple = config.integer("block_multiple_of", 256)
    inner = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
    return -(-inner // multiple) * multiple


def _attention_layers(config: Fields, layers: int) -> set[int]:
    kinds, known = config.values.get("layer_types"), ("full_attention", "conv")
    if kinds is None:
        named = config.values.get("full_attn_idxs") or []
        if not isinstance(named, list) or any(type(i) is not int or not 0 <= i < layers for i in named):
            raise WeightError("full_attn_idxs", f"must be a list of layers below {layers}")
        return set(named)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise WeightError("layer_types", f"must name the kind of each of {layers} layers, {' or '.join(known)}")
    return {i for i, kind in enumerate(kinds) if kind == "full_attention"}


LFM2 = Family(
    "lfm2",
    (
        CheckpointDialect("gguf", ("lfm2",), from_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED),
        CheckpointDialect("hf", ("Lfm2ForCausalLM",), from_hf, NAMES, HF_IGNORED, FUSED),
    ),
)
