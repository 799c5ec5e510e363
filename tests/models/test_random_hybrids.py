"""Random configurations of layers with state (gated delta nets, short convolutions) agree with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agreement import BACKENDS, PARTIAL, agrees_or_is_refused, flags, sizes
from effort import examples
from families import SPECIALS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

Options = dict[str, st.SearchStrategy[Any]]
TIED = flags("tie_word_embeddings")
SPREAD = 0.15  # a state sums over all tokens, and so does the rounding of transformers' chunks


@st.composite
def delta(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Gated delta nets of any size, in any of the layers."""
    keys = draw(st.integers(1, 4))
    values = keys * draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=layers, max_size=layers))
    kinds[draw(st.integers(0, layers - 1))] = "full_attention"  # transformers cannot run a model without one
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": draw(st.integers(1, 20)),
        "linear_value_head_dim": draw(st.integers(1, 20)),
        "linear_conv_kernel_dim": draw(st.integers(1, 6)),
        "layer_types": kinds,
    }


@st.composite
def experts(draw: st.DrawFn, optional: Options) -> dict[str, Any]:
    count = draw(st.integers(1, 7))
    return {
        "num_experts": count,
        "num_experts_per_tok": draw(st.integers(1, count)),
        "moe_intermediate_size": draw(st.integers(2, 20)),  # transformers writes a width of 1 as a vector
        "shared_expert_intermediate_size": draw(st.integers(1, 20)),
        "experts_implementation": "eager",  # the faster ones take widths of whole 16 bytes only
    } | draw(st.fixed_dictionaries({}, optional=optional))


SPARSE: Options = flags("norm_topk_prob") | {
    "decoder_sparse_step": st.integers(1, 3),
    "mlp_only_layers": st.lists(st.integers(0, 3), max_size=2),
}
BIASED = flags("attention_bias") | TIED | {"rope_parameters": PARTIAL}
DELTA: dict[str, tuple[Callable[..., Any], Callable[[Any], PreTrainedModel], Options | None]] = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, SPARSE),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, None),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {}),
}


@pytest.mark.parametrize("family", DELTA)
@settings(max_examples=examples(50) // 2)
@given(data=st.data(), backend=BACKENDS)
def test_a_random_gated_delta_net(family: str, data: st.DataObject, backend: str) -> None:
    config, model, sparse = DELTA[family]
    chosen = data.draw(sizes(own_head_dim=True, spread=SPREAD, head_dims=(8, 16, 24)))
    chosen |= data.draw(delta(chosen["num_hidden_layers"])) | data.draw(st.fixed_dictionaries({}, optional=BIASED))
    chosen |= data.draw(experts(sparse)) if sparse is not None else {}
    agrees_or_is_refused(lambda: model(config(**SPECIALS | chosen)), backend)


@settings(max_examples=examples(50) // 2)
@given(
    chosen=sizes(own_head_dim=False, spread=SPREAD),
    options=st.fixed_dictionaries(
        {"block_multiple_of": st.sampled_from([1, 7, 16])},
        optional=TIED
        | flags("block_auto_adjust_ff_dim", "conv_bias")
        | {
            "conv_L_cache": st.integers(1, 7),
            "block_ffn_dim_multiplier": st.floats(0.5, 2.0),
            "full_attn_idxs": st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
            "rope_parameters": PARTIAL,
        },
    ),
    backend=BACKENDS,
)
def test_a_random_lfm2(chosen: dict[str, Any], options: dict[str, Any], backend: str) -> None:
    agrees_or_is_refused(lambda: Lfm2ForCausalLM(Lfm2Config(**chosen | options)), backend)


@st.composite
def nemotron_h(draw: st.DrawFn) -> dict[str, Any]:
    """Blocks in any order, of any size; one of them is attention, without which nothing is supported."""
    chosen = draw(sizes(own_head_dim=True, spread=SPREAD, head_dims=(8, 16, 6)))
    blocks = st.sampled_from(["linear_attention", "full_attention", "mlp", "moe"])
    kinds = [*draw(st.lists(blocks, max_size=4)), "full_attention"]
    groups, experts = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    del chosen["num_hidden_layers"]
    return chosen | {
        "layers_block_type": draw(st.permutations(kinds)),
        "n_groups": groups,
        "mamba_num_heads": groups * draw(st.integers(1, 3)),
        "mamba_head_dim": draw(st.integers(1, 12)),
        "ssm_state_size": draw(st.integers(1, 12)),
        "conv_kernel": draw(st.integers(1, 5)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "moe_intermediate_size": draw(st.integers(2, 20)),
        "moe_shared_expert_intermediate_size": draw(st.integers(1, 20)),
        "experts_implementation": "eager",
    }


@settings(max_examples=examples(50) // 2)
@given(
    chosen=nemotron_h(),
    options=st.fixed_dictionaries(
        {},
        optional=flags("use_conv_bias", "mlp_bias", "norm_topk_prob", "use_bias")
        | {"time_step_min": st.sampled_from([0.001, 0.2]), "routed_scaling_factor": st.sampled_from([1.0, 2.5])},
    ),
    backend=BACKENDS,
)
def test_a_random_nemotron_h(chosen: dict[str, Any], options: dict[str, Any], backend: str) -> None:
    agrees_or_is_refused(lambda: NemotronHForCausalLM(NemotronHConfig(**chosen | options)), backend)
