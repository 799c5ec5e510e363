"""safetensors files: whatever is in them, opening and reading one ends with tensors or a typed error.

Oracle: what is accepted, the `safetensors` package accepts too, with the same shapes and the same bytes.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import safetensors
import torch

from kvilt.errors import KviltError
from kvilt.weights.safetensors import SafetensorsFiles

from .driver import main
from .target import Finding, Target, file_in_memory, label
from .values import changed, dumped


def framed(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def seeds() -> list[bytes]:
    two = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    odd = {
        "scalar": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]},
        "empty": {"dtype": "F64", "shape": [0, 7], "data_offsets": [2, 2]},
        "bytes": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
    }
    data = bytes(range(32))
    return [
        framed(json.dumps(two).encode(), data),
        framed(json.dumps(odd).encode() + b"   ", data[:5]),
        framed(b"{}", b""),
    ]


def check(data: bytes) -> str:
    with file_in_memory(data) as path:
        return _check(path)


def _check(path: Path) -> str:
    try:
        files = SafetensorsFiles.open(path)
    except KviltError as error:
        return f"refused: {label(error)}"
    said = set()
    try:
        other = _reference(path)
        for name in files.names():
            try:
                found = files.tensor(name)
            except KviltError as error:
                said.add(label(error))
                continue
            if tuple(found.shape) != files.shape(name) or not _same(found, other[name]):
                raise Finding(f"{name!r} is read otherwise by the package")
    finally:
        files.close()
    return f"read; {sorted(said)}"


def _reference(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of types that kvilt serves, as the package reads them."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            served = {"F64", "F32", "F16", "BF16"}
            return {name: file.get_tensor(name) for name in file.keys() if file.get_slice(name).get_dtype() in served}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, OverflowError, RuntimeError) as error:
        raise Finding(f"accepted here and refused by the package: {error}") from None


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and _raw(left) == _raw(right)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Another header in a right frame."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        fields = json.loads(data[8 : 8 + size])
        return framed(dumped(changed(fields, dice), dice), data[8 + size :])
    except (ValueError, struct.error, RecursionError, OverflowError):
        return mutate(dice.choice(seeds()), dice)


WORDS = (
    b'"dtype":"F32"',
    b'"shape":[',
    b'"data_offsets":[',
    b'"__metadata__"',
    b'"F8_E4M3"',
    b'"I64"',
    b'{"":',
    b"\\ud800",
)
TARGET = Target("safetensors", check, seeds, WORDS, mutate, most_bytes=1 << 14)

if __name__ == "__main__":
    main(TARGET)
