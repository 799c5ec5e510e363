"""Small random checkpoints of every family, written by Hugging Face transformers. Adding a family adds an entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from kvilt.executor.protocol import Executor

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # large, so that a wrong mask or rope moves the logits by a lot
}
SPECIALS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # configs whose own defaults are past 97 tokens
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _llama(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: LlamaForCausalLM(LlamaConfig(**SMALL | changes))


def _gemma(**changes: Any) -> Callable[[], PreTrainedModel]:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": kinds}
    return lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL | own | changes))


def _gemma2() -> Callable[[], PreTrainedModel]:
    own = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8}
    caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
    return lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL | own | caps, attn_implementation="eager"))


def _gemma4(**changes: Any) -> Callable[[], PreTrainedModel]:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    heads = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    own = {"sliding_window": 8, "layer_types": kinds, "hidden_size_per_layer_input": 0}
    return lambda: Gemma4ForCausalLM(Gemma4TextConfig(**SMALL | SPECIALS | own | heads | changes))


GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
E_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 97,
}


def _gemma4_e(**changes: Any) -> Callable[[], PreTrainedModel]:
    """As E2B and E4B: per-layer inputs, and layers that read the KV of others."""
    heads = {"attention_k_eq_v": False, "num_global_key_value_heads": None}
    return _gemma4(**E_FIELDS | heads | changes)


def _gemma3n_text(**changes: Any) -> Gemma3nTextConfig:
    own = {"head_dim": 16, "sliding_window": 8, "laurel_rank": 10, "final_logit_softcapping": 6.0}
    own |= {"activation_sparsity_pattern": [0.8, 0.0, 0.4, 0.0, 0.0, 0.0]}
    return Gemma3nTextConfig(**SMALL | SPECIALS | E_FIELDS | own | {"initializer_range": 0.2} | changes)


def _gemma4_nested() -> PreTrainedModel:
    others = {"image_token_id": 190, "video_token_id": 191, "audio_token_id": 192}
    text = _gemma4()().config.to_dict()
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=None, **others))


def _qwen3(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL | {"head_dim": 16} | changes))


def _qwen3_moe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL | own | changes))


def _qwen2_moe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    return lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL | SPECIALS | own | changes))


def _mixtral(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: MixtralForCausalLM(MixtralConfig(**SMALL | {"num_local_experts": 4} | changes))


def _olmoe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
    return lambda: OlmoeForCausalLM(OlmoeConfig(**SMALL | SPECIALS | own | changes))


def _glm4_moe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    return lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL | SPECIALS | own | changes))


def _ernie4_5_moe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24}
    return lambda: Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SMALL | SPECIALS | own | changes))


HYBRID_KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "initializer_range": 0.15,  # a state sums over all tokens, and so does the rounding of transformers' chunks
    "layer_types": HYBRID_KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def _qwen3_next(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = DELTA | {"mlp_only_layers": [0, 1, 2, 3]}
    return lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL | SPECIALS | own | changes))


def _qwen3_5(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL | SPECIALS | DELTA | changes))


def _qwen3_5_moe() -> Callable[[], PreTrainedModel]:
    own = SPECIALS | DELTA | EXPERTS | {"linear_num_value_heads": 6}
    return lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SMALL | own))


def _qwen3_5_with_images() -> PreTrainedModel:
    text, vision = _qwen3_5_parts()
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


def _qwen3_5_moe_with_images() -> PreTrainedModel:
    text, vision = _qwen3_5_parts()
    config = Qwen3_5MoeConfig(text_config=text | EXPERTS, vision_config=vision)
    return Qwen3_5MoeForConditionalGeneration(config)


def _qwen3_5_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the text model and of the one for images."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    return SMALL | SPECIALS | DELTA | {"rope_parameters": rope}, vision


def _granite_hybrid(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"shared_intermediate_size": 20, "mamba_n_heads": 4, "mamba_d_state": 8}
    scales = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
    scales |= {"residual_multiplier": 0.4, "logits_scaling": 2.0}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    fields = SMALL | own | scales | {"layer_types": kinds, "num_local_experts": 0, "initializer_range": 0.2}
    return lambda: GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**fields | changes))


def _falcon_h1(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_state": 8, "mamba_n_groups": 2, "initializer_range": 0.2}
    scales = {"lm_head_multiplier": 0.7, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 0.6]}
    scales |= {"key_multiplier": 0.9, "attention_out_multiplier": 0.7, "attention_in_multiplier": 1.2}
    scales |= {"ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8], "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6}
    return lambda: FalconH1ForCausalLM(FalconH1Config(**SMALL | own | scales | changes))


def _nemotron_h(*kinds: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    sizes = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"}
    own = {"head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2}
    own |= {"initializer_range": 0.2, "layers_block_type": list(kinds)}
    return lambda: NemotronHForCausalLM(NemotronHConfig(**sizes | own | changes))


def _lfm2(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"]}
    return lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL | own | changes))


def _lfm2_moe(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 5}
    own |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return lambda: Lfm2MoeForCausalLM(Lfm2MoeConfig(**SMALL | own | changes))


def gpt_oss(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
    own |= {"rope_parameters": rope, "attn_implementation": "eager"}
    return lambda: GptOssForCausalLM(GptOssConfig(**SMALL | SPECIALS | own | changes))


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}


def _deepseek_v2(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**SMALL | _LATENT | changes))


def _deepseek_v3(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | _LATENT | changes))


def _phi3(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Phi3ForCausalLM(Phi3Config(**SMALL | SPECIALS | changes))


def _qwen2(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL | changes))


def _olmo2(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Olmo2ForCausalLM(Olmo2Config(**SMALL | SPECIALS | changes))


def _olmo3() -> Callable[[], PreTrainedModel]:
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": YARN_ROPE}
    own = {"sliding_window": 7, "num_hidden_layers": 4, "rope_parameters": ropes}
    return lambda: Olmo3ForCausalLM(Olmo3Config(**SMALL | SPECIALS | own))


def _granite(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    }
    return lambda: GraniteForCausalLM(GraniteConfig(**SMALL | SPECIALS | own | changes))


def _glm4(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Glm4ForCausalLM(Glm4Config(**SMALL | SPECIALS | {"head_dim": 16} | changes))


def _cohere2(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"sliding_window": 7, "num_hidden_layers": 5, "logit_scale": 0.3}
    return lambda: Cohere2ForCausalLM(Cohere2Config(**SMALL | SPECIALS | own | changes))


def _starcoder2(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Starcoder2ForCausalLM(Starcoder2Config(**SMALL | SPECIALS | changes))


def _gpt2(**changes: Any) -> Callable[[], PreTrainedModel]:
    own = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 97, "initializer_range": 0.4}
    return lambda: GPT2LMHeadModel(GPT2Config(**SPECIALS | own | changes))


def _ernie(**changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: Ernie4_5ForCausalLM(Ernie4_5Config(**SMALL | {"head_dim": 16} | changes))


def _ministral3(**changes: Any) -> Ministral3Config:
    rope = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    rope |= {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    return Ministral3Config(**SMALL | SPECIALS | {"head_dim": 16, "rope_parameters": rope} | changes)


def _mistral3(text: Callable[[], Any]) -> Callable[[], PreTrainedModel]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "pixtral", "head_dim": 8, "image_size": 16, "patch_size": 8} | sizes
    return lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(vision_config=vision, text_config=text().to_dict(), tie_word_embeddings=False)
    )


def _llama4_text(**changes: Any) -> Llama4TextConfig:
    """Chunks, full layers without rope, experts in every second layer, and a temperature that grows soon."""
    own = {"num_hidden_layers": 4, "head_dim": 8, "intermediate_size": 24, "intermediate_size_mlp": 40}
    own |= {"num_local_experts": 5, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3}
    own |= {"attention_chunk_size": 9, "floor_scale": 8, "attn_scale": 0.4}
    return Llama4TextConfig(**SMALL | SPECIALS | own | changes)


def _llama4_nested() -> PreTrainedModel:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"vision_output_dim": 16, "image_size": 28, "patch_size": 14}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    return Llama4ForConditionalGeneration(Llama4Config(text_config=_llama4_text().to_dict(), vision_config=vision))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama(),
    "llama-tied": _llama(tie_word_embeddings=True),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": _llama(head_dim=16),
    "llama3-rope": _llama(rope_parameters=LLAMA3_ROPE),
    "linear-rope": _llama(rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": 9, "head_dim": 8})),
    "mistral-full": lambda: MistralForCausalLM(MistralConfig(**SMALL | {"sliding_window": None, "head_dim": 8})),
    "qwen2": _qwen2(),
    "qwen2-windows": _qwen2(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": _qwen3(),
    "qwen3-windows": _qwen3(use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "qwen3-yarn": _qwen3(rope_parameters=YARN_ROPE),
    "qwen3-moe": _qwen3_moe(),
    "qwen3-moe-normalized": _qwen3_moe(norm_topk_prob=True, num_experts_per_tok=3),
    "qwen3-moe-some-dense": _qwen3_moe(mlp_only_layers=[2], decoder_sparse_step=2, num_hidden_layers=4),
    "qwen3-moe-window": _qwen3_moe(use_sliding_window=True, sliding_window=7),
    "qwen2-moe": _qwen2_moe(norm_topk_prob=True),
    "qwen2-moe-plain": _qwen2_moe(),
    "qwen2-moe-windows": _qwen2_moe(use_sliding_window=True, sliding_window=7, mlp_only_layers=[1]),
    "mixtral": _mixtral(),
    "mixtral-window": _mixtral(sliding_window=9),
    "olmoe": _olmoe(),
    "olmoe-normalized": _olmoe(norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True),
    "glm4-moe": _glm4_moe(use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    "glm4-moe-groups": _glm4_moe(n_group=3, topk_group=2, n_shared_experts=2, norm_topk_prob=False),
    "ernie4-5-moe": _ernie4_5_moe(),
    "qwen3.5": _qwen3_5(),
    "qwen3.5-images": _qwen3_5_with_images,
    "qwen3.5-moe": _qwen3_5_moe(),
    "qwen3.5-moe-images": _qwen3_5_moe_with_images,
    "granite-hybrid": _granite_hybrid(),
    "granite-hybrid-moe": _granite_hybrid(num_local_experts=5, num_experts_per_tok=2),
    "granite-hybrid-groups": _granite_hybrid(mamba_n_groups=2, position_embedding_type="rope", mamba_conv_bias=False),
    "granite-hybrid-attention": _granite_hybrid(layer_types=["full_attention"] * 3, position_embedding_type="rope"),
    "falcon-h1": _falcon_h1(),
    "falcon-h1-norm": _falcon_h1(mamba_rms_norm=True, tie_word_embeddings=True, mamba_conv_bias=False),
    "falcon-h1-gate-first": _falcon_h1(
        mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_d_ssm=None, mamba_n_heads=4
    ),
    "nemotron-h": _nemotron_h("linear_attention", "mlp", "full_attention", "mlp", "linear_attention"),
    "nemotron-h-biases": _nemotron_h(
        "full_attention", "linear_attention", "mlp", mlp_bias=True, use_conv_bias=False, tie_word_embeddings=True
    ),
    "nemotron-h-moe": _nemotron_h(
        *("linear_attention", "moe", "full_attention", "moe"),
        n_routed_experts=6,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=1.5,
        n_group=3,
        topk_group=2,
    ),
    "lfm2": _lfm2(),
    "lfm2-untied": _lfm2(tie_word_embeddings=False, conv_L_cache=5, block_auto_adjust_ff_dim=False),
    "lfm2-moe": _lfm2_moe(),
    "lfm2-moe-plain": _lfm2_moe(use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5),
    "qwen3-next": _qwen3_next(),
    "qwen3-next-moe": _qwen3_next(**EXPERTS, mlp_only_layers=[1]),
    "qwen3-next-experts": _qwen3_next(**EXPERTS, mlp_only_layers=[]),
    "qwen3-next-odd": _qwen3_next(
        linear_num_value_heads=2, linear_key_head_dim=5, linear_value_head_dim=3, linear_conv_kernel_dim=3
    ),
    "gpt-oss": gpt_oss(),
    "llama-yarn-tuned": _llama(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
            "truncate": False,
        }
    ),
    "phi3": _phi3(),
    "phi3-window": _phi3(sliding_window=6),
    "phi3-partial": _phi3(
        hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SMALL | SPECIALS | {"num_hidden_layers": 5})),
    "olmo2": _olmo2(),
    "olmo2-biases": _olmo2(attention_bias=True, tie_word_embeddings=True),
    "olmo3": _olmo3(),
    "granite": _granite(),
    "granite-biases": _granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "glm4": _glm4(),
    "glm4-no-bias": _glm4(attention_bias=False, tie_word_embeddings=True),
    "glm": lambda: GlmForCausalLM(GlmConfig(**SMALL | SPECIALS | {"head_dim": 16})),
    "cohere2": _cohere2(),
    "cohere2-biases": _cohere2(attention_bias=True, tie_word_embeddings=False),
    "command-r": lambda: CohereForCausalLM(CohereConfig(**SMALL | SPECIALS | {"logit_scale": 0.5})),
    "starcoder2": _starcoder2(),
    "starcoder2-window": _starcoder2(sliding_window=9, use_bias=False, tie_word_embeddings=False, hidden_act="gelu"),
    "gpt2": _gpt2(),
    "gpt2-by-layer": _gpt2(scale_attn_by_inverse_layer_idx=True, n_inner=40, tie_word_embeddings=False),
    "ernie4_5": _ernie(),
    "ernie4_5-biases": _ernie(use_bias=True, tie_word_embeddings=False),
    "ministral3": lambda: Ministral3ForCausalLM(_ministral3()),
    "mistral3-ministral3": _mistral3(_ministral3),
    "mistral3-mistral": _mistral3(lambda: MistralConfig(**SMALL | {"sliding_window": None, "head_dim": 8})),
    "llama4": lambda: Llama4ForCausalLM(_llama4_text(rope_parameters=LLAMA3_ROPE)),
    "llama4-nested": _llama4_nested,
    # Files of llama.cpp have no other pattern of layers, chunks and temperatures.
    "llama4-as-published": lambda: Llama4ForCausalLM(
        _llama4_text(no_rope_layer_interval=4, attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1)
    ),
    "llama4-top-2": lambda: Llama4ForCausalLM(
        _llama4_text(
            use_qk_norm=False, attn_temperature_tuning=False, num_experts_per_tok=2, interleave_moe_layer_step=1
        )
    ),
    "deepseek-v2": _deepseek_v2(topk_method="group_limited_greedy", n_group=3, topk_group=2),
    "deepseek-v2-lite": _deepseek_v2(q_lora_rank=None),
    "deepseek-v3": _deepseek_v3(
        n_group=3,
        topk_group=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
    ),
    "deepseek-v3-halves": _deepseek_v3(rope_interleave=False, first_k_dense_replace=3),
    "gemma2": _gemma2(),
    "gemma4": _gemma4(),
    "gemma4-nested": _gemma4_nested,
    "gemma4-own-values": _gemma4(attention_k_eq_v=False, final_logit_softcapping=6.0),
    "gemma4-moe": _gemma4(**GEMMA4_EXPERTS),
    "gemma4-e": _gemma4_e(),
    "gemma4-e-wide": _gemma4_e(use_double_wide_mlp=True, attention_bias=True, num_kv_shared_layers=4),
    "gemma3n": lambda: Gemma3nForCausalLM(_gemma3n_text()),
    "gemma3n-other": lambda: Gemma3nForCausalLM(
        _gemma3n_text(
            altup_num_inputs=3,
            altup_active_idx=1,
            altup_correct_scale=False,
            vocab_size_per_layer_input=80,
            intermediate_size=[40, 44, 48, 52, 56, 60],
        )
    ),
    "gemma3": _gemma(),
    "gemma3-capped": _gemma(final_logit_softcapping=5.0),
}

# Layers of these read the KV of others.
SHARED_KV = frozenset(name for name in FAMILIES if name.startswith(("gemma3n", "gemma4-e")))
# With recurrent state.
RECURRENT = frozenset({"granite-hybrid", "granite-hybrid-groups", "granite-hybrid-moe"}) | {
    name for name in FAMILIES if name.startswith(("falcon-h1", "lfm2", "nemotron-h", "qwen3-next", "qwen3.5"))
}

# Another option of a family that runs as a whole: by default these run on one backend.
VARIANTS = frozenset(
    {
        "olmo2-biases",
        "granite-biases",
        "falcon-h1-norm",
        "falcon-h1-gate-first",
        "granite-hybrid-attention",
        "nemotron-h-biases",
        "nemotron-h-moe",
        "granite-hybrid-groups",
        "granite-hybrid-moe",
        "glm4-no-bias",
        "glm",
        "cohere2-biases",
        "command-r",
        "starcoder2-window",
        "gpt2-by-layer",
        "ernie4_5-biases",
        "gemma4-nested",
        "gemma4-e-wide",
        "gemma3n-other",
        "gemma4-own-values",
        "lfm2-moe-plain",
        "mistral3-mistral",
        "qwen3.5-moe-images",
        "mistral3-ministral3",
        "olmoe-normalized",
        "llama4-nested",
        "llama4-top-2",
        "deepseek-v2-lite",
        "deepseek-v3-halves",
    }
)


# Variants whose kind of attention or of routing other entries cover: they wait for --slow.
SLOW = {
    "llama4-as-published",
    "qwen3-next-experts",
    "qwen3-moe-window",
    "qwen2-moe-plain",
    "qwen2-moe-windows",
    "mixtral-window",
}


RANDOM_FROM_ONE = ("bias", "output_scale", "router.scale", "per_expert_scale")


def random_model(name: str) -> PreTrainedModel:
    """A model of that family with random weights, the same ones every time."""
    torch.manual_seed(sum(name.encode()))
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            # Not the trivial values they start with.
            if "norm" in tensor_name or ".ln_" in tensor_name or tensor_name.endswith(RANDOM_FROM_ONE):
                tensor.add_(torch.randn_like(tensor) * 0.2)
        for tensor_name, tensor in model.named_buffers():
            if tensor_name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if tensor_name.endswith("layer_scalar"):
                tensor.mul_(0.7)
    return model


def write_checkpoint(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """The model as a folder on disk."""
    model.save_pretrained(folder, **options)
    return folder


@dataclass(frozen=True)
class Pair:
    """The same weights twice."""

    oracle: PreTrainedModel
    executor: Executor
    name: str  # of the entry and the backend

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The oracle's logits, [tokens, vocab]."""
        with torch.no_grad():
            return self.oracle(torch.tensor([ids])).logits[0].float()
