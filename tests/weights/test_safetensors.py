"""safetensors checkpoints: what the package writes is read back; damaged headers and stray indexes are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kvilt.errors import WeightError
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize
from kvilt.weights.safetensors import INDEX, SafetensorsFiles
from kvilt.weights.tensor_storage import TensorStorage

TENSORS = {
    "wide": torch.randn(4, 6),
    "half": torch.randn(2, 3, 5).half(),
    "brain": torch.randn(7).bfloat16(),
    "ids": torch.arange(5),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"wide": TENSORS["wide"], "half": TENSORS["half"]}, tmp_path / "model-1-of-2.safetensors")
    save_file({"brain": TENSORS["brain"]}, tmp_path / "model-2-of-2.safetensors")
    _index(tmp_path, wide="model-1-of-2", half="model-1-of-2", brain="model-2-of-2")
    return tmp_path


def _index(folder: Path, **shards: str) -> None:
    places = {name: f"{shard}.safetensors" for name, shard in shards.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_one_file_equals_the_packages_reading(single: Path) -> None:
    with SafetensorsFiles.open(single) as files, safe_open(single, "pt") as theirs:
        assert sorted(files.names()) == sorted(theirs.keys())
        for name in ("wide", "half", "brain"):
            assert torch.equal(files.tensor(name), theirs.get_tensor(name))
            assert files.tensor(name).dtype == TENSORS[name].dtype
            assert files.shape(name) == tuple(TENSORS[name].shape)


def test_a_tensor_is_a_view_that_outlives_the_file(single: Path) -> None:
    files = SafetensorsFiles.open(single)
    first, second = files.tensor("wide"), files.tensor("wide")
    assert first.data_ptr() == second.data_ptr()
    files.close()
    assert torch.equal(first, TENSORS["wide"])
    with pytest.raises(WeightError, match="closed"):
        files.tensor("wide")


def test_a_tensor_that_is_not_floating_is_refused_when_asked_for(single: Path) -> None:
    with SafetensorsFiles.open_folder(single.parent) as files:
        assert files.shape("ids") == (5,)
        with pytest.raises(WeightError, match="I64") as caught:
            files.tensor("ids")
    assert caught.value.field == "ids"


@pytest.mark.parametrize(
    ("suffix", "shape"), [("_scale_inv", (2, 3)), ("_scale", ()), ("_scale", (1,)), ("_scale", (200, 1))]
)
def test_8_bit_floats_come_with_their_scales(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    codes, scales = torch.randn(200, 300).to(torch.float8_e4m3fn), (torch.rand(shape) + 0.1).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": codes, f"a.weight{suffix}": scales, "b.weight_scale": torch.ones(1)}, path)
    with SafetensorsFiles.open(path) as files:
        assert set(files.names()) == {"a.weight", "b.weight_scale"}  # what is no weight's scale stays a tensor
        weight = files.tensor("a.weight")
        assert isinstance(weight, QuantTensor)
        assert torch.equal(dequantize(weight), dequantize(QuantTensor.of_float8(codes, scales)))
        assert files.storage("a.weight") == TensorStorage("F8_E4M3", 60_000 + 2 * scales.numel())
        with pytest.raises(WeightError, match="F8_E4M3"):
            files.floats("a.weight")
        files.forget("a.weight")


def test_8_bit_floats_with_other_scales_or_none_are_refused(tmp_path: Path) -> None:
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": codes, "a.weight_scale": torch.ones(7), "b.weight": codes.clone()}, path)
    with SafetensorsFiles.open(path) as files:
        with pytest.raises(WeightError, match=r"a\.weight_scale.*200 x 300"):
            files.tensor("a.weight")
        with pytest.raises(WeightError, match=r"b\.weight.*F8_E4M3"):
            files.tensor("b.weight")


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -float("inf")])
def test_scales_of_8_bit_floats_that_are_none_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    scales = torch.ones(2, 3)
    scales[1, 2] = bad
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.randn(200, 300).to(torch.float8_e4m3fn), "a.weight_scale_inv": scales}, path)
    with (
        SafetensorsFiles.open(path) as files,
        pytest.raises(WeightError, match=r"a\.weight_scale_inv.*zero or no numbers"),
    ):
        files.tensor("a.weight")


def test_exponents_of_mxfp4_that_are_none_are_refused_by_name(tmp_path: Path) -> None:
    scales = torch.full((2, 4, 3), 120, dtype=torch.uint8)
    scales[1, 2, 0] = 255
    path = tmp_path / "model.safetensors"
    save_file({"e.up_blocks": torch.full((2, 4, 3, 16), 255, dtype=torch.uint8), "e.up_scales": scales}, path)
    with SafetensorsFiles.open(path) as files:
        assert files.tensor("e.up_blocks").shape == (2, 4, 3, 16)  # any byte is a pair of codes
        with pytest.raises(WeightError, match=r"e\.up_scales.*255"):
            files.tensor("e.up_scales")


def test_shards_are_read_through_their_index(sharded: Path) -> None:
    with SafetensorsFiles.open_folder(sharded) as files:
        assert set(files.names()) == {"wide", "half", "brain"}
        for name in files.names():
            assert torch.equal(files.tensor(name), TENSORS[name])


def test_the_digest_covers_every_shard(sharded: Path) -> None:
    with SafetensorsFiles.open_folder(sharded) as files:
        before = files.digest()
    shard = sharded / "model-2-of-2.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with SafetensorsFiles.open_folder(sharded) as files:
        assert files.digest() != before


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2-of-2.safetensors").unlink()
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open_folder(sharded)
    assert caught.value.field == "model-2-of-2.safetensors"


def test_a_tensor_that_its_shard_does_not_hold_is_named(sharded: Path) -> None:
    _index(sharded, wide="model-1-of-2", half="model-1-of-2", brain="model-2-of-2", ghost="model-2-of-2")
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open_folder(sharded)
    assert caught.value.field == "ghost"


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    _index(sharded, wide="model-2-of-2", half="model-1-of-2", brain="model-2-of-2")
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open_folder(sharded)
    assert caught.value.field == "wide"


@pytest.mark.parametrize(
    "shard",
    ["../out", "/etc/out", "sub/out", "..\\out", "C:out", "", ".", "..", "a\0b"],
)
def test_an_index_cannot_leave_its_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"wide": TENSORS["wide"]}, tmp_path / "out.safetensors")
    places = {"wide": f"{shard}.safetensors" if shard.strip(".") else shard}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open_folder(folder)
    assert caught.value.field == "weight_map"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightError):
        SafetensorsFiles.open_folder(tmp_path)


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open_folder(sharded)
    assert caught.value.field == INDEX


def _file(header: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED: dict[str, tuple[str, bytes]] = {
    "seven bytes": ("header length", bytes(7)),
    "header of 2^64 - 1 bytes": ("header length", _file({}, length=2**64 - 1)),
    "header longer than the file": ("header length", _file({}, length=67)),
    "header that is no JSON": ("header", _file(b"{nothing}")),
    "header that is no object": ("header", _file([])),
    "header not UTF-8": ("header", _file(b'{"\xff": 1}')),
    "header nested without end": ("header", _file(b'{"a":' * 100_000)),
    "name with half of a surrogate pair": ("header", _file({"\ud800": _entry([16], [0, 64])})),
    "the same tensor twice": ("header", _file(b'{"a": 1, "a": 2}')),
    "no dtype": ("a", _file({"a": {"shape": [16], "data_offsets": [0, 64]}})),
    "unknown dtype": ("a", _file({"a": _entry([16], [0, 64], "Q4")})),
    "dtype that is a list": ("a", _file({"a": _entry([16], [0, 64], [])})),
    "negative extent": ("a", _file({"a": _entry([-4, -4], [0, 64])})),
    "extent of a fraction": ("a", _file({"a": _entry([16.0], [0, 64])})),
    "extent that is a bool": ("a", _file({"a": _entry([True], [0, 4])})),
    "shape that overflows": ("a", _file({"a": _entry([2**62, 4], [0, 64])})),
    "empty shape that overflows": ("a", _file({"a": _entry([0, *[2**62] * 3], [0, 0])}, b"")),
    "shape without end": ("a", _file({"a": _entry([1] * 65, [0, 4])}, bytes(4))),
    "metadata that is a number": ("__metadata__", _file({"__metadata__": 1, "a": _entry([16], [0, 64])})),
    "metadata of numbers": ("__metadata__", _file({"__metadata__": {"a": 1}, "a": _entry([16], [0, 64])})),
    "wrong size": ("a", _file({"a": _entry([15], [0, 64])})),
    "offsets past the end": ("a", _file({"a": _entry([32], [0, 128])})),
    "reversed offsets": ("a", _file({"a": _entry([16], [64, 0])})),
    "three offsets": ("a", _file({"a": _entry([16], [0, 32, 64])})),
    "overlapping tensors": ("b", _file({"a": _entry([12], [0, 48]), "b": _entry([8], [32, 64])})),
    "a gap between tensors": ("b", _file({"a": _entry([4], [0, 16]), "b": _entry([8], [32, 64])})),
    "bytes that no tensor claims": ("data", _file({"a": _entry([8], [0, 32])})),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_by_the_name_of_its_field(
    kind: str, write: Callable[[bytes, str], Path], tmp_path: Path
) -> None:
    field, raw = DAMAGED[kind]
    with pytest.raises(WeightError) as caught:
        SafetensorsFiles.open(write(raw, "model.safetensors"))
    assert caught.value.field == field


def test_a_header_without_padding_is_read_by_a_copy(write: Callable[[bytes, str], Path]) -> None:
    values = torch.arange(16.0)
    header = json.dumps({"a": _entry([16], [0, 64])}).encode()
    header += b" " * ((3 - len(header)) % 8)
    with SafetensorsFiles.open(write(_file(header, values.numpy().tobytes()), "model.safetensors")) as files:
        assert torch.equal(files.tensor("a"), values)
        assert files.tensor("a").data_ptr() % 4 == 0


def test_a_file_cut_short_while_mapped_is_refused(single: Path) -> None:
    with SafetensorsFiles.open(single) as files:
        os.truncate(single, 16)
        with pytest.raises(WeightError, match="cut from"):
            files.tensor("wide")


@settings(max_examples=examples(300))
@given(data=st.data())
def test_any_bytes_of_a_file_may_change(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(_file({"a": _entry([2, 4], [0, 32]), "b": _entry([8], [32, 48], "BF16")}, bytes(48)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b'"', b"-", b"9999"]) | st.binary(max_size=5))
        raw[at : at + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(raw[: data.draw(st.none() | st.integers(0, len(raw)))])
    try:
        files = SafetensorsFiles.open(path)
    except WeightError:
        return
    with files:
        for name in files.names():
            try:
                assert tuple(files.tensor(name).shape) == files.shape(name)
            except WeightError as error:
                assert error.field == name
