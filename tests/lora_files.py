"""PEFT folders and GGUF adapters for the tiny model, written without peft: any ranks, parts, dtypes and damage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tiny import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB
from torch import Tensor

HEAD = HIDDEN // HEADS
SHAPES = {  # out, in
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
ALL = tuple(SHAPES)


def lora_tensors(
    rank: int, parts: Sequence[str] = ALL, seed: int = 0, dtype: torch.dtype = torch.float32, size: float = 0.3
) -> dict[str, Tensor]:
    """Both halves of every part of every layer; `embed_tokens` and `lm_head` may be among the parts."""
    random = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random) * size).to(dtype)

    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for part in parts:
            if part in SHAPES:
                out, into = SHAPES[part]
                at = f"base_model.model.model.layers.{layer}.{part}"
                tensors |= {f"{at}.lora_A.weight": of(rank, into), f"{at}.lora_B.weight": of(out, rank)}
    if "embed_tokens" in parts:
        at = "base_model.model.model.embed_tokens"
        tensors |= {f"{at}.lora_embedding_A": of(rank, VOCAB), f"{at}.lora_embedding_B": of(HIDDEN, rank)}
    if "lm_head" in parts:
        at = "base_model.model.lm_head"
        tensors |= {f"{at}.lora_A.weight": of(rank, HIDDEN), f"{at}.lora_B.weight": of(VOCAB, rank)}
    return tensors


def with_magnitudes(tensors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The same adapter with a length for each output (DoRA)."""
    random = torch.Generator().manual_seed(seed)
    lengths = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): torch.rand(len(up), generator=random) + 0.5
        for name, up in tensors.items()
        if name.endswith("lora_B.weight")
    }
    return {**tensors, **lengths}


def write_lora(
    folder: Path,
    rank: int = 4,
    parts: Sequence[str] = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """A folder with an adapter; `config` goes over the usual fields, and `use_dora` brings magnitudes along."""
    if config.get("use_dora") and tensors is None:
        tensors = with_magnitudes(lora_tensors(rank, parts, seed, dtype), seed)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(parts), **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(tensors or lora_tensors(rank, parts, seed, dtype)), folder / "adapter_model.safetensors")
    return folder


def write_gguf_lora(
    path: Path, tensors: Mapping[str, Any] | None = None, architecture: str = "llama", **fields: Any
) -> Path:
    """An adapter of q of every layer; `tensors` and `fields` go over the usual ones, None leaves one out."""
    dice = np.random.default_rng(3)
    held: dict[str, Any] = {}
    for layer in range(LAYERS):
        at = f"blk.{layer}.attn_q.weight"
        held[f"{at}.lora_a"] = dice.standard_normal((4, HIDDEN), np.float32)
        held[f"{at}.lora_b"] = dice.standard_normal((HIDDEN, 4), np.float32)
    held |= dict(tensors or {})
    writer = gguf.GGUFWriter(path, architecture)
    said = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | fields
    for name, value in said.items():
        match value:
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case list():
                writer.add_array(name, value)
    for name, tensor in held.items():
        if tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
