"""The mean squares of what enters each matrix, beside those that hooks see in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from kvilt.errors import InputError
from kvilt.executor.importance import CHUNK_TOKENS, importance
from kvilt.weights.source import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    made = tmp_path_factory.mktemp("mixtral")
    MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(made)
    return made


def hooked(folder: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    """The mean squares of the inputs of attention's projections, chunk by chunk as kvilt reads a text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(("q_proj", "o_proj")):
            module.register_forward_hook(
                lambda _m, given, _out, name=name: seen.setdefault(f"{name}.weight", []).append(given[0][0])
            )
    with torch.no_grad():
        for start in range(0, len(ids), CHUNK_TOKENS):
            model(torch.tensor([ids[start : start + CHUNK_TOKENS]]))
    return {name: torch.cat(parts).double().square().mean(0).float() for name, parts in seen.items()}


def test_inputs_are_those_that_transformers_sees(folder: Path) -> None:
    ids, told = [i * 7 % 60 for i in range(700)], []
    found = importance(open_checkpoint(folder), ids, lambda done, total: told.append((done, total)))
    truth = hooked(folder, ids)
    assert len(truth) == 4
    for name, squares in truth.items():
        torch.testing.assert_close(found[name], squares[None], rtol=1e-3, atol=1e-6)
    assert told == [(512, 700), (700, 700)]


def test_each_expert_has_inputs_of_its_own(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    found = importance(checkpoint, list(range(60)))
    matrices = [name for name in checkpoint.tensors.names() if len(checkpoint.tensors.shape(name)) > 1]
    missing = [name for name in matrices if name not in found]
    assert missing == ["model.embed_tokens.weight"]
    experts = [name for name in found if "experts" in name and "w2" in name]
    assert len({tuple(found[name].flatten().tolist()) for name in experts}) == len(experts) >= 8


def test_a_text_that_says_nothing_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="longer"):
        importance(open_checkpoint(folder), [1])
