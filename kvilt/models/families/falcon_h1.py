"""Falcon-H1: attention and Mamba-2 beside each other in every layer, and a multiplier on everything that is added."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...weights.source import Checkpoint
from ..recurrent_spec import Mamba2Spec
from ..spec import FeedForwardSpec, LayerSpec, ModelSpec, each_layer
from .family import CheckpointDialect, Family
from .fields import Fields
from .gguf_hybrid import STATE_NAMES, TRANSFORMS, mamba2
from .granite_hybrid import FUSED as MAMBA_FUSED
from .granite_hybrid import NAMES as MAMBA_NAMES
from .granite_hybrid import mamba2_spec
from .plain import GGUF_IGNORED, HF_IGNORED, HF_NAMES, gguf_fields, gguf_spec, hf_spec
from .plain import GGUF_NAMES as PLAIN_GGUF_NAMES

NAMES = MappingProxyType(
    {
        **{ours: name for ours, name in MAMBA_NAMES.items() if ".mamba." in name},
        **{ours: name.replace(".mlp.", ".feed_forward.") for ours, name in HF_NAMES.items()},
        "norm": "model.final_layernorm.weight",
        "feed_forward_norm": "model.layers.{i}.pre_ff_layernorm.weight",
    }
)
# The converter leaves out the end of this name.
GGUF_NAMES = MappingProxyType({**PLAIN_GGUF_NAMES, **STATE_NAMES, "feed_forward_norm": "blk.{i}.ffn_norm"})
FUSED = MappingProxyType({"mamba_in": MAMBA_FUSED["mamba_in"]})
_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    """The converter has multiplied the weights."""
    names, fields = checkpoint.tensors.names(), gguf_fields(checkpoint)
    mamba = mamba2(fields, any(name.endswith("ssm_conv1d.bias") for name in names))
    own = replace(mamba, norm=any(name.endswith("ssm_norm.weight") for name in names))
    return each_layer(
        gguf_spec(checkpoint, "falcon_h1"), lambda _index, layer: replace(layer, recurrent=own, beside=(1.0, 1.0))
    )


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    for name in _BIASES:
        if config.flag(name):
            raise Unsupported(f"Falcon-H1 with {name} is not supported")
    taken, keys = config.number("attention_in_multiplier", 1.0), config.number("key_multiplier", 1.0)
    added = config.number("attention_out_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)
    mamba, block = _mamba(config), _feed_forward(config)

    def change(_index: int, layer: LayerSpec) -> LayerSpec:
        # What multiplies queries and keys scales their products, and what multiplies values scales what is read.
        attention = replace(layer.attention, scale=layer.attention.scale * taken * taken * keys)
        beside = (taken * added[0], added[1])
        return replace(layer, attention=attention, feed_forward=block, recurrent=mamba, beside=beside)

    spec = each_layer(hf_spec(checkpoint, "falcon_h1"), change)
    embedding, logits = config.number("embedding_multiplier", 1.0), config.number("lm_head_multiplier", 1.0)
    return replace(spec, embed_scale=embedding, logit_scale=logits)


def _mamba(config: Fields) -> Mamba2Spec:
    inner = None if config.says_none("mamba_d_ssm") else config.integer("mamba_d_ssm", 1024)
    mamba, first = mamba2_spec(config, inner), config.number("ssm_in_multiplier", 1.0)
    return replace(
        mamba,
        norm=config.flag("mamba_rms_norm"),
        norm_groups=mamba.heads.key_heads,
        gate_first=not config.flag("mamba_norm_before_gate", True),
        scales=tuple(first * one for one in _multipliers(config, "ssm_multipliers", 5)),
    )


def _feed_forward(config: Fields) -> FeedForwardSpec:
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    activation = config.activation("hidden_act", "silu")
    return FeedForwardSpec(config.integer("intermediate_size"), activation, gate_scale=gate, down_scale=down)


def _multipliers(config: Fields, name: str, count: int) -> tuple[float, ...]:
    found = config.numbers(name) if config.has(name) else (1.0,) * count
    if len(found) != count:
        raise WeightError(name, f"must have {count} numbers, not {len(found)}")
    return found


FALCON_H1 = Family(
    "falcon_h1",
    (
        CheckpointDialect("gguf", ("falcon-h1",), from_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED, transforms=TRANSFORMS),
        CheckpointDialect("hf", ("FalconH1ForCausalLM",), from_hf, NAMES, HF_IGNORED, FUSED),
    ),
)
