"""A GGUF file in another format: what the gguf package reads, what stays as it was, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvilt.errors import ParamError
from kvilt.weights.gguf import GGUFFile
from kvilt.weights.quantize import TYPES, Quantized, quantize_tensors

F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
ODD = "blk.0.attn_output.weight"  # whose rows fill blocks of 32, and none of 256
ROUTER = "blk.0.ffn_gate_inp.weight"
EXPERTS = "blk.0.ffn_down_exps.weight"


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    dice = np.random.default_rng(3)

    def numbers(*shape: int) -> np.ndarray[Any, Any]:
        return (dice.standard_normal(shape) * 0.1).astype(np.float32)

    return {
        "token_embd.weight": numbers(40, 256),
        "output.weight": numbers(40, 256),
        "blk.0.attn_q.weight": numbers(64, 256),
        ODD: numbers(256, 96),
        "blk.0.attn_k.weight": numbers(8, 40),
        ROUTER: numbers(4, 256),
        EXPERTS: numbers(4, 32, 256),
        "blk.0.attn_norm.weight": numbers(256),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source.gguf")


def write(path: Path, *without: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_uint64("llama.odd", 7)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_token_list([f"token{i}" for i in range(39)] + [b"\xff\xfe"])
    writer.add_array("llama.scales", [0.5, 1.5])
    for name, data in tensors().items():
        if name not in without:
            writer.add_tensor(name, data if "norm" in name else data.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(source: Path, out: Path, name: str = "Q4_K", **more: Any) -> Quantized:
    with GGUFFile.open(source) as file:
        return quantize_tensors(file, out, name, **more)


@pytest.mark.parametrize("name", TYPES)
def test_the_gguf_package_reads_the_file(source: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.gguf"
    done = quantized(source, out, name)
    reader = gguf.GGUFReader(out)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert [one.name for one in reader.tensors] == list(tensors())
    for key, truth in tensors().items():
        floats = gguf.dequantize(found[key].data, found[key].tensor_type)
        assert floats.shape == truth.shape
        assert np.linalg.norm(floats - truth) < 0.09 * np.linalg.norm(truth)
    assert sum(done.formats.values()) == len(found)
    assert done.bytes_after < done.bytes_before
    assert int(reader.fields["general.file_type"].parts[-1][0]) == TYPES[name].file_type


def test_each_tensor_gets_the_format_that_fits_it(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "out.gguf")
    formats = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert formats == {
        "token_embd.weight": "Q4_K", "output.weight": "Q6_K", "blk.0.attn_q.weight": "Q4_K", ODD: "Q5_0",
        "blk.0.attn_k.weight": "F16", ROUTER: "F16", EXPERTS: "Q4_K", "blk.0.attn_norm.weight": "F32",
    }  # fmt: skip


def test_an_embedding_that_is_the_head_too_gets_the_format_of_heads(tmp_path: Path) -> None:
    quantized(write(tmp_path / "tied.gguf", "output.weight"), tmp_path / "out.gguf")
    formats = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert formats["token_embd.weight"] == "Q6_K"


def test_metadata_keeps_its_types(source: Path, tmp_path: Path) -> None:
    quantized(source, tmp_path / "out.gguf")
    before, after = (gguf.GGUFReader(path).fields for path in (source, tmp_path / "out.gguf"))
    for key, field in before.items():
        if key != "general.file_type" and not key.startswith("GGUF."):
            assert after[key].types == field.types
            assert [bytes(part) for part in after[key].parts[1:]] == [bytes(part) for part in field.parts[1:]]
    assert after.keys() - before.keys() == {"general.quantization_version"}


def test_importance_reaches_its_own_matrix(source: Path, tmp_path: Path) -> None:
    importance = torch.rand(4, 256, generator=torch.Generator().manual_seed(1)) ** 4
    importance[2] = 0  # an expert that no token chose
    done = quantized(source, tmp_path / "with.gguf", importances={EXPERTS: importance})
    quantized(source, tmp_path / "without.gguf")
    losses = []
    for path in (tmp_path / "with.gguf", tmp_path / "without.gguf"):
        found = next(one for one in gguf.GGUFReader(path).tensors if one.name == EXPERTS)
        error = gguf.dequantize(found.data, found.tensor_type) - tensors()[EXPERTS]
        losses.append(
            [float((importance[e].numpy() * error[e] ** 2).sum()) for e in range(4)] + [(error[2] ** 2).sum()]
        )
    weighted, plain = losses
    assert all(weighted[e] < 0.95 * plain[e] for e in (0, 1, 3))
    assert weighted[4] == plain[4]
    assert set(done.without_importance) == {"token_embd.weight", "output.weight", "blk.0.attn_q.weight", ODD}


def test_progress_goes_to_the_end_and_a_second_pass_says_so(source: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    quantized(source, tmp_path / "once.gguf", on_tensor=lambda *now: told.append(now))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert [name for _, _, name in told[:-1]] == list(tensors())
    assert quantized(tmp_path / "once.gguf", tmp_path / "twice.gguf").packed_before == ("Q4_K", "Q5_0", "Q6_K")


def test_what_cannot_be_written_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(ParamError, match="type"):
        quantized(source, tmp_path / "out.gguf", "Q3_K")

    def stop(done: int, _total: int, _name: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantized(source, tmp_path / "out.gguf", on_tensor=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.gguf"]
    assert source.read_bytes() == before
