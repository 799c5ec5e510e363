"""gpt-oss: sinks, windows in every second layer, biases everywhere, and experts in MXFP4 with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported
from ...kv.layout import Full, Window
from ...ops.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from ...weights.source import Checkpoint
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    YarnScaling,
    each_attention,
)
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, HF_EXPERT_NAMES, MAX_EXPERTS, gguf_experts, with_experts
from .family import CheckpointDialect, Family, StackedTensor
from .fields import Fields, layer_kinds
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_spec, hf_spec

THETA, WINDOW = 150000.0, 128
ROUTER = RouterSpec("chosen_softmax", bias=True)
YARN: Mapping[str, object] = MappingProxyType(
    {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
)
GGUF_NAMES = MappingProxyType({**GGUF_EXPERT_NAMES, "feed_forward_norm": "blk.{i}.post_attention_norm.weight"})
HF_NAMES = MappingProxyType(
    {
        **HF_EXPERT_NAMES,
        "router": "model.layers.{i}.mlp.router.weight",
        "router_bias": "model.layers.{i}.mlp.router.bias",
    }
)


def _stacks() -> dict[str, StackedTensor]:
    """Gate and up lie in one tensor, column by column in turns; in MXFP4 row by row."""
    at, stacks = "model.layers.{i}.mlp.experts.", {}
    for share, name in enumerate(("gate", "up")):
        stacks[f"experts.{name}"] = StackedTensor(f"{at}gate_up_proj", share, 2, True, transposed=True, mxfp4=True)
        stacks[f"experts.{name}_bias"] = StackedTensor(f"{at}gate_up_proj_bias", share, 2, True)
    stacks["experts.down"] = StackedTensor(f"{at}down_proj", transposed=True, mxfp4=True)
    return stacks | {"experts.down_bias": StackedTensor(f"{at}down_proj_bias")}


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields, spec = gguf_fields(checkpoint), gguf_spec(checkpoint, "gpt_oss")
    experts = gguf_experts(fields, False, ROUTER)
    window = Window(fields.integer("attention.sliding_window", WINDOW))
    kinds = _alternating(len(spec.layers))
    reaches = [window if kind == "sliding_attention" else Full() for kind in kinds]
    spec = each_attention(spec, lambda i, a: _own(_broken_pairs(a), reaches[i]))
    return with_experts(spec, _biased(experts), lambda _layer: True)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    values = dict(checkpoint.config)
    if not values.get("rope_parameters") and not values.get("rope_scaling"):
        values["rope_parameters"] = dict(YARN)
    config, spec = Fields(values), hf_spec(replace(checkpoint, config=values), "gpt_oss", theta=THETA)
    _check_gate(config)
    experts = ExpertsSpec(
        config.integer("num_local_experts", 128, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 4),
        FeedForwardSpec(config.integer("intermediate_size")),
        False,
        ROUTER,
    )
    kinds = layer_kinds(config, len(spec.layers)) or _alternating(len(spec.layers))
    window = Window(config.integer("sliding_window", WINDOW))
    bias = config.flag("attention_bias", True)
    spec = each_attention(spec, lambda i, a: _own(a, window if kinds[i] == "sliding_attention" else Full(), bias))
    return with_experts(spec, _biased(experts), lambda _layer: True)


def _own(attention: AttentionSpec, reach: Window | Full, bias: bool = True) -> AttentionSpec:
    return replace(attention, reach=reach, sinks=True, qkv_bias=bias, out_bias=bias)


def _broken_pairs(attention: AttentionSpec) -> AttentionSpec:
    """The ramp of the rope's scaling does not begin and end at whole pairs, which a GGUF does not say."""
    rope = attention.rope
    if isinstance(rope, RopeSpec) and isinstance(rope.scaling, YarnScaling):
        rope = replace(rope, scaling=replace(rope.scaling, whole_pairs=False))
    return replace(attention, rope=rope)


def _biased(experts: ExpertsSpec) -> ExpertsSpec:
    return replace(experts, expert=replace(experts.expert, activation="swiglu_oai", bias=True))


def _check_gate(config: Fields) -> None:
    found = (config.number("swiglu_alpha", SWIGLU_ALPHA), config.number("swiglu_limit", SWIGLU_LIMIT))
    if found != (SWIGLU_ALPHA, SWIGLU_LIMIT) or config.values.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"swiglu_alpha and swiglu_limit must be {SWIGLU_ALPHA} and {SWIGLU_LIMIT}, with silu")


def _alternating(layers: int) -> tuple[str, ...]:
    return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))


GPT_OSS = Family(
    "gpt_oss",
    (
        CheckpointDialect("gguf", ("gpt-oss",), from_gguf, GGUF_NAMES, GGUF_IGNORED, stacks=GGUF_STACKS),
        CheckpointDialect("hf", ("GptOssForCausalLM",), from_hf, HF_NAMES, HF_IGNORED, stacks=_stacks()),
    ),
)
