"""Command R and R7B: attention and feed-forward of one normed input, LayerNorm without bias, neighbouring pairs.

Command R7B (Cohere 2) has windows, and no rope in the layers without one.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import Unsupported, WeightError
from ...kv.layout import Window
from ...weights.source import Checkpoint
from ..spec import AttentionSpec, ModelSpec, NoRope, each_attention, each_layer
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields, layer_kinds
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec

PATTERN = 4
LOGIT_SCALE = 0.0625
GGUF_EPS = "attention.layer_norm_epsilon"


def from_command_r_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec = gguf_spec(checkpoint, "cohere", interleaved=True, eps=GGUF_EPS)
    return _cohere(spec, gguf_fields(checkpoint).number("logit_scale"))


def from_cohere2_gguf(checkpoint: Checkpoint) -> ModelSpec:
    window = Window(gguf_fields(checkpoint).integer("attention.sliding_window"))
    spec = from_command_r_gguf(checkpoint)
    return _windowed(spec, _alternating(PATTERN, len(spec.layers)), window)


def from_command_r(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    if config.flag("use_qk_norm"):
        raise Unsupported("Command R with use_qk_norm (Command R+) is not supported: its q and k have LayerNorms")
    spec = hf_spec(checkpoint, "cohere", tied=True, pairing="interleaved", eps="layer_norm_eps")
    return _cohere(spec, config.number("logit_scale", LOGIT_SCALE))


def from_cohere2(checkpoint: Checkpoint) -> ModelSpec:
    spec, config = from_command_r(checkpoint), Fields(checkpoint.config)
    if config.says_none("sliding_window"):
        raise WeightError("sliding_window", "must be a number of tokens: some layers have a window")
    window, layers = Window(config.integer("sliding_window", DEFAULT_WINDOW)), len(spec.layers)
    kinds = layer_kinds(config, layers) or _alternating(config.integer("sliding_window_pattern", PATTERN), layers)
    return _windowed(spec, kinds, window)


def _cohere(spec: ModelSpec, logit_scale: float) -> ModelSpec:
    spec = each_layer(spec, lambda _index, layer: replace(layer, parallel=True))
    return replace(spec, norm_kind="layer", logit_scale=logit_scale)


def _alternating(pattern: int, layers: int) -> tuple[str, ...]:
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))


def _windowed(spec: ModelSpec, kinds: tuple[str, ...], window: Window) -> ModelSpec:
    def change(layer: int, attention: AttentionSpec) -> AttentionSpec:
        if kinds[layer] == "sliding_attention":
            return replace(attention, reach=window)
        return replace(attention, rope=NoRope())

    return each_attention(spec, change)


COHERE = Family(
    "cohere",
    (
        CheckpointDialect("gguf", ("cohere2",), from_cohere2_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("gguf", ("command-r",), from_command_r_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("Cohere2ForCausalLM",), from_cohere2, HF_NAMES, HF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("CohereForCausalLM",), from_command_r, HF_NAMES, HF_IGNORED, pairs_qk=True),
    ),
)
