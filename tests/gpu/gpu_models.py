"""One random checkpoint on several backends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvilt.executor.executor import ModelExecutor

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 256, 384, 3, 8, 2


def write_model(folder: Path, **changes: object) -> Path:
    """A random model whose heads have 32 numbers: small, and wide enough for matrix instructions."""
    config = {
        "architectures": ["MistralForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": None,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    random = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * (1.5 / columns**0.5)

    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Models:
    """One checkpoint on several backends."""

    folder: Path
    reference: ModelExecutor  # float32 on the CPU
    exact: ModelExecutor  # float32 on the GPU
    usual: ModelExecutor  # bfloat16 on the GPU
