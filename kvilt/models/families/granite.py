"""Granite 3: Llama with a multiplier on embeddings, on attention, on what each block adds, and on the logits."""

from __future__ import annotations

from dataclasses import replace

from ...weights.source import Checkpoint
from ..spec import LayerSpec, ModelSpec, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec, fields = gguf_spec(checkpoint, "granite", interleaved=True), gguf_fields(checkpoint)
    scale = fields.number("attention.scale", spec.layers[0].attention.scale)
    residual, logits = fields.number("residual_scale", 1.0), fields.number("logit_scale", 1.0)
    return _multiplied(spec, fields.number("embedding_scale", 1.0), scale, residual, logits)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    config = Fields(checkpoint.config)
    return _multiplied(hf_spec(checkpoint, "granite"), *(config.number(name, 1.0) for name in names))


def _multiplied(spec: ModelSpec, embedding: float, attention: float, residual: float, logits: float) -> ModelSpec:
    def change(_index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, scale=attention), residual_scale=residual)

    return replace(each_layer(spec, change), embed_scale=embedding, logit_scale=1 / logits)


GRANITE = Family(
    "granite",
    (
        CheckpointDialect("gguf", ("granite",), from_gguf, GGUF_NAMES, GGUF_IGNORED, pairs_qk=True),
        CheckpointDialect("hf", ("GraniteForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
