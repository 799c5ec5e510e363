"""Random configurations load and agree with transformers, or are refused by name: never silently other logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agreement import PARTIAL, agrees_or_is_refused, flags, sizes
from effort import examples
from families import SPECIALS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

WINDOW = {"sliding_window": st.integers(1, 30)}
TIED = flags("tie_word_embeddings")
MULTIPLIER = st.floats(0.125, 4.0)
LOGITS = {"logit_scale": MULTIPLIER}
UPPER = {"max_window_layers": st.integers(0, 3)}

# What a family's config may say beside its sizes.
OPTIONS: dict[str, tuple[Callable[..., Any], Callable[[Any], PreTrainedModel], dict[str, st.SearchStrategy[Any]]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, flags("attention_bias", "mlp_bias") | TIED | {"rope_parameters": PARTIAL}),
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        flags("use_sliding_window") | TIED | WINDOW | {"max_window_layers": st.integers(0, 3)},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, flags("attention_bias") | TIED),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, flags("attention_bias") | TIED | WINDOW),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        flags("attention_bias", "mlp_bias")
        | TIED
        | dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), MULTIPLIER),
    ),
    "glm4": (Glm4Config, Glm4ForCausalLM, flags("attention_bias") | TIED | {"rope_parameters": PARTIAL}),
    "cohere2": (
        Cohere2Config,
        Cohere2ForCausalLM,
        flags("attention_bias") | TIED | WINDOW | {"logit_scale": MULTIPLIER},
    ),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM, flags("use_bias") | TIED | WINDOW),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM, flags("use_bias") | TIED),
}
OWN_HEAD_DIM = {"llama", "glm4", "ernie4_5"}


@pytest.mark.parametrize("family", sorted(OPTIONS))
@settings(max_examples=examples(50) // 2)
@given(data=st.data())
def test_a_random_config(family: str, data: st.DataObject) -> None:
    config, model, options = OPTIONS[family]
    chosen = data.draw(sizes(family in OWN_HEAD_DIM)) | data.draw(st.fixed_dictionaries({}, optional=options))
    agrees_or_is_refused(lambda: model(config(**SPECIALS | chosen)))


@settings(max_examples=examples(50) // 2)
@given(
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([2, 7, 8]),
    options=st.fixed_dictionaries(
        {},
        optional=flags("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings")
        | {"n_inner": st.integers(3, 40), "activation_function": st.sampled_from(["gelu", "gelu_new", "silu", "relu"])},
    ),
)
def test_a_random_gpt2(heads: int, head_dim: int, options: dict[str, Any]) -> None:
    own = {"n_embd": heads * head_dim, "n_head": heads, "n_layer": 2, "n_positions": 64, "initializer_range": 0.3}
    agrees_or_is_refused(lambda: GPT2LMHeadModel(GPT2Config(**SPECIALS | {"vocab_size": 53} | own | options)))
