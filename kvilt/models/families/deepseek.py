"""DeepSeek V2 and V3, and Kimi K2, which is built like V3: latent attention, experts behind a few dense layers.

The layer behind the last one, which predicts a further token (MTP), is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ...errors import Unsupported, WeightError
from ...kv.layout import Latent
from ...ops.contract import Pairing
from ...weights.source import Checkpoint
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NoScaling,
    RopeSpec,
    RouterSpec,
    YarnScaling,
)
from .expert_fields import (
    GGUF_EXPERT_NAMES,
    GGUF_STACKS,
    HF_EXPERT_NAMES,
    MAX_EXPERTS,
    gguf_experts,
    shared_block,
    with_experts,
)
from .family import CheckpointDialect, Family
from .fields import Fields, RopeFields, even_dims, gguf_scaling, hf_rope
from .plain import GGUF_IGNORED, GGUF_NAMES, HF_IGNORED, gguf_fields, gguf_vocab_size

# One tensor makes the compressed vector and the part of keys that is rotated.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({"kv_down_rope": ("kv_down", "k_rope")})

LATENT_GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_EXPERT_NAMES,
        "q_down": "blk.{i}.attn_q_a.weight",
        "q_down_norm": "blk.{i}.attn_q_a_norm.weight",
        "q_up": "blk.{i}.attn_q_b.weight",
        "kv_down_rope": "blk.{i}.attn_kv_a_mqa.weight",
        "kv_norm": "blk.{i}.attn_kv_a_norm.weight",
        "kv_up": "blk.{i}.attn_kv_b.weight",
        "key_up": "blk.{i}.attn_k_b.weight",
        "value_up": "blk.{i}.attn_v_b.weight",
    }
)
LATENT_HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **HF_EXPERT_NAMES,
        "q_down": "model.layers.{i}.self_attn.q_a_proj.weight",
        "q_down_norm": "model.layers.{i}.self_attn.q_a_layernorm.weight",
        "q_up": "model.layers.{i}.self_attn.q_b_proj.weight",
        "kv_down_rope": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
        "kv_norm": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
        "kv_up": "model.layers.{i}.self_attn.kv_b_proj.weight",
    }
)
_MOST = 1 << 12  # of a head's numbers, and of heads


def from_v2(checkpoint: Checkpoint) -> ModelSpec:
    config, spec = Fields(checkpoint.config), _dense_from_hf(checkpoint, "interleaved")
    _known(config, "norm_topk_prob", False)
    _known(config, "scoring_func", "softmax")
    method, router = _known(config, "topk_method", "greedy", "group_limited_greedy"), RouterSpec("softmax")
    if method == "group_limited_greedy":
        router = replace(router, groups=config.integer("n_group"), top_groups=config.integer("topk_group"))
    return _with_hf_experts(spec, config, router, normalized=False)


def from_v3(checkpoint: Checkpoint) -> ModelSpec:
    config = Fields(checkpoint.config)
    spec = _dense_from_hf(checkpoint, "interleaved" if config.flag("rope_interleave", True) else "half")
    _known(config, "scoring_func", "sigmoid")
    _known(config, "topk_method", "noaux_tc")
    groups = config.integer("n_group", 8), config.integer("topk_group", 4)
    return _with_hf_experts(spec, config, _noaux(*groups), config.flag("norm_topk_prob", True))


def _known(config: Fields, name: str, *values: object) -> object:
    """A field that may be left out, for the first of its values."""
    value = config.values.get(name)
    if value is not None and value not in values:
        raise Unsupported(f"{name} is {value!r}; kvilt knows {', '.join(map(repr, values))} in this family")
    return values[0] if value is None else value


def _noaux(groups: int, top_groups: int) -> RouterSpec:
    """V3's routing: a bias chooses, in the groups whose best two experts have the largest scores."""
    router = RouterSpec("sigmoid", selection_bias=True, group_score="two_best", epsilon=1e-20)
    return replace(router, groups=groups, top_groups=top_groups)


def _with_hf_experts(spec: ModelSpec, config: Fields, router: RouterSpec, normalized: bool) -> ModelSpec:
    dense = config.count("first_k_dense_replace", 0 if router.scores == "softmax" else 3)
    if dense >= len(spec.layers):
        return spec
    _known(config, "moe_layer_freq", 1)
    expert = FeedForwardSpec(config.integer("moe_intermediate_size"), config.activation("hidden_act", "silu"))
    experts = ExpertsSpec(
        config.integer("n_routed_experts", high=MAX_EXPERTS),
        config.integer("num_experts_per_tok"),
        expert,
        normalized,
        replace(router, scale=config.number("routed_scaling_factor", 1.0)),
        shared_block(expert, config.count("n_shared_experts", 0)),
    )
    return with_experts(spec, experts, lambda index: index >= dense)


def _dense_from_hf(checkpoint: Checkpoint, pairing: Pairing) -> ModelSpec:
    """All but the experts."""
    config = Fields(checkpoint.config)
    if config.flag("attention_bias"):
        raise Unsupported("attention_bias is true; kvilt knows latent attention without biases")
    latent = LatentSpec(
        config.integer("kv_lora_rank"),
        config.integer("qk_nope_head_dim", high=_MOST),
        even_dims(config.integer("qk_rope_head_dim", high=_MOST), _MOST),
        config.integer("v_head_dim", high=_MOST),
        0 if config.says_none("q_lora_rank") else config.integer("q_lora_rank"),
    )
    rope = hf_rope(checkpoint.config)
    if rope.partial != 1.0:
        raise Unsupported("partial_rotary_factor: qk_rope_head_dim says what a rope turns in latent attention")
    attention = _attention(latent, config.integer("num_attention_heads", high=_MOST), rope, pairing)
    attention = replace(attention, scale=attention.scale * _hf_mscale(checkpoint, rope) ** 2)
    feed_forward = FeedForwardSpec(
        config.integer("intermediate_size"), config.activation("hidden_act", "silu"), config.flag("mlp_bias")
    )
    return ModelSpec(
        family="deepseek",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        context=config.integer("max_position_embeddings"),
        layers=(LayerSpec(attention, feed_forward),) * config.integer("num_hidden_layers", high=_MOST),
        norm_eps=config.number("rms_norm_eps"),
        tied_head=config.flag("tie_word_embeddings"),
    )


