"""The header of a GGUF file, versions 2 and 3, little endian: metadata and tensor descriptions.

Every count and length is compared with the bytes really there before it is used, so a crafted file costs no more
memory than its own size. Refuses to know what the metadata means, except where it describes the file itself.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import WeightError
from ..quant.formats import FORMATS_BY_ID, Format

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 127
MAX_DIMS = 4
MAX_ARRAY = 1 << 24  # elements; the largest vocabularies are under a million

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# Value type id -> how it is stored. 7 is bool, 8 string, 9 array.
_NUMBERS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        0: np.dtype("u1"),
        1: np.dtype("i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: np.dtype("<u4"),
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        10: np.dtype("<u8"),
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
# The shortest entries possible: key length, key, type, value; and name length, name, dims, one dim, type, offset.
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how to read it."""

    name: str
    format: Format
    shape: tuple[int, ...]  # torch order: the file's dimensions reversed
    start: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All that a GGUF file says before its tensor data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # file order


class Cursor:
    """A position in the header that never moves past the end of the file."""

    def __init__(self, data: mmap.mmap | bytes, size: int) -> None:
        self._data = data
        self._size = size
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self._size - self.position

    def skip(self, count: int, field: str) -> int:
        """Claim `count` bytes and return where they start."""
        if count > self.left:
            raise WeightError(
                field, f"needs {count} bytes and the file has {self.left} left; it is damaged or cut short"
            )
        start = self.position
        self.position += count
        return start

    def take(self, count: int, field: str) -> bytes:
        """The next `count` bytes."""
        start = self.skip(count, field)
        return self._data[start : start + count]

    def u32(self, field: str) -> int:
        return int(_U32.unpack_from(self._data, self.skip(4, field))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack_from(self._data, self.skip(8, field))[0])

    def string(self, field: str, longest: int | None = None, errors: str = "strict") -> str:
        """A length and that many bytes of UTF-8."""
        length = self.u64(field)
        if longest is not None and not 0 < length <= longest:
            raise WeightError(field, f"its length must be between 1 and {longest} bytes, not {length}")
        return _decode(self.take(length, field), field, errors)

    def strings(self, count: int, field: str, errors: str) -> list[str]:
        """`count` strings in a row; written flat because vocabularies hold hundreds of thousands."""
        data, size, position = self._data, self._size, self.position
        unpack = _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    raise WeightError(field, f"string {len(found)} of {count} is longer than the file")
                found.append(str(data[start:position], "utf-8", errors))
        except struct.error:  # no room left for a length
            raise WeightError(field, f"the file ends before string {len(found)} of {count}; it is cut short") from None
        except UnicodeDecodeError as error:
            raise WeightError(field, f"string {len(found)} is not valid UTF-8 at byte {error.start}") from None
        self.position = position
        return found


def _decode(raw: bytes, field: str, errors: str) -> str:
    try:
        return raw.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise WeightError(field, f"is not valid UTF-8 at byte {error.start}") from None


