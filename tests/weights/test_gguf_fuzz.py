"""A small sound GGUF file with bytes changed or missing: it reads, or WeightError comes out, and nothing else."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvilt.errors import WeightError
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import UNPACKED_FORMATS, to_float
from kvilt.weights.gguf import GGUFFile

Craft = Any  # conftest.Craft


@pytest.fixture(scope="module")
def sound(craft: Craft) -> bytes:
    tokens: list[str | bytes] = ["<s>", "a", b"\xe2\x82", "é"]
    pairs = [
        craft.string("general.architecture", "llama"),
        craft.u32("general.alignment", 32),
        craft.pair("llama.eps", 6, struct.pack("<f", 1e-5)),
        craft.pair("tokenizer.ggml.add_bos_token", 7, b"\x01"),
        craft.strings("tokenizer.ggml.tokens", tokens),
        craft.array("tokenizer.ggml.token_type", 5, struct.pack("<4i", 3, 1, 1, 1), 4),
    ]
    tensors = [
        craft.tensor("token_embd.weight", [32, 4], kind=8, offset=0),
        craft.tensor("norm.weight", [32], kind=0, offset=160),
        craft.tensor("up.weight", [64, 2], kind=3, offset=288),
        craft.tensor("down.weight", [256, 1], kind=14, offset=384),
    ]
    return bytes(craft.file(pairs, tensors, data=bytes(range(256)) * 3))


@pytest.fixture(scope="module")
def spot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def _read_all(path: Path, raw: bytes) -> bool:
    """Whether the file was accepted; every tensor of an accepted file is read and unpacked."""
    path.write_bytes(raw)
    try:
        with GGUFFile.open(path) as file:
            for name in file.names():
                weight = file.tensor(name)  # its scales may be no numbers
                if not isinstance(weight, QuantTensor) or weight.format.name in UNPACKED_FORMATS:
                    assert tuple(to_float(weight).shape) == file.shape(name)
    except WeightError:
        return False
    return True


def test_the_sound_file_reads(sound: bytes, spot: Path) -> None:
    assert _read_all(spot, sound)


def test_every_bit_of_the_header_may_flip(sound: bytes, spot: Path) -> None:
    header_bytes = len(sound) - 768
    refused = 0
    for at in range(header_bytes):
        for bit in range(8):
            raw = bytearray(sound)
            raw[at] ^= 1 << bit
            refused += not _read_all(spot, bytes(raw))
    assert refused > header_bytes  # most of the header is load-bearing


def test_every_cut_in_the_header_is_refused(sound: bytes, spot: Path) -> None:
    for length in range(len(sound) - 768):
        assert not _read_all(spot, sound[:length])


@settings(
    max_examples=examples(400),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bytes_may_change(sound: bytes, spot: Path, data: st.DataObject) -> None:
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        patch = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\x80", b"\x01"]) | st.binary(max_size=9))
        raw[at : at + len(patch)] = patch
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    _read_all(spot, bytes(raw[:cut]))
