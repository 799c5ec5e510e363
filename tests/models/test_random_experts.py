"""Random configurations of experts load and agree with transformers, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agreement import BACKENDS, PARTIAL, agrees_or_is_refused, flags, rope, sizes
from effort import examples
from families import SMALL, SPECIALS, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor

TINY: dict[str, Any] = SMALL | SPECIALS | {"vocab_size": 31, "num_hidden_layers": 2, "initializer_range": 0.3}
EAGER = {"experts_implementation": "eager"}  # the faster ones take widths of whole 16 bytes only
WIDTH = st.integers(2, 40)  # transformers writes a width of 1 as a vector
Options = dict[str, st.SearchStrategy[Any]]


@st.composite
def routed(draw: st.DrawFn, count: str, chosen: str, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Experts of any number and width, under the names that a config has for them."""
    experts = draw(st.integers(1, 9))
    return {count: experts, chosen: draw(st.integers(1, experts)), width: draw(WIDTH)}


@st.composite
def grouped(draw: st.DrawFn) -> dict[str, Any]:
    """Experts of GLM-4, some of whose groups are used."""
    groups, size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    used = draw(st.integers(1, groups))
    chosen = draw(st.integers(1, used * size))
    own = {"n_routed_experts": groups * size, "num_experts_per_tok": chosen, "n_group": groups, "topk_group": used}
    return own | {"moe_intermediate_size": draw(WIDTH), "n_shared_experts": draw(st.integers(1, 3))}


WINDOWS: Options = flags("use_sliding_window") | {"sliding_window": st.integers(1, 30)}
SPARSE: Options = {
    "decoder_sparse_step": st.integers(1, 3),
    "mlp_only_layers": st.lists(st.integers(0, 3), max_size=2, unique=True),
}
TIED = flags("tie_word_embeddings")
QWEN = routed("num_experts", "num_experts_per_tok")
YARN = rope(
    factor=st.sampled_from([2.0, 8.0]),
    original_max_position_embeddings=st.sampled_from([16, 32]),
    truncate=st.booleans(),
    beta_fast=st.sampled_from([32.0, 4.0]),
    kind="yarn",
)

# A family: its config, its model, whether heads have a size of their own, its experts, and what it may say beside them.
FAMILIES: dict[str, tuple[Any, Any, bool, st.SearchStrategy[dict[str, Any]], Options]] = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        True,
        QWEN,
        flags("norm_topk_prob", "attention_bias") | TIED | WINDOWS | SPARSE,
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        False,
        QWEN,
        flags("norm_topk_prob", "qkv_bias")
        | {"shared_expert_intermediate_size": st.integers(1, 40), "max_window_layers": st.integers(0, 3)}
        | (TIED | WINDOWS | SPARSE),
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        True,
        routed("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        TIED | {"sliding_window": st.integers(1, 30)},
    ),
    "olmoe": (
        OlmoeConfig,
        OlmoeForCausalLM,
        False,
        routed("num_experts", "num_experts_per_tok", "intermediate_size"),
        flags("norm_topk_prob", "attention_bias") | TIED | {"clip_qkv": st.just(1.5)},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        True,
        grouped(),
        flags("norm_topk_prob", "use_qk_norm", "attention_bias")
        | TIED
        | {
            "first_k_dense_replace": st.integers(0, 3),
            "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
            "rope_parameters": PARTIAL,
        },
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        False,
        routed("moe_num_experts", "moe_k"),
        flags("use_bias")
        | TIED
        | {
            "moe_num_shared_experts": st.integers(0, 2),
            "moe_layer_start_index": st.integers(0, 2),
            "moe_layer_end_index": st.sampled_from([-1, 0, 1, 2]),
            "moe_layer_interval": st.integers(1, 2),
        },
    ),
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        True,
        routed("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        flags("use_qk_norm", "attn_temperature_tuning", "attention_bias")
        | TIED
        | {
            "attention_chunk_size": st.integers(1, 30),
            "floor_scale": st.integers(1, 9),
            "attn_scale": st.sampled_from([0.1, 0.5]),
            "interleave_moe_layer_step": st.integers(1, 3),
            "no_rope_layer_interval": st.integers(1, 4),
            "intermediate_size_mlp": WIDTH,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        False,
        grouped(),
        flags("norm_topk_prob", "rope_interleave", "attention_bias")
        | TIED
        | {
            "kv_lora_rank": st.integers(1, 40),
            "q_lora_rank": st.none() | st.integers(1, 40),
            "qk_nope_head_dim": st.integers(1, 20),
            "qk_rope_head_dim": st.sampled_from([2, 6, 8, 16, 5]),
            "v_head_dim": st.integers(1, 20),
            "first_k_dense_replace": st.integers(0, 3),
            "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        True,
        routed("num_local_experts", "num_experts_per_tok", "intermediate_size"),
        flags("attention_bias") | TIED | {"sliding_window": st.integers(1, 30), "rope_parameters": YARN | rope()},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(50) // 2)
@given(data=st.data(), backend=BACKENDS)
def test_random_experts(family: str, data: st.DataObject, backend: str) -> None:
    config, model, own_head_dim, experts, options = FAMILIES[family]
    chosen = data.draw(sizes(own_head_dim, head_dims=(8, 16, 24))) | data.draw(experts)
    chosen |= data.draw(st.fixed_dictionaries({}, optional=options))
    agrees_or_is_refused(lambda: model(config(**SPECIALS | chosen | EAGER)), backend)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"n_group": 4}, WeightError, "n_group"),
        ({"n_group": 2, "topk_group": 3}, WeightError, "topk_group"),
        ({"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, WeightError, "topk_group"),
        ({"num_experts_per_tok": 7}, WeightError, "num_experts_per_tok"),
        ({"first_k_dense_replace": -1}, WeightError, "first_k_dense_replace"),
        ({"hidden_act": "mish"}, Unsupported, "hidden_act"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    own = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    config = Glm4MoeConfig(**TINY | own)
    model = Glm4MoeForCausalLM(config)
    for name, value in changes.items():
        setattr(model.config, name, value)
    write_checkpoint(model, tmp_path)
    with pytest.raises(error, match=says):
        load_executor(tmp_path, RunConfig(kv_memory=1 << 20, backend="reference"))


def test_clipped_queries_of_olmoe_are_refused_by_name(tmp_path: Path) -> None:
    own = {"num_experts": 3, "num_experts_per_tok": 2, "clip_qkv": 4.0}
    write_checkpoint(OlmoeForCausalLM(OlmoeConfig(**TINY | own)), tmp_path)
    with pytest.raises(Unsupported, match="clip_qkv"):
        load_executor(tmp_path, RunConfig(kv_memory=1 << 20, backend="reference"))