def read_header(data: mmap.mmap | bytes, size: int) -> GGUFHeader:
    """Read and check everything before the tensor data, and that the data is there."""
    cursor = Cursor(data, size)
    _check_version(cursor)
    tensor_count = _count(cursor, "tensor_count", _MIN_TENSOR_BYTES)
    pair_count = _count(cursor, "metadata_count", _MIN_PAIR_BYTES)
    metadata = _read_metadata(cursor, pair_count)
    alignment = _alignment(metadata)
    described = [_read_tensor(cursor, index) for index in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors = _place(described, data_start, alignment, size)
    check_vocabulary(metadata, tensors)
    return GGUFHeader(MappingProxyType(metadata), MappingProxyType(tensors))


def raw_metadata(data: mmap.mmap | bytes, size: int) -> dict[str, bytes]:
    """Each value of a header as it is stored, its type before it: to write it into another file unchanged."""
    cursor = Cursor(data, size)
    _check_version(cursor)
    _count(cursor, "tensor_count", _MIN_TENSOR_BYTES)
    pairs: dict[str, bytes] = {}
    for index in range(_count(cursor, "metadata_count", _MIN_PAIR_BYTES)):
        key = cursor.string(f"metadata key {index}", longest=MAX_KEY_BYTES)
        start = cursor.position
        _read_value(cursor, key, cursor.u32(key))
        pairs[key] = bytes(data[start : cursor.position])
    return pairs


def _check_version(cursor: Cursor) -> None:
    magic = cursor.take(min(4, cursor.left), "magic")
    if magic != MAGIC:
        raise WeightError("magic", f"the file starts with {magic!r}, not {MAGIC!r}; it is not a GGUF file")
    version = cursor.u32("version")
    if version in (2 << 24, 3 << 24):
        raise WeightError("version", "the file is big endian; convert it to little endian")
    if version not in (2, 3):
        raise WeightError("version", f"GGUF version {version} is not known; versions 2 and 3 are")


def _count(cursor: Cursor, field: str, least_bytes: int) -> int:
    count = cursor.u64(field)
    if count * least_bytes > cursor.left:
        raise WeightError(field, f"{count} entries cannot fit into the {cursor.left} bytes that follow")
    return count


def _read_metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", longest=MAX_KEY_BYTES)
        if key in metadata:
            raise WeightError(key, "the key stands in the metadata twice")
        kind = cursor.u32(key)
        if key == "general.alignment" and kind != _UINT32:
            raise WeightError(key, f"must be stored as uint32 (type {_UINT32}), not type {kind}")
        metadata[key] = _read_value(cursor, key, kind)
    return metadata


def _read_value(cursor: Cursor, key: str, kind: int) -> Any:
    # A vocabulary may hold pieces of characters; other text is text.
    errors = "surrogateescape" if key.startswith("tokenizer.ggml.") else "strict"
    if kind == _STRING:
        return cursor.string(key, errors=errors)
    if kind == _ARRAY:
        return _read_array(cursor, key, errors)
    return _read_numbers(cursor, key, kind, 1)[0]


def _read_array(cursor: Cursor, key: str, errors: str) -> list[Any]:
    kind = cursor.u32(key)
    count = cursor.u64(key)
    if kind == _ARRAY:
        raise WeightError(key, "is an array of arrays, which no model needs")
    if count > MAX_ARRAY:
        raise WeightError(key, f"has {count} elements; at most {MAX_ARRAY} are accepted")
    if kind == _STRING:
        return cursor.strings(count, key, errors)
    return _read_numbers(cursor, key, kind, count)


def _read_numbers(cursor: Cursor, key: str, kind: int, count: int) -> list[Any]:
    if kind == _BOOL:
        flags = cursor.take(count, key)
        if flags.strip(b"\x00\x01"):
            raise WeightError(key, "a bool must be stored as 0 or 1")
        return [bool(flag) for flag in flags]
    dtype = _NUMBERS.get(kind)
    if dtype is None:
        raise WeightError(key, f"value type {kind} is not known; the file is damaged or newer than kvilt")
    numbers: list[Any] = np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype=dtype).tolist()
    return numbers


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment: int = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # At least 8, as the specification says: views of any element type rely on it.
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise WeightError("general.alignment", f"must be a power of two from 8 to {MAX_ALIGNMENT}, not {alignment}")
    return alignment


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    name = cursor.string(f"tensor name {index}", longest=MAX_NAME_BYTES)
    dims = cursor.u32(name)
    if not 1 <= dims <= MAX_DIMS:
        raise WeightError(name, f"has {dims} dimensions; 1 to {MAX_DIMS} are possible")
    extents = [cursor.u64(name) for _ in range(dims)]
    format_id = cursor.u32(name)
    format_ = FORMATS_BY_ID.get(format_id)
    if format_ is None:
        raise WeightError(name, f"tensor type {format_id} is not known; the file is damaged or newer than kvilt")
    nbytes = _tensor_bytes(name, format_, extents)
    return TensorInfo(name, format_, tuple(reversed(extents)), cursor.u64(name), nbytes)


def _tensor_bytes(name: str, format_: Format, extents: list[int]) -> int:
    # Python integers do not overflow; the bound keeps everything after this inside 64 bits too.
    if not all(0 < extent < 1 << 63 for extent in extents) or prod(extents) >= 1 << 60:
        raise WeightError(name, f"has the impossible shape {list(reversed(extents))}")
    if extents[0] % format_.block_elements:
        raise WeightError(
            name, f"rows of {extents[0]} elements do not fill {format_.name} blocks of {format_.block_elements}"
        )
    return prod(extents[1:]) * format_.row_bytes(extents[0])


def _place(described: list[TensorInfo], data_start: int, alignment: int, size: int) -> dict[str, TensorInfo]:
    """Turn offsets in the data section into places in the file, all inside it and none shared."""
    tensors: dict[str, TensorInfo] = {}
    for info in described:
        if info.name in tensors:
            raise WeightError(info.name, "the tensor stands in the file twice")
        if info.start % alignment:
            raise WeightError(info.name, f"its offset {info.start} is not a multiple of the alignment {alignment}")
        start = data_start + info.start
        if start + info.nbytes > size:
            raise WeightError(
                info.name, f"its data ends at byte {start + info.nbytes} and the file at {size}; it is cut short"
            )
        tensors[info.name] = TensorInfo(info.name, info.format, info.shape, start, info.nbytes)
    for before, after in pairwise(sorted(tensors.values(), key=lambda info: info.start)):
        if after.start < before.start + before.nbytes:
            raise WeightError(after.name, f"its data overlaps the data of {before.name!r}")
    return tensors


def check_vocabulary(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise when the vocabulary's own lists, or the embedding's rows, are of another length than its tokens."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        values = metadata.get(key)
        if isinstance(values, list) and len(values) != len(tokens):
            raise WeightError(key, f"has {len(values)} entries for a vocabulary of {len(tokens)} tokens")
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != len(tokens):
        raise WeightError(
            "token_embd.weight", f"has {embedding.shape[0]} rows for a vocabulary of {len(tokens)} tokens"
        )
