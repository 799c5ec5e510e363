"""A byte-level GGUF writer that can write what no honest writer would."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
F32, F16, Q4_0, Q4_1, Q8_0, Q6_K = 0, 1, 2, 3, 8, 14


class Craft:
    """Pieces of a GGUF file as bytes."""

    def text(self, value: str | bytes, length: int | None = None) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(raw) if length is None else length) + raw

    def pair(self, key: str | bytes, kind: int, payload: bytes) -> bytes:
        return self.text(key) + struct.pack("<I", kind) + payload

    def string(self, key: str | bytes, value: str | bytes) -> bytes:
        return self.pair(key, STRING, self.text(value))

    def u32(self, key: str, value: int) -> bytes:
        return self.pair(key, UINT32, struct.pack("<I", value))

    def array(self, key: str, kind: int, payload: bytes, count: int) -> bytes:
        return self.pair(key, ARRAY, struct.pack("<IQ", kind, count) + payload)

    def strings(self, key: str, values: list[str | bytes]) -> bytes:
        return self.array(key, STRING, b"".join(map(self.text, values)), len(values))

    def tensor(self, name: str | bytes, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
        shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
        return self.text(name) + shape + struct.pack("<IQ", kind, offset)

    def file(
        self,
        pairs: list[bytes] | None = None,
        tensors: list[bytes] | None = None,
        data: bytes = bytes(4096),
        *,
        magic: bytes = b"GGUF",
        version: int = 3,
        pair_count: int | None = None,
        tensor_count: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        pairs = [self.string("general.architecture", "llama")] if pairs is None else pairs
        tensors = [self.tensor("a.weight", [8, 4])] if tensors is None else tensors
        counts = (
            len(tensors) if tensor_count is None else tensor_count,
            len(pairs) if pair_count is None else pair_count,
        )
        header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
        return header + bytes(-len(header) % alignment) + data


@pytest.fixture(scope="session")
def craft() -> Craft:
    return Craft()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    """Put bytes into a file and return its path."""

    def put(raw: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return put
