"""Checkpoints of any Llama shape with random weights, made on the device they run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvilt.quant.formats import FLOAT8, FORMATS
from kvilt.quant.tensor import QuantTensor, Weight
from kvilt.weights.source import HF, Checkpoint
from kvilt.weights.tensor_storage import TensorStorage

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
# The sizes of Qwen3-0.6B, without its norms of queries and keys.
QWEN3_06B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000.0,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass
class RandomTensors:
    """Normal numbers by name, the same ones every time."""

    shapes: dict[str, tuple[int, ...]]
    device: torch.device
    dtype: torch.dtype
    format: str = ""  # of matrices, where they are packed
    storages: dict[str, TensorStorage] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def storage(self, name: str) -> TensorStorage:
        count = 1
        for size in self.shapes[name]:
            count *= size
        if self.format and len(self.shapes[name]) == 2:
            return TensorStorage(self.format, _nbytes(self.format, count))
        return TensorStorage("BF16", count * 2)

    def tensor(self, name: str) -> Weight:
        shape = self.shapes[name]
        if self.format and len(shape) == 2:
            return random_blocks(self.format, shape, self.device, sum(name.encode()))
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        seed = torch.Generator(self.device).manual_seed(sum(name.encode()))
        return torch.randn(shape, generator=seed, dtype=self.dtype, device=self.device) * (0.6 / shape[1] ** 0.5)

    def forget(self, name: str) -> None:
        del name

    def digest(self) -> str:
        return "random"

    def close(self) -> None:
        pass

    def __enter__(self) -> RandomTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _nbytes(name: str, count: int) -> int:
    return count if name == FLOAT8 else FORMATS[name].row_bytes(count)


# Where the blocks of a format hold float16, and a scale that makes weights of about one.
_HALVES = {
    "Q4_0": ((0,), 0.2), "Q4_1": ((0,), 0.2), "Q4_K": ((0,), 0.005), "Q6_K": ((208,), 0.0007), "Q8_0": ((0,), 0.014),
}  # fmt: skip


def random_blocks(name: str, shape: tuple[int, ...], device: torch.device, seed: int) -> QuantTensor:
    """A packed weight of random codes, about as large as those of an ordinary one."""
    if name == FLOAT8:
        return random_float8(shape, device, seed)
    format_, random = FORMATS[name], torch.Generator(device).manual_seed(seed)
    rows, columns = shape
    size = (rows, columns // format_.block_elements, format_.block_bytes)
    blocks = torch.randint(0, 256, size, generator=random, dtype=torch.uint8, device=device)
    places, unit = _HALVES[name]
    if name in ("Q4_1", "Q4_K"):
        least = -7.5 * unit if name == "Q4_1" else 7.5 * unit  # Q4_K subtracts it
        _put_half(blocks, 2, torch.full((*size[:2], 1), least * 0.6 / columns**0.5, device=device))
    scales = (0.75 + 0.5 * torch.rand((*size[:2], 1), generator=random, device=device)) * unit * 0.6 / columns**0.5
    for at in places:
        _put_half(blocks, at, scales)
    return QuantTensor.of_blocks(format_, (rows, columns), blocks.view(rows, -1))


def random_float8(
    shape: tuple[int, ...], device: torch.device, seed: int, scales: tuple[int, ...] | None = None
) -> QuantTensor:
    """A weight of 8-bit floats, with scales of blocks unless their shape says otherwise."""
    random, (rows, columns) = torch.Generator(device).manual_seed(seed), shape
    numbers = torch.randn((rows, columns), generator=random, dtype=torch.bfloat16, device=device) * 16
    size = scales or (-(-rows // 128), -(-columns // 128))
    own = (0.75 + 0.5 * torch.rand(size, generator=random, device=device)) / 16 * 0.6 / columns**0.5
    return QuantTensor.of_float8(numbers.to(torch.float8_e4m3fn), own)


def _put_half(blocks: Tensor, at: int, numbers: Tensor) -> None:
    blocks[..., at : at + 2] = numbers.half().view(torch.uint8)


def _gated(at: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The maps of a gated feed-forward."""
    wide, back = (inner, width), (width, inner)
    return {f"{at}gate_proj.weight": wide, f"{at}up_proj.weight": wide, f"{at}down_proj.weight": back}


def random_checkpoint(
    shape: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16, format_: str = ""
) -> Checkpoint:
    """A Llama of this shape, or a Qwen3 with experts; `format_` packs its matrices."""
    experts = shape.get("num_experts", 0)
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, **shape,
    }  # fmt: skip
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,), f"{at}post_attention_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (queries, width), f"{at}self_attn.k_proj.weight": (kv, width),
            f"{at}self_attn.v_proj.weight": (kv, width), f"{at}self_attn.o_proj.weight": (width, queries),
        }  # fmt: skip
        if not experts:
            shapes |= _gated(f"{at}mlp.", width, inner)
            continue
        shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{at}mlp.gate.weight"] = (experts, width)
        for e in range(experts):
            shapes |= _gated(f"{at}mlp.experts.{e}.", width, config["moe_intermediate_size"])
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    return Checkpoint(Path("random"), HF, config, {}, RandomTensors(shapes, torch.device(device), dtype, format_))
