"""Nemotron-H: layers of one block alone, which is Mamba-2, attention without rope, a squared ReLU, or experts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ...errors import Unsupported, WeightError
from ...ops.contract import FoldHeads
from ...weights.source import Checkpoint
from ..recurrent_spec import Mamba2Spec
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NoRope,
    SharedExpertSpec,
)
from .expert_fields import GGUF_EXPERT_NAMES, GGUF_STACKS, MAX_EXPERTS, gguf_grouped, hf_grouped_router
from .family import CheckpointDialect, Family
from .fields import Fields, whole_heads
from .gguf_hybrid import STATE_NAMES, TRANSFORMS, mamba2
from .plain import GGUF_IGNORED, HF_IGNORED, gguf_fields, gguf_vocab_size

_MIXER = "backbone.layers.{i}.mixer."
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
        "attention_norm": "backbone.layers.{i}.norm.weight",
        "feed_forward_norm": "backbone.layers.{i}.norm.weight",
        **{ours: f"{_MIXER}{ours}_proj.weight" for ours in ("q", "k", "v", "up", "down")},
        **{f"{ours}_bias": f"{_MIXER}{ours}_proj.bias" for ours in ("up", "down")},
        "out": _MIXER + "o_proj.weight",
        "router": _MIXER + "gate.weight",
        "selection_bias": _MIXER + "gate.e_score_correction_bias",
        **{f"experts.{ours}": f"{_MIXER}experts.{{e}}.{ours}_proj.weight" for ours in ("up", "down")},
        **{f"shared.{ours}": f"{_MIXER}shared_experts.{ours}_proj.weight" for ours in ("up", "down")},
        "mamba_in": _MIXER + "in_proj.weight",
        "conv": _MIXER + "conv1d.weight",
        "conv_bias": _MIXER + "conv1d.bias",
        "dt_bias": _MIXER + "dt_bias",
        "a_log": _MIXER + "A_log",
        "skip": _MIXER + "D",
        "memory_norm": _MIXER + "norm.weight",
        "memory_out": _MIXER + "out_proj.weight",
    }
)
# As some versions of transformers write them.
PLAIN_NAMES: Mapping[str, str] = MappingProxyType(
    {ours: name.replace("backbone.", "model.", 1) for ours, name in HF_NAMES.items()}
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {**GGUF_EXPERT_NAMES, **STATE_NAMES, "feed_forward_norm": "blk.{i}.attn_norm.weight"}
)
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({"mamba_in": ("z", "qkv", "a")})
_IGNORED = (*HF_IGNORED, "mtp.*")
# One letter for each layer in older configs, a word in newer ones.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "M": "mamba",
        "mamba": "mamba",
        "linear_attention": "mamba",
        "*": "attention",
        "attention": "attention",
        "full_attention": "attention",
        "-": "mlp",
        "mlp": "mlp",
        "E": "moe",
        "moe": "moe",
    }
)


def from_hf(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    for name in ("use_bias", "mamba_proj_bias"):
        if config.flag(name):
            raise Unsupported(f"Nemotron-H with {name} is not supported")
    if config.has("sliding_window"):
        raise Unsupported("Nemotron-H with a sliding window is not supported")
    kinds = _kinds(config)
    experts = _experts(config) if "moe" in kinds else None
    return ModelSpec(
        family="nemotron_h",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        context=config.integer("max_position_embeddings"),
        layers=_layers(kinds, _attention(config), _mamba(config), _block(config), experts),
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        # transformers ties nothing in this family, whatever the config says.
        tied_head=config.flag("tie_word_embeddings") and HF_NAMES["head"] not in checkpoint.tensors.names(),
    )


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields, names = gguf_fields(checkpoint), checkpoint.tensors.names()
    layers = fields.integer("block_count", high=1 << 12)
    kv_heads, widths = (_counts(fields, name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    sparse = checkpoint.architecture == "nemotron_h_moe"
    if fields.count("moe_latent_size", 0):
        raise Unsupported("Nemotron-H whose experts read a compressed vector (moe_latent_size) is not supported")
    block = "moe" if sparse else "mlp"
    kinds = ["attention" if h else block if w else "mamba" for h, w in zip(kv_heads, widths, strict=True)]
    heads, hidden = fields.integer("attention.head_count", high=1 << 12), fields.integer("embedding_length")
    dim = fields.integer("attention.key_length", max(1, hidden // heads), high=1 << 12)
    attention = AttentionSpec(heads, _only(kv_heads, "attention.head_count_kv"), dim, dim**-0.5, NoRope())
    whole_heads(heads, attention.kv_heads)
    plain = FeedForwardSpec(_only(widths, "feed_forward_length"), "relu2", gated=False)
    return ModelSpec(
        family="nemotron_h",
        vocab_size=gguf_vocab_size(checkpoint),
        hidden_size=hidden,
        context=fields.integer("context_length"),
        layers=_layers(
            kinds,
            attention,
            mamba2(fields, any(name.endswith("ssm_conv1d.bias") for name in names)),
            plain,
            _gguf_experts(fields) if sparse else None,
        ),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tied_head=GGUF_NAMES["head"] not in names,
    )


def _layers(
    kinds: Sequence[str],
    attention: AttentionSpec,
    mamba: Mamba2Spec,
    block: FeedForwardSpec,
    experts: ExpertsSpec | None,
) -> tuple[LayerSpec, ...]:
    plain = LayerSpec(attention, block)
    table = {
        "mamba": replace(plain, recurrent=mamba, blocks="mixer"),
        "attention": replace(plain, blocks="mixer"),
        "mlp": replace(plain, blocks="feed_forward"),
        "moe": replace(plain, feed_forward=experts or block, blocks="feed_forward"),
    }
    return tuple(table[kind] for kind in kinds)


def _kinds(config: Fields) -> list[str]:
    """What each layer is."""
    found: Any = config.values.get("layers_block_type") or config.values.get("hybrid_override_pattern")
    if not isinstance(found, list | str) or any(one not in _KINDS for one in found):
        raise WeightError("layers_block_type", f"must name each layer's block; there are {', '.join(_KINDS)}")
    return [_KINDS[one] for one in found]


def _attention(config: Fields) -> AttentionSpec:
    heads, dim = config.integer("num_attention_heads", 32, high=1 << 12), config.integer("head_dim", 128, high=1 << 12)
    kv_heads = config.integer("num_key_value_heads", 8)
    whole_heads(heads, kv_heads)
    return AttentionSpec(heads, kv_heads, dim, dim**-0.5, NoRope())


def _block(config: Fields, width: str = "intermediate_size", default: int = 21504) -> FeedForwardSpec:
    activation = config.activation("mlp_hidden_act", "relu2")
    return FeedForwardSpec(config.integer(width, default), activation, config.flag("mlp_bias"), gated=False)


def _mamba(config: Fields) -> Mamba2Spec:
    if config.values.get("mamba_hidden_act", "silu") != "silu":
        raise Unsupported("Mamba-2 with another activation than silu is not supported")
    heads, dim = (
        config.integer("mamba_num_heads", 128, high=1 << 12),
        config.integer("mamba_head_dim", 64, high=1 << 12),
    )
    groups, state = config.integer("n_groups", 8), config.integer("ssm_state_size", 128, high=1 << 12)
    return Mamba2Spec(
        FoldHeads(groups, heads, state, dim),
        config.integer("conv_kernel", 4, high=64),
        config.flag("use_conv_bias", True),
        config.number("time_step_min", 0.001),  # transformers cuts step sizes there, whatever their limits say
        norm_groups=groups,
    )


def _experts(config: Fields) -> ExpertsSpec:
    if config.has("moe_latent_size"):
        raise Unsupported("Nemotron-H whose experts read a compressed vector (moe_latent_size) is not supported")
    if config.flag("mlp_bias"):
        raise Unsupported("Nemotron-H with experts and mlp_bias is not supported")
    router = hf_grouped_router(config)
    return ExpertsSpec(
        config.integer("n_routed_experts", 8, high=MAX_EXPERTS),
        config.integer("num_experts_per_tok", 2),
        _block(config, "moe_intermediate_size", 7688),
        config.flag("norm_topk_prob", True),
        router,
        SharedExpertSpec(_block(config, "moe_shared_expert_intermediate_size", 7688)),
    )


def _gguf_experts(fields: Fields) -> ExpertsSpec:
    experts = gguf_grouped(fields)
    expert = replace(experts.expert, activation="relu2", gated=False)
    width = fields.integer("expert_shared_feed_forward_length")
    shared = SharedExpertSpec(replace(expert, hidden=width))
    return replace(experts, expert=expert, shared=shared)


def _counts(fields: Fields, name: str, layers: int) -> list[int]:
    found = fields.values.get(fields.prefix + name)
    if not isinstance(found, list) or len(found) != layers or any(type(one) is not int or one < 0 for one in found):
        raise WeightError(fields.prefix + name, f"must be a whole number for each of {layers} layers")
    return found


def _only(counts: Sequence[int], name: str) -> int:
    """The one number of the layers that have any; 1 where none has."""
    found = {one for one in counts if one}
    if len(found) > 1:
        raise Unsupported(f"layers with different values of {name} are not supported")
    return next(iter(found), 1)


_GGUF = ("nemotron_h", "nemotron_h_moe")
_ARCHITECTURE = ("NemotronHForCausalLM",)
NEMOTRON_H = Family(
    "nemotron_h",
    (
        CheckpointDialect(
            "gguf", _GGUF, from_gguf, GGUF_NAMES, GGUF_IGNORED, FUSED, stacks=GGUF_STACKS, transforms=TRANSFORMS
        ),
        CheckpointDialect("hf", _ARCHITECTURE, from_hf, PLAIN_NAMES, _IGNORED, FUSED, when="model.embeddings.weight"),
        CheckpointDialect("hf", _ARCHITECTURE, from_hf, HF_NAMES, _IGNORED, FUSED),
    ),
)
