"""Qwen3 (dense): Llama with a norm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, HF_NAMES, gguf_spec, hf_spec
from .qwen2 import window_above


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return each_attention(gguf_spec(checkpoint, "qwen3"), lambda _layer, a: replace(a, qk_norm=True))


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    spec = hf_spec(checkpoint, "qwen3")
    reaches = window_above(Fields(checkpoint.config), len(spec.layers))
    return each_attention(spec, lambda layer, a: replace(a, qk_norm=True, reach=reaches[layer]))


QWEN3 = Family(
    "qwen3",
    (
        CheckpointDialect("gguf", ("qwen3",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect("hf", ("Qwen3ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
