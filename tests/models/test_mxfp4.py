"""Experts in MXFP4 as gpt-oss has them in safetensors, against transformers' own way to unpack them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backends import CPU_BACKENDS
from families import gpt_oss, write_checkpoint
from safetensors.torch import load_file, save_file
from test_gguf_dialects import IDS
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvilt.config import RunConfig
from kvilt.errors import Unsupported, WeightError
from kvilt.executor.load import load_executor
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

# Packed weights are multiplied with activations of eight bits by the native kernels.
TOLERANCE = {"native": 0.1, "reference": 2e-4}


def packed_checkpoint(folder: Path) -> PreTrainedModel:
    """A model whose experts are random codes, on disk as such; and in transformers as the numbers they stand for."""
    torch.manual_seed(11)
    model = gpt_oss(intermediate_size=64, num_hidden_layers=2, initializer_range=0.2)().eval()
    write_checkpoint(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            whole, at = getattr(layer.mlp.experts, name), f"model.layers.{i}.mlp.experts.{name}"
            experts, inputs, outputs = whole.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            whole.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[at]
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_packed_experts_give_the_logits_of_their_numbers(tmp_path: Path, backend: str) -> None:
    model = packed_checkpoint(tmp_path)
    executor = load_executor(tmp_path, RunConfig(kv_memory=1 << 22, backend=backend, threads=1, kv_dtype="float32"))
    with executor.create_kv_cache() as kv, torch.no_grad():
        theirs = model(torch.tensor([IDS[:30]])).logits[0, -1]
        ours = executor.step(IDS[:30], kv)[0]
    assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE[backend]


def test_a_missing_plane_is_named(tmp_path: Path) -> None:
    packed_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"missing \(model\.layers\.1\.mlp\.experts\.down_proj_scales\)"):
        load_executor(tmp_path, RunConfig(kv_memory=1 << 22, backend="reference"))


@pytest.mark.parametrize("plane", ["blocks", "scales"])
def test_planes_whose_sizes_disagree_are_named(tmp_path: Path, plane: str) -> None:
    packed_checkpoint(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.mlp.experts.down_proj_{plane}"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=rf"of another shape \(model\.layers\.1\.mlp\.experts\.down_proj_{plane} is"):
        load_executor(tmp_path, RunConfig(kv_memory=1 << 22, backend="reference"))


def test_another_gate_is_refused(tmp_path: Path) -> None:
    write_checkpoint(gpt_oss(swiglu_limit=5.0)(), tmp_path)
    with pytest.raises(Unsupported, match="swiglu_limit"):
        load_executor(tmp_path, RunConfig(kv_memory=1 << 22, backend="reference"))


def test_all_codes_and_exponents_are_the_numbers_of_the_format() -> None:
    halves = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    levels = torch.tensor(halves + [-x for x in halves])
    low, high = torch.arange(16, dtype=torch.uint8), torch.arange(15, -1, -1, dtype=torch.uint8)
    exponents = torch.tensor([[1], [2], [120], [127], [200], [250]], dtype=torch.uint8)
    blocks = torch.cat((exponents, (low | high << 4).expand(len(exponents), 16)), dim=1)
    found = dequantize(QuantTensor.of_blocks(FORMATS["MXFP4"], (len(exponents), 32), blocks))
    scales = 2.0 ** (exponents.double() - 127)
    assert torch.equal(found, (torch.cat((levels, levels.flip(0))).double() * scales).float())
