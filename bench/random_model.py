"""Checkpoints of any shape with random weights, made on the device they run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvilt.models.assemble import tensor_shapes
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
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "rope_theta": 1000000.0,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
}  # fmt: skip
QWEN35_9B = {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 248320, "rope_theta": 10000000.0, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
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
    last: tuple[str, Weight] | None = None

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
        if name.endswith(("_blocks", "_scales")):
            return TensorStorage("U8", count)
        return TensorStorage("BF16", count * 2)

    def tensor(self, name: str) -> Weight:
        if self.last is None or self.last[0] != name:  # stacked experts are taken one after the other
            self.last = name, self._made(name)
        return self.last[1]

    def _made(self, name: str) -> Weight:
        shape = self.shapes[name]
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (118, 121)  # weights of about 0.01
            seed = torch.Generator(self.device).manual_seed(sum(name.encode()))
            return torch.randint(low, high, shape, generator=seed, dtype=torch.uint8, device=self.device)
        if self.format and len(shape) == 2:
            return random_blocks(self.format, shape, self.device, sum(name.encode()))
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        seed = torch.Generator(self.device).manual_seed(sum(name.encode()))
        return torch.randn(shape, generator=seed, dtype=self.dtype, device=self.device) * (0.6 / shape[1] ** 0.5)

    def forget(self, name: str) -> None:
        if self.last is not None and self.last[0] == name:
            self.last = None

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


def random_mxfp4(shape: tuple[int, ...], device: torch.device, seed: int) -> QuantTensor:
    """A weight of MXFP4, of numbers about 0.01."""
    format_, random, (rows, columns) = FORMATS["MXFP4"], torch.Generator(device).manual_seed(seed), shape
    size = (rows, columns // format_.block_elements, format_.block_bytes)
    blocks = torch.randint(0, 256, size, generator=random, dtype=torch.uint8, device=device)
    blocks[..., 0] = 118 + blocks[..., 0] % 3
    return QuantTensor.of_blocks(format_, (rows, columns), blocks.view(rows, -1))


def _put_half(blocks: Tensor, at: int, numbers: Tensor) -> None:
    blocks[..., at : at + 2] = numbers.half().view(torch.uint8)


class _Blocks:
    """Says of the tensors of MXFP4 blocks that a checkpoint has them."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith("_blocks")


def random_checkpoint(
    shape: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16, format_: str = ""
) -> Checkpoint:
    """A model of this configuration, a Llama if it does not say, or a Qwen3 with experts; `format_` packs its matrices.

    Only gpt-oss has MXFP4, in its experts.
    """
    architecture = "Qwen3MoeForCausalLM" if shape.get("num_experts", 0) else "LlamaForCausalLM"
    config = {
        "architectures": [architecture], "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, **shape,
    }  # fmt: skip
    tensors = RandomTensors({}, torch.device(device), dtype, "" if format_ == "MXFP4" else format_)
    checkpoint = Checkpoint(Path("random"), HF, config, {}, tensors)
    tensors.shapes.update(tensor_shapes(checkpoint, _Blocks() if format_ == "MXFP4" else ()))
    return checkpoint
