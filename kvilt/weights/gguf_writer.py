"""Writes a GGUF file: header first, then one tensor after the other, so that only one is in memory.

The file appears under its name when it is complete. Refuses to know what the metadata means.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightError
from ..quant.formats import Format
from .gguf_header import DEFAULT_ALIGNMENT, MAGIC

_VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]  # torch order
    format: Format

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


def stored_value(value: Any) -> bytes:
    """A value of metadata as it is stored, its type before it: the types that llama.cpp's own converter writes."""
    match value:
        case bool():
            return struct.pack("<IB", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case str():
            return struct.pack("<I", _STRING) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(value)}B", _ARRAY, _BOOL, len(value), *value)
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", _ARRAY, _FLOAT32, len(value), *value)
        case list():
            return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)
    raise TypeError(f"no value of GGUF metadata: {value!r}")


def write_gguf(
    path: Path,
    metadata: Mapping[str, bytes],
    tensors: Sequence[PlannedTensor],
    data_of: Callable[[PlannedTensor], Tensor],
) -> None:
    """Write a file. `metadata` are values as they are stored; `data_of` gives a tensor's bytes when it is its turn."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            header = _header(metadata, tensors)
            file.write(header + bytes(-len(header) % DEFAULT_ALIGNMENT))
            for tensor in tensors:
                data = data_of(tensor)
                if data.nbytes != tensor.nbytes:
                    raise WeightError(tensor.name, f"has {data.nbytes} bytes of data instead of {tensor.nbytes}")
                file.write(data.contiguous().view(torch.uint8).numpy().tobytes())
                file.write(bytes(-data.nbytes % DEFAULT_ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _header(metadata: Mapping[str, bytes], tensors: Sequence[PlannedTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + raw for key, raw in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims, format_id = tensor.shape[::-1], tensor.format.ggml_id
        assert format_id is not None, f"{tensor.format.name} has no number in GGUF"
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, format_id, offset))
        offset += tensor.nbytes + -tensor.nbytes % DEFAULT_ALIGNMENT
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data
