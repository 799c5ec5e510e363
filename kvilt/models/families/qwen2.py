"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows on the upper layers if the config says so."""

from __future__ import annotations

from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import ModelSpec
from .family import Dialect, Family
from .fields import Fields
from .llama import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_spec, hf_spec


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return gguf_spec(checkpoint, "qwen2", qkv_bias=True, interleaved=False)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    layers = config.integer("num_hidden_layers", high=1 << 12)
    return hf_spec(checkpoint, "qwen2", _reaches(config, layers), qkv_bias=True, out_bias=False)


def _reaches(config: Fields, layers: int) -> tuple[Reach, ...]:
    if not config.flag("use_sliding_window"):
        return (Full(),) * layers
    window = Window(config.integer("sliding_window"))
    full = config.values.get("max_window_layers", layers)  # the first ones see everything
    return tuple(window if index >= full else Full() for index in range(layers))


QWEN2 = Family(
    "qwen2",
    (
        Dialect("gguf", ("qwen2",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        Dialect("hf", ("Qwen2ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
