"""Qwen3 (dense): Llama with a norm on every query and key head. Qwen3-Embedding is kept without its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

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


HEADLESS_NAMES: Mapping[str, str] = MappingProxyType(
    {part: name.removeprefix("model.") for part, name in HF_NAMES.items()}
)
HEADLESS_IGNORED = tuple(name.removeprefix("model.") for name in HF_IGNORED)


def from_headless(checkpoint: Checkpoint) -> ModelSpec:
    """Without a head of its own a decoder has that of its embedding; whether it means anything, the config says."""
    tied = HEADLESS_NAMES["head"] not in checkpoint.tensors.names()
    return replace(from_hf(checkpoint), tied_head=tied)


QWEN3 = Family(
    "qwen3",
    (
        CheckpointDialect("gguf", ("qwen3",), from_gguf, GGUF_NAMES, GGUF_IGNORED),
        CheckpointDialect(
            "hf",
            ("Qwen3ForCausalLM",),
            from_headless,
            HEADLESS_NAMES,
            HEADLESS_IGNORED,
            when=HEADLESS_NAMES["embedding"],
            headless=True,
        ),
        CheckpointDialect("hf", ("Qwen3ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED),
    ),
)
