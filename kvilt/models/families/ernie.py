"""ERNIE 4.5 (dense): Llama whose neighbouring pairs rotate, with biases if the config says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...weights.source import Checkpoint
from ..spec import FeedForwardSpec, LayerSpec, ModelSpec, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, HF_NAMES, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES

THETA = 500000.0
_BIASES = {f"{name}_bias": f"blk.{{i}}.ffn_{name}.bias" for name in ("gate", "up", "down")}
GGUF_NAMES: Mapping[str, str] = MappingProxyType({**PLAIN_GGUF_NAMES, **_BIASES})


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    bias = _BIASES["gate_bias"].format(i=0) in checkpoint.tensors.names()
    return _biased(gguf_spec(checkpoint, "ernie4_5", interleaved=True), bias)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    spec = hf_spec(checkpoint, "ernie4_5", theta=THETA, tied=True, pairing="interleaved")
    return _biased(spec, Fields(checkpoint.config).flag("use_bias"))


def _biased(spec: ModelSpec, bias: bool) -> ModelSpec:
    def change(_index: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.feed_forward, FeedForwardSpec)
        attention = replace(layer.attention, qkv_bias=bias, out_bias=bias)
        return replace(layer, attention=attention, feed_forward=replace(layer.feed_forward, bias=bias))

    return each_layer(spec, change)


ERNIE = Family(
    "ernie4_5",
    (
        CheckpointDialect("gguf", ("ernie4_5",), from_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("Ernie4_5ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED, pairs_qk=True),
    ),
)
