"""Phi-3 and Phi-4-mini: Llama with fused projections, a window, longrope and perhaps partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...kv.layout import Full, Reach, Window
from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES
from .plain import HF_NAMES as PLAIN_HF_NAMES

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")})

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {**PLAIN_GGUF_NAMES, "qkv": "blk.{i}.attn_qkv.weight", "gate_up": "blk.{i}.ffn_up.weight"}
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_HF_NAMES,
        "qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
        "gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
    }
)


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return _windowed(gguf_spec(checkpoint, "phi3"), gguf_fields(checkpoint), "attention.sliding_window")


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    return _windowed(hf_spec(checkpoint, "phi3", partial=1.0), Fields(checkpoint.config), "sliding_window")


def _windowed(spec: ModelSpec, fields: Fields, name: str) -> ModelSpec:
    # Some files write a window of 0 for none.
    reach: Reach = Window(fields.integer(name)) if fields.values.get(fields.prefix + name) else Full()
    return each_attention(spec, lambda _layer, attention: replace(attention, reach=reach))


PHI3 = Family(
    "phi3",
    (
        CheckpointDialect("gguf", ("phi3",), from_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED),
        CheckpointDialect("hf", ("Phi3ForCausalLM",), from_hf, HF_NAMES, HF_IGNORED, FUSED),
    ),
)