def _attention(latent: LatentSpec, heads: int, rope: RopeFields, pairing: Pairing) -> AttentionSpec:
    head_dim = latent.plain_dim + latent.rope_dim
    rope_spec = RopeSpec(rope.theta, latent.rope_dim, pairing, rope.scaling)
    return AttentionSpec(heads, 1, head_dim, head_dim**-0.5, rope_spec, reach=Latent(latent.rope_dim), latent=latent)


def _hf_mscale(checkpoint: Checkpoint, rope: RopeFields) -> float:
    """By which queries and keys grow where positions are stretched: all their numbers, not those a rope turns alone."""
    values = checkpoint.config.get("rope_parameters") or checkpoint.config.get("rope_scaling")
    if isinstance(rope.scaling, NoScaling) or not isinstance(values, Mapping) or not values.get("mscale_all_dim"):
        return 1.0
    fields = Fields(values)
    return _mscale(fields.number("factor"), 0.1 * fields.number("mscale_all_dim"))


def _mscale(factor: float, weight: float) -> float:
    return weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    fields = gguf_fields(checkpoint)
    # Files whose key projection is cut by head give the sizes of heads under names of their own.
    own = "_mla" if fields.has("attention.key_length_mla") else ""
    rope_dim = even_dims(fields.integer("rope.dimension_count", high=_MOST), _MOST)
    head_dim = fields.integer(f"attention.key_length{own}", high=_MOST)
    if head_dim <= rope_dim:
        raise WeightError(f"attention.key_length{own}", f"must be above the {rope_dim} numbers that a rope turns")
    eps = fields.number("attention.layer_norm_rms_epsilon")
    latent = LatentSpec(
        fields.integer("attention.kv_lora_rank"),
        head_dim - rope_dim,
        rope_dim,
        fields.integer(f"attention.value_length{own}", high=_MOST),
        fields.integer("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else 0,
        eps,
    )
    attention = _gguf_attention(checkpoint, fields, latent)
    layer = LayerSpec(attention, FeedForwardSpec(fields.integer("feed_forward_length")))
    spec = ModelSpec(
        family="deepseek",
        vocab_size=gguf_vocab_size(checkpoint),
        hidden_size=fields.integer("embedding_length"),
        context=fields.integer("context_length"),
        layers=(layer,) * fields.integer("block_count", high=_MOST),
        norm_eps=eps,
        tied_head=GGUF_NAMES["head"] not in checkpoint.tensors.names(),
    )
    return _with_gguf_experts(spec, fields) if fields.count("expert_count", 0) else spec


def _with_gguf_experts(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Files of V2 do not name the gating function, which is a softmax there."""
    groups = fields.integer("expert_group_count", 1)
    top_groups = fields.integer("expert_group_used_count", groups)
    sigmoid = fields.integer("expert_gating_func", 1) == 2
    router = _noaux(groups, top_groups) if sigmoid else RouterSpec("softmax", groups=groups, top_groups=top_groups)
    router = replace(router, scale=fields.number("expert_weights_scale", 1.0))
    experts = gguf_experts(fields, fields.flag("expert_weights_norm", sigmoid), router)
    experts = replace(experts, shared=shared_block(experts.expert, fields.count("expert_shared_count", 0)))
    dense = fields.count("leading_dense_block_count", 0)
    return with_experts(spec, experts, lambda index: index >= dense)


def _gguf_attention(checkpoint: Checkpoint, fields: Fields, latent: LatentSpec) -> AttentionSpec:
    scaling, mscale = gguf_scaling(checkpoint, fields, latent.rope_dim // 2), 1.0
    if isinstance(scaling, YarnScaling) and fields.has("rope.scaling.yarn_log_multiplier"):
        # The multiplier is a tenth of mscale_all_dim; the models that have it rotate without growing.
        mscale = _mscale(scaling.factor, fields.number("rope.scaling.yarn_log_multiplier"))
        scaling = replace(scaling, magnitude=1.0)
    rope = RopeFields(fields.number("rope.freq_base", 10000.0), scaling)
    attention = _attention(latent, fields.integer("attention.head_count", high=_MOST), rope, "interleaved")
    return replace(attention, scale=attention.scale * mscale**2)


DEEPSEEK = Family(
    "deepseek",
    (
        CheckpointDialect(
            "gguf",
            ("deepseek2",),
            from_gguf,
            LATENT_GGUF_NAMES,
            GGUF_IGNORED,
            FUSED,
            stacks=GGUF_STACKS,
            extra_layers=True,
        ),
        CheckpointDialect(
            "hf", ("DeepseekV2ForCausalLM",), from_v2, LATENT_HF_NAMES, HF_IGNORED, FUSED, extra_layers=True
        ),
        CheckpointDialect(
            "hf", ("DeepseekV3ForCausalLM",), from_v3, LATENT_HF_NAMES, HF_IGNORED, FUSED, extra_layers=True
        ),
    ),
)
