"""Random configurations of Gemma 3n and Gemma 4 E2B and E4B agree with transformers, or are refused by name."""

from __future__ import annotations

from typing import Any

from agreement import BACKENDS, agrees_or_is_refused, flags, sizes
from effort import examples
from families import SPECIALS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig, Gemma4ForCausalLM, Gemma4TextConfig

KINDS = st.sampled_from(["sliding_attention", "full_attention"])


@st.composite
def shared(draw: st.DrawFn) -> dict[str, Any]:
    """Any kinds of layers, some of which may find none of their kind to read from."""
    layers = draw(st.integers(1, 5))
    own = draw(sizes(own_head_dim=True, spread=0.15, head_dims=(8, 16, 24, 6)))
    return (
        own
        | SPECIALS
        | {
            "num_hidden_layers": layers,
            "layer_types": draw(st.lists(KINDS, min_size=layers, max_size=layers)),
            "num_kv_shared_layers": draw(st.integers(0, layers)),
            "hidden_size_per_layer_input": draw(st.integers(1, 9)),
            "vocab_size_per_layer_input": draw(st.sampled_from([53, 70, 20])),
            "sliding_window": draw(st.integers(1, 30)),
        }
    )


GEMMA4_FLAGS = ("use_double_wide_mlp", "attention_k_eq_v", "attention_bias", "enable_moe_block")


@settings(max_examples=examples(50) // 2)
@given(shared(), st.data(), BACKENDS)
def test_gemma3n(config: dict[str, Any], data: st.DataObject, backend: str) -> None:
    streams, layers = data.draw(st.integers(2, 5)), config["num_hidden_layers"]
    share = st.sampled_from([0.0, 0.3, 0.95])
    own = {
        "altup_num_inputs": streams,
        "altup_active_idx": data.draw(st.integers(0, streams - 1)),
        "laurel_rank": data.draw(st.integers(1, 9)),
        "activation_sparsity_pattern": data.draw(st.lists(share, min_size=layers, max_size=layers)),
    } | data.draw(st.fixed_dictionaries(flags("altup_correct_scale", "attention_bias")))
    hidden = config["num_attention_heads"] * data.draw(st.integers(2, 6))  # transformers wants a multiple
    agrees_or_is_refused(
        lambda: Gemma3nForCausalLM(Gemma3nTextConfig(**config | own | {"hidden_size": hidden})), backend
    )


@settings(max_examples=examples(50) // 2)
@given(shared(), st.fixed_dictionaries(flags(*GEMMA4_FLAGS)), st.integers(1, 6), st.integers(1, 3), BACKENDS)
def test_gemma4(config: dict[str, Any], own: dict[str, Any], experts: int, top_k: int, backend: str) -> None:
    wide = {"global_head_dim": 2 * config["head_dim"], "moe_intermediate_size": 20}
    wide |= {"num_experts": experts, "top_k_experts": min(top_k, experts)}
    agrees_or_is_refused(lambda: Gemma4ForCausalLM(Gemma4TextConfig(**config | own | wide)), backend)
