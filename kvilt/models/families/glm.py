"""GLM-4 (dense) and the GLM before it: neighbouring pairs of half of each head rotate, gate and up are one tensor.

GLM-4-0414 has norms after the blocks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...weights.source import Checkpoint
from ..spec import ModelSpec, each_attention, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES
from .plain import HF_NAMES as PLAIN_HF_NAMES

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({"gate_up": ("gate", "up")})
FUSED_QKV: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**FUSED, "qkv": ("q", "k", "v"), "qkv_bias": ("q_bias", "k_bias", "v_bias")}
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_GGUF_NAMES,
        "gate_up": "blk.{i}.ffn_up.weight",
        "qkv": "blk.{i}.attn_qkv.weight",
        "qkv_bias": "blk.{i}.attn_qkv.bias",
        "post_attention_norm": "blk.{i}.post_attention_norm.weight",
        "post_feed_forward_norm": "blk.{i}.post_ffw_norm.weight",
    }
)
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **PLAIN_HF_NAMES,
        "gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
        "post_attention_norm": "model.layers.{i}.post_self_attn_layernorm.weight",
        "post_feed_forward_norm": "model.layers.{i}.post_mlp_layernorm.weight",
    }
)


def from_glm_gguf(checkpoint: Checkpoint) -> ModelSpec:
    spec = gguf_spec(checkpoint, "glm", interleaved=True)
    bias = GGUF_NAMES["qkv_bias"].format(i=0) in checkpoint.tensors.names() or spec.layers[0].attention.qkv_bias
    return each_attention(spec, lambda _layer, a: replace(a, qkv_bias=bias))


def from_glm4_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return _with_post_norms(from_glm_gguf(checkpoint))


def from_glm(checkpoint: Checkpoint) -> ModelSpec:
    bias = Fields(checkpoint.config).flag("attention_bias", True)
    spec = hf_spec(checkpoint, "glm", partial=0.5, pairing="interleaved")
    return each_attention(spec, lambda _layer, a: replace(a, qkv_bias=bias, out_bias=False))


def from_glm4(checkpoint: Checkpoint) -> ModelSpec:
    return _with_post_norms(from_glm(checkpoint))


def _with_post_norms(spec: ModelSpec) -> ModelSpec:
    return each_layer(spec, lambda _index, layer: replace(layer, post_norms=True))


_QKV = GGUF_NAMES["qkv"].format(i=0)
GLM = Family(
    "glm",
    (
        CheckpointDialect("gguf", ("glm4",), from_glm4_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED, pairs_qk=True),
        CheckpointDialect(
            "gguf", ("chatglm",), from_glm_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED_QKV, when=_QKV, pairs_qk=True
        ),
        CheckpointDialect("gguf", ("chatglm",), from_glm_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED, pairs_qk=True),
        CheckpointDialect("hf", ("Glm4ForCausalLM",), from_glm4, HF_NAMES, HF_IGNORED, FUSED, pairs_qk=True),
        CheckpointDialect("hf", ("GlmForCausalLM",), from_glm, HF_NAMES, HF_IGNORED, FUSED, pairs_qk=True),
    ),
)
