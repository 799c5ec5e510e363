"""SmolLM3: Llama in which every fourth layer has no rope."""

from __future__ import annotations

from dataclasses import replace

from ...errors import Unsupported, WeightError
from ...weights.source import Checkpoint
from ..spec import ModelSpec, NoRope, each_attention
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_spec, hf_spec

INTERVAL = 4


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec = gguf_spec(checkpoint, "smollm3", interleaved=True)
    return _without_rope(spec, _every(INTERVAL, len(spec.layers)))


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    spec, config = hf_spec(checkpoint, "smollm3", theta=2000000.0, tied=True), Fields(checkpoint.config)
    if config.flag("use_sliding_window"):
        raise Unsupported("SmolLM3 with use_sliding_window is not supported; no published checkpoint turns it on")
    layers = len(spec.layers)
    listed = config.values.get("no_rope_layers")
    if listed is None:
        return _without_rope(spec, _every(config.integer("no_rope_layer_interval", INTERVAL), layers))
    if not isinstance(listed, list) or len(listed) != layers:
        raise WeightError("no_rope_layers", f"must say for each of the {layers} layers whether it has rope")
    return _without_rope(spec, [not used for used in listed])  # despite its name the list marks layers with rope


def _every(interval: int, layers: int) -> list[bool]:
    return [(index + 1) % interval == 0 for index in range(layers)]


def _without_rope(spec: ModelSpec, bare: list[bool]) -> ModelSpec:
    return each_attention(spec, lambda layer, a: replace(a, rope=NoRope()) if bare[layer] else a)


SMOLLM3 = Family(
    "smollm3",
    (
        CheckpointDialect("gguf", ("smollm3",), from_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("SmolLM3ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
