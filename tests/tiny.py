"""A tiny random llama checkpoint, written without transformers: quick to make, real all the way through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 61, 24, 3, 4, 2, 40


def write_tiny(folder: Path, **changes: Any) -> Path:
    """A folder with config.json and model.safetensors; `changes` go into the config."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config["vocab_size"]), folder / "model.safetensors")
    return folder


def write_tiny_of_bytes(folder: Path) -> Path:
    """The same with a tokenizer whose tokens are bytes, and a longer context."""
    write_tiny(folder, vocab_size=256, max_position_embeddings=1024)
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    return folder


def _tensors(vocab: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(11)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 0.35

    head = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": matrix(vocab, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return tensors


def write_tiny_mixed(folder: Path, window: int, context: int = 512) -> Path:
    """The same with two layer groups: the first layer sees everything, the others a window."""
    write_tiny(
        folder,
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=context,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", *["sliding_attention"] * (LAYERS - 1)],
    )
    tensors, sizes = _tensors(VOCAB), {"q": HIDDEN, "k": HIDDEN // HEADS * KV_HEADS, "v": HIDDEN // HEADS * KV_HEADS}
    for i in range(LAYERS):
        for name, size in sizes.items():
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.linspace(-0.2, 0.2, size)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tiny_hybrid(folder: Path, context: int = 512) -> Path:
    """A model with two gated delta nets around a layer of attention."""
    write_tiny(
        folder,
        architectures=["Qwen3NextForCausalLM"],
        max_position_embeddings=context,
        partial_rotary_factor=0.5,
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_only_layers=[0, 1, 2],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    )
    random, kept = torch.Generator().manual_seed(13), ("embed", "norm", "mlp")
    tensors = {name: one for name, one in _tensors(VOCAB).items() if any(part in name for part in kept)}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 0.35

    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = torch.zeros(HIDDEN)  # these norms are stored as offsets from 1
    at = "model.layers.1.self_attn"
    tensors |= {
        f"{at}.q_proj.weight": matrix(2 * HEADS * 8, HIDDEN),
        f"{at}.k_proj.weight": matrix(KV_HEADS * 8, HIDDEN),
        f"{at}.v_proj.weight": matrix(KV_HEADS * 8, HIDDEN),
        f"{at}.o_proj.weight": matrix(HIDDEN, HEADS * 8),
        f"{at}.q_norm.weight": torch.zeros(8),
        f"{at}.k_norm.weight": torch.zeros(8),
    }
    for i in (0, 2):
        at = f"model.layers.{i}.linear_attn"
        tensors |= {
            f"{at}.in_proj_qkvz.weight": matrix(2 * 16 + 2 * 32, HIDDEN),
            f"{at}.in_proj_ba.weight": matrix(8, HIDDEN),
            f"{at}.conv1d.weight": matrix(64, 4)[:, None].contiguous(),
            f"{at}.dt_bias": torch.linspace(-1.0, 1.0, 4),
            f"{at}.A_log": torch.linspace(-2.0, 0.5, 4),
            f"{at}.norm.weight": torch.ones(8),
            f"{at}.out_proj.weight": matrix(HIDDEN, 32),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
