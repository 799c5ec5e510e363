"""Llama and what is built like it: Llama 2 and 3, SmolLM2, Mistral with its sliding window."""

from __future__ import annotations

from dataclasses import replace

from ...kv.layout import Window
from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention
from . import mixtral
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS
from .family import CheckpointDialect, Family
from .fields import DEFAULT_WINDOW, Fields
from .plain import GGUF_IGNORED, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    # llama.cpp's converter reorders q and k of this architecture for interleaved pairs.
    if gguf_fields(checkpoint).has("expert_count"):
        return mixtral.from_gguf(checkpoint)
    return gguf_spec(checkpoint, "llama", interleaved=True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    return hf_spec(checkpoint, "llama")


def from_mistral(checkpoint: Checkpoint) -> ModelSpec:
    spec, config = hf_spec(checkpoint, "llama"), Fields(checkpoint.config)
    if config.says_none("sliding_window"):
        return spec
    window = Window(config.integer("sliding_window", DEFAULT_WINDOW))
    return each_attention(spec, lambda _layer, attention: replace(attention, reach=window))


LLAMA = Family(
    "llama",
    (
        CheckpointDialect(
            "gguf", ("llama",), from_gguf, GGUF_EXPERT_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS, pairs_qk=True
        ),
        # Llama has no windows: a config converted from Mistral's may still carry the field, which then means nothing.
        CheckpointDialect("hf", ("LlamaForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
        CheckpointDialect("hf", ("MistralForCausalLM",), from_mistral, HF_NAMES, HF_IGNORED),
    ),
)
