"""Sound GGUF files: what the gguf package writes is read back, and real weights equal that package's reading."""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvilt.errors import WeightError
from kvilt.quant.block_scales import HALF_SCALES
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import to_float
from kvilt.weights import gguf as gguf_file
from kvilt.weights.gguf import GGUFFile
from kvilt.weights.source import open_checkpoint

Craft = Any  # conftest.Craft


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "naïve 🧵")
    writer.add_array("a.flags", [True, False])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, 0.5])
    writer.add_array("a.words", ["x", "", "ß"])
    generator = np.random.default_rng(0)
    writer.add_tensor("plain", generator.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("half", generator.standard_normal((2, 3, 4)).astype(np.float16))
    packed = gguf.quantize(generator.standard_normal((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_comes_back_as_python_values(written: Path) -> None:
    with GGUFFile.open(written) as file:
        found = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert found == {
        "a.u8": 200,
        "a.i8": -100,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 2**32 - 1,
        "a.i32": -(2**31),
        "a.u64": 2**64 - 1,
        "a.i64": -(2**63),
        "a.f32": 0.5,
        "a.f64": 1e300,
        "a.bool": True,
        "a.text": "naïve 🧵",
        "a.flags": [True, False],
        "a.ints": [1, -2, 3],
        "a.floats": [0.25, 0.5],
        "a.words": ["x", "", "ß"],
    }
    assert found["a.bool"] is True


def test_tensors_equal_the_gguf_packages_reading(written: Path) -> None:
    with GGUFFile.open(written) as file:
        assert file.names() == ("plain", "half", "packed")
        assert [file.shape(name) for name in file.names()] == [(3, 5), (2, 3, 4), (4, 64)]
        assert _same_as_package(file, written, set())


def test_plain_tensors_are_torch_tensors_and_packed_ones_stay_packed(written: Path) -> None:
    with GGUFFile.open(written) as file:
        half, packed = file.tensor("half"), file.tensor("packed")
    assert isinstance(half, torch.Tensor) and half.dtype == torch.float16
    assert isinstance(packed, QuantTensor) and packed.nbytes == 4 * 2 * 34


def test_reading_a_tensor_copies_nothing_and_warns_of_nothing(written: Path) -> None:
    with warnings.catch_warnings(), GGUFFile.open(written) as file:
        warnings.simplefilter("error")
        first, second = file.tensor("plain"), file.tensor("plain")
        assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        assert first.data_ptr() == second.data_ptr()


def test_a_write_through_a_view_never_reaches_the_file(written: Path) -> None:
    before = written.read_bytes()
    with GGUFFile.open(written) as file:
        view = file.tensor("plain")
        assert isinstance(view, torch.Tensor)
        view.fill_(7)
    assert written.read_bytes() == before


def test_tensors_outlive_the_closed_file_and_new_ones_are_refused(written: Path) -> None:
    file = GGUFFile.open(written)
    tensor = file.tensor("plain")
    assert isinstance(tensor, torch.Tensor)
    before = tensor.clone()
    file.close()
    file.close()
    assert torch.equal(tensor, before)
    with pytest.raises(WeightError, match="closed"):
        file.tensor("plain")


@pytest.mark.parametrize("name", [*HALF_SCALES, "MXFP4"])
def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path: Path, name: str) -> None:
    halves = [struct.pack("<H", bits) for bits in (0x7C00, 0xFC00, 0x7E01)]  # infinite, -infinite, NaN
    cases = [(at, half) for at in HALF_SCALES.get(name, ()) for half in halves] or [(0, b"\xff")]
    size = FORMATS[name].block_bytes
    sound = np.full((3, 4 * size), 0x33, dtype=np.uint8)
    with GGUFFile.open(_one_tensor(tmp_path / "sound.gguf", sound, name)) as file:
        assert isinstance(file.tensor("blk.0.w"), QuantTensor)
    for at, scale in cases:
        blocks = sound.copy()
        blocks[2, 3 * size + at :][: len(scale)] = np.frombuffer(scale, np.uint8)
        with (
            GGUFFile.open(_one_tensor(tmp_path / "bad.gguf", blocks, name)) as file,
            pytest.raises(WeightError, match=rf"blk\.0\.w.*{name} scales"),
        ):
            file.tensor("blk.0.w")


def test_scales_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of one tensor are taken one by one; looking at all of them each time took longer than loading them."""
    looked: list[QuantTensor] = []
    monkeypatch.setattr(gguf_file, "has_finite_scales", lambda weight: looked.append(weight) or len(looked) > 1)
    blocks = np.full((3, 4 * FORMATS["Q4_0"].block_bytes), 0x33, dtype=np.uint8)
    with GGUFFile.open(_one_tensor(tmp_path / "one.gguf", blocks, "Q4_0")) as file:
        with pytest.raises(WeightError):
            file.tensor("blk.0.w")
        for _ in range(3):
            file.tensor("blk.0.w")
    assert len(looked) == 2, "once more after it was refused, and not again"


def _one_tensor(path: Path, blocks: npt.NDArray[np.uint8], name: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.w", blocks, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unknown_tensor_is_refused_by_name(written: Path) -> None:
    with GGUFFile.open(written) as file, pytest.raises(WeightError) as caught:
        file.tensor("absent")
    assert caught.value.field == "absent"


def test_version_2_and_a_vocabulary_of_broken_characters_are_read(craft: Craft, write: Callable[[bytes], Path]) -> None:
    pairs = [craft.strings("tokenizer.ggml.tokens", ["ok", b"\xe2\x82"])]
    with GGUFFile.open(write(craft.file(pairs, [], version=2))) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [b"ok", b"\xe2\x82"]


def test_a_wider_alignment_is_honoured(craft: Craft, write: Callable[[bytes], Path]) -> None:
    data = bytes(256) + np.arange(8, dtype=np.float32).tobytes()
    pairs, tensors = [craft.u32("general.alignment", 256)], [craft.tensor("t", [8], offset=256)]
    with GGUFFile.open(write(craft.file(pairs, tensors, data, alignment=256))) as file:
        assert torch.equal(torch.arange(8.0), to_float(file.tensor("t")))


def test_the_fingerprint_covers_every_byte(written: Path) -> None:
    raw = bytearray(written.read_bytes())
    with open_checkpoint(written).tensors as tensors:
        before = tensors.digest()
    assert before == hashlib.sha256(raw).hexdigest()
    raw[-1] ^= 1
    written.write_bytes(raw)
    changed = open_checkpoint(written)
    with changed.tensors:
        assert changed.fingerprint != before


def test_smollm2_equals_the_gguf_packages_reading(smollm2_path: Path) -> None:
    with GGUFFile.open(smollm2_path) as file:
        seen: set[str] = set()
        assert _same_as_package(file, smollm2_path, seen)
    assert seen == {"F32", "Q4_1", "Q8_0"}


@pytest.mark.slow
def test_gemma3_equals_the_gguf_packages_reading(gemma3_path: Path) -> None:
    with GGUFFile.open(gemma3_path) as file:
        assert _same_as_package(file, gemma3_path, set())


@pytest.mark.slow
def test_qwen2_equals_the_gguf_packages_reading(qwen2_path: Path) -> None:
    with GGUFFile.open(qwen2_path) as file:
        assert _same_as_package(file, qwen2_path, set())


def _same_as_package(file: GGUFFile, path: Path, seen: set[str]) -> bool:
    """Names and shapes of all tensors, and the bits of one tensor of each type (the smallest)."""
    theirs = gguf.GGUFReader(path).tensors
    assert [tensor.name for tensor in theirs] == list(file.names())
    for tensor in sorted(theirs, key=lambda tensor: tensor.n_bytes):
        assert file.shape(tensor.name) == tuple(int(extent) for extent in reversed(tensor.shape))
        if tensor.tensor_type.name in seen:
            continue
        seen.add(tensor.tensor_type.name)
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        mine = to_float(file.tensor(tensor.name)).numpy()
        assert np.array_equal(mine.view(np.uint32), expected.reshape(mine.shape).view(np.uint32)), tensor.name
    return True
