"""Attention sinks in a decoder: read from a checkpoint where its spec asks for them, and joined to each softmax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backends import CPU_BACKENDS
from safetensors.torch import load_file, save_file
from tiny import HEADS, HIDDEN, LAYERS, write_tiny
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from kvilt.config import RunConfig
from kvilt.errors import WeightError
from kvilt.executor import load as loading
from kvilt.models.spec import AttentionSpec, ModelSpec, NoRope, each_attention
from kvilt.ops.mass import softmax_with_sinks
from kvilt.weights.source import Checkpoint

PROMPT = [1, 5, 9, 2, 7, 3]
SINKS = torch.linspace(-2.0, 3.0, HEADS)


def test_a_spec_without_sinks_shows_itself_as_it_always_did() -> None:
    """The identity of saved KV is made of it."""
    plain = AttentionSpec(2, 1, 8, 0.5, NoRope())
    assert repr(plain) == (
        "AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=0.5, rope=NoRope(), reach=Full(), qkv_bias=False, "
        "out_bias=False, qk_norm=False, soft_cap=0.0)"
    )
    assert repr(replace(plain, sinks=True)) == f"{repr(plain)[:-1]}, sinks=True)"


def test_weights_are_those_of_gpt_oss() -> None:
    random, sinks = torch.Generator().manual_seed(0), torch.tensor([0.5, -1.0, 3.0, 0.0])
    q, k, v = (torch.randn(1, heads, 5, 8, generator=random) for heads in (4, 2, 2))
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    _, theirs = gpt_oss.eager_attention_forward(module, q, k, v, None, scaling=0.3)
    scores = (q.view(2, 2, 5, 8) @ k.view(2, 1, 5, 8).mT) * 0.3
    torch.testing.assert_close(softmax_with_sinks(scores, sinks), theirs.view(2, 2, 5, 5))


def logits(folder: Path, backend: str, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a prompt and of a token after it, by a tiny model with these tensors in every layer."""
    tensors = load_file(write_tiny(folder) / "model.safetensors")
    for i in range(LAYERS):
        tensors |= {f"model.layers.{i}.self_attn.{name}": tensor.clone() for name, tensor in changed.items()}
    save_file(tensors, folder / "model.safetensors")
    executor = loading.load_executor(folder, RunConfig(kv_memory=1 << 22, backend=backend, threads=1))
    with executor.create_kv_cache() as kv:
        return torch.stack([executor.step(PROMPT, kv)[-1], executor.step([4], kv)[-1]])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_layers_read_their_sinks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = logits(tmp_path, backend, {})
    silent = logits(tmp_path, backend, {"o_proj.weight": torch.zeros(HIDDEN, HIDDEN)})
    honest = loading.read_spec

    def with_sinks(checkpoint: Checkpoint) -> ModelSpec:
        return each_attention(honest(checkpoint), lambda _, attention: replace(attention, sinks=True))

    monkeypatch.setattr(loading, "read_spec", with_sinks)
    unseen, all_seen = (logits(tmp_path, backend, {"sinks": torch.full([HEADS], x)}) for x in (-1e4, 1e4))
    torch.testing.assert_close(unseen, plain)
    torch.testing.assert_close(all_seen, silent)
    found = logits(tmp_path, backend, {"sinks": SINKS})
    assert min((found - plain).abs().max(), (found - silent).abs().max()) > 0.05
    torch.testing.assert_close(found, logits(tmp_path, "reference", {"sinks": SINKS}), rtol=5e-2, atol=5e-2)
    with pytest.raises(WeightError, match=r"self_attn\.sinks"):
        logits(tmp_path, backend, {})
