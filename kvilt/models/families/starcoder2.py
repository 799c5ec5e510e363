"""StarCoder2: LayerNorm and linear maps with biases, a feed-forward without a gate, perhaps a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...kv.layout import Full, Reach, Window
from ...ops.contract import Activation
from ...weights.source import Checkpoint
from ..spec import FeedForwardSpec, LayerSpec, ModelSpec, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES
from .plain import HF_NAMES as PLAIN_HF_NAMES

ACTIVATION = "gelu_pytorch_tanh"
GGUF_EPS = "attention.layer_norm_epsilon"
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_GGUF_NAMES,
        "norm_bias": "output_norm.bias",
        "attention_norm_bias": "blk.{i}.attn_norm.bias",
        "feed_forward_norm_bias": "blk.{i}.ffn_norm.bias",
        "up_bias": "blk.{i}.ffn_up.bias",
        "down_bias": "blk.{i}.ffn_down.bias",
    }
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_HF_NAMES,
        "norm_bias": "model.norm.bias",
        "attention_norm_bias": "model.layers.{i}.input_layernorm.bias",
        "feed_forward_norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
        "up": "model.layers.{i}.mlp.c_fc.weight",
        "up_bias": "model.layers.{i}.mlp.c_fc.bias",
        "down": "model.layers.{i}.mlp.c_proj.weight",
        "down_bias": "model.layers.{i}.mlp.c_proj.bias",
    }
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec, fields = gguf_spec(checkpoint, "starcoder2", eps=GGUF_EPS), gguf_fields(checkpoint)
    bias, reach = spec.layers[0].attention.qkv_bias, _reach(fields, "attention.sliding_window")
    return _starcoder(spec, bias, reach, "gelu_tanh")  # files do not name their activation


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    spec = hf_spec(checkpoint, "starcoder2", tied=True, eps="norm_epsilon", activation=ACTIVATION)
    bias, reach = config.flag("use_bias", True), _reach(config, "sliding_window")
    return _starcoder(spec, bias, reach, config.activation("hidden_act", ACTIVATION))


def _reach(fields: Fields, name: str) -> Reach:
    return Window(fields.integer(name)) if fields.has(name) else Full()


def _starcoder(spec: ModelSpec, bias: bool, reach: Reach, activation: Activation) -> ModelSpec:
    def change(_index: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.feed_forward, FeedForwardSpec)
        attention = replace(layer.attention, qkv_bias=bias, out_bias=bias, reach=reach)
        block = replace(layer.feed_forward, bias=bias, gated=False, activation=activation)
        return replace(layer, attention=attention, feed_forward=block)

    return replace(each_layer(spec, change), norm_kind="layer", norm_bias=True)


STARCODER2 = Family(
    "starcoder2",
    (
        CheckpointDialect("gguf", ("starcoder2",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("hf", ("Starcoder2ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
