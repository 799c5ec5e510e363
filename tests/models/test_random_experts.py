"""Random configurations of experts load and agree with transformers, or are refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SMALL, SPECIALS, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor

IDS = [5, 17, 3, 29, 11, 2, 23, 8, 30]
TINY: dict[str, Any] = SMALL | SPECIALS | {"vocab_size": 31, "num_hidden_layers": 2, "initializer_range": 0.3}
TINY["experts_implementation"] = "eager"  # the faster ones take widths of whole 16 bytes only


@st.composite
def models(draw: st.DrawFn) -> PreTrainedModel:
    """A tiny model of one of the families, with any number of experts of any width."""
    experts = draw(st.integers(2, 9))
    top_k, width = draw(st.integers(1, experts)), draw(st.integers(2, 40))
    family = draw(st.sampled_from(["qwen3", "qwen2", "mixtral", "glm4", "ernie"]))
    torch.manual_seed(draw(st.integers(0, 5)))
    flag = st.booleans()
    match family:
        case "qwen3":
            own = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
            own |= {"norm_topk_prob": draw(flag), "head_dim": 8, "decoder_sparse_step": draw(st.integers(1, 3))}
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY | own))
        case "qwen2":
            own = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": width}
            own |= {"shared_expert_intermediate_size": draw(st.integers(1, 40)), "norm_topk_prob": draw(flag)}
            own |= {"qkv_bias": draw(flag), "mlp_only_layers": draw(st.lists(st.integers(0, 1), max_size=2))}
            return Qwen2MoeForCausalLM(Qwen2MoeConfig(**TINY | own))
        case "mixtral":
            own = {"num_local_experts": experts, "num_experts_per_tok": top_k, "intermediate_size": width}
            return MixtralForCausalLM(MixtralConfig(**TINY | own))
        case "glm4":
            groups = draw(st.sampled_from([g for g in (1, 2, 3) if experts % g == 0 and experts // g >= 2] or [1]))
            size = max(2, experts) // groups
            used = draw(st.integers(1, groups))
            own = {"n_routed_experts": max(2, experts), "num_experts_per_tok": min(top_k, used * size)}
            own |= {"n_group": groups, "topk_group": used, "n_shared_experts": draw(st.integers(1, 3))}
            own |= {"moe_intermediate_size": width, "first_k_dense_replace": draw(st.integers(0, 2))}
            own |= {"norm_topk_prob": draw(flag), "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5]))}
            return Glm4MoeForCausalLM(Glm4MoeConfig(**TINY | own | {"head_dim": 8, "use_qk_norm": draw(flag)}))
        case _:
            own = {"moe_num_experts": experts, "moe_k": top_k, "moe_intermediate_size": width}
            own |= {"moe_num_shared_experts": draw(st.integers(0, 2)), "moe_layer_start_index": draw(st.integers(0, 2))}
            own |= {"moe_layer_interval": draw(st.integers(1, 2)), "tie_word_embeddings": draw(flag)}
            return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**TINY | own))


@settings(max_examples=12, deadline=None)
@given(model=models(), backend=st.sampled_from(["native", "reference"]))
def test_random_experts_agree_with_transformers(model: PreTrainedModel, backend: str) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
        theirs = model.eval()(torch.tensor([IDS])).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, Path(folder))
        executor = load_executor(
            Path(folder), RunConfig(kv_memory=1 << 20, backend=backend, threads=1, kv_dtype="float32")
        )
        with executor.create_kv_cache() as kv:
            first = executor.step(IDS[:-1], kv)[0]
            torch.testing.assert_close(first, theirs[-2], rtol=1e-4, atol=5e-4)
            torch.testing.assert_close(executor.step(IDS[-1:], kv)[0], theirs[-1], rtol=1e-4, atol=5e-4)
        executor.close()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"n_group": 4}, WeightError, "n_group"),
        ({"n_group": 2, "topk_group": 3}, WeightError, "topk_group"),
        ({"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, WeightError, "topk_group"),
        ({"num_experts_per_tok": 7}, WeightError, "num_experts_per_tok"),
        ({"first_k_dense_replace": -1}, WeightError, "first_k_dense_replace"),
        ({"hidden_act": "relu"}, Unsupported, "hidden_act"),
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
