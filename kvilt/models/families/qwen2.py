"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows on the upper layers if the config says so."""

from __future__ import annotations

from dataclasses import replace

from ...errors import WeightError
from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields, layer_kinds
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_spec, hf_spec

DEFAULT_FULL_LAYERS = 28  # as in transformers


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return each_attention(gguf_spec(checkpoint, "qwen2"), lambda _layer, a: replace(a, qkv_bias=True))


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    spec = hf_spec(checkpoint, "qwen2")
    reaches = window_above(Fields(checkpoint.config), len(spec.layers))
    return each_attention(spec, lambda layer, a: replace(a, qkv_bias=True, out_bias=False, reach=reaches[layer]))


def window_above(config: Fields, layers: int) -> tuple[Reach, ...]:
    """A window where the config turns windows on: in the layers it names, else in those above the first few."""
    kinds = layer_kinds(config, layers)
    if not config.flag("use_sliding_window") or config.says_none("sliding_window"):
        if kinds and "sliding_attention" in kinds:
            raise WeightError("layer_types", "names layers with a window, and the config turns windows off")
        return (Full(),) * layers
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else Full() for kind in kinds)
    full = config.values.get("max_window_layers", DEFAULT_FULL_LAYERS)
    full = layers if full is None else full
    if type(full) is not int or full < 0:
        raise WeightError("max_window_layers", "must be a number of layers")
    return tuple(window if index >= full else Full() for index in range(layers))


QWEN2 = Family(
    "qwen2",
    (
        CheckpointDialect("gguf", ("qwen2",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("hf", ("Qwen2ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
