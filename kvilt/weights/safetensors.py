"""safetensors checkpoints, one file or several joined by an index, with every header checked before use.

An own reader and not the package's, so that these files get the same map, the same check for a file cut short and
the same naming of the field at fault as GGUF. Nothing is copied.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from ..errors import WeightError
from ..quant.formats import FLOAT8
from ..quant.tensor import QuantTensor, Weight
from .files import INDEX, read_index
from .json_file import parse_object
from .mapped import MappedFile
from .tensor_storage import TensorStorage

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64

_FLOATS: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_INTEGERS: Mapping[str, torch.dtype] = MappingProxyType({"I32": torch.int32, "I64": torch.int64})
# The planes of experts in MXFP4, by which this module knows bytes that are no tensor of their own.
_BYTE_SUFFIXES = ("_blocks", "_scales")
_NO_EXPONENT = 255  # of a block of MXFP4: not a number
# How the scales of a weight of 8-bit floats are called: both multiply, whatever their name says.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Bytes per element of every type whose size is certain, so that a header can be checked before it is refused.
_SIZES: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
    | {"F8_E4M3": 1, "F8_E5M2": 1}
)


@dataclass(frozen=True, slots=True)
class _Entry:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


class SafetensorsFiles:
    """The tensors of one or more open safetensors files, by name."""

    def __init__(self, files: Mapping[str, MappedFile], entries: Mapping[str, _Entry]) -> None:
        self._files = files
        self._entries = entries
        self._scales = dict(_scales_of(entries))
        self._announced = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open one file."""
        return cls._open({path.name: path}, index=None)

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Self:
        """One file whose bytes are in memory."""
        file = MappedFile.in_memory(name, data)
        try:
            return cls({name: file}, _read_header(file))
        except BaseException:
            file.close()
            raise

    @classmethod
    def open_folder(cls, folder: Path) -> Self:
        """Open a folder's only safetensors file, or the shards its index names."""
        index_path = folder / INDEX
        if index_path.exists():
            index = read_index(index_path)
            return cls._open({shard: folder / shard for shard in sorted(set(index.values()))}, index)
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            raise WeightError(INDEX, f"is missing, and {folder.name} holds {len(found)} safetensors files, not one")
        return cls.open(found[0])

    @classmethod
    def _open(cls, paths: Mapping[str, Path], index: Mapping[str, str] | None) -> Self:
        files: dict[str, MappedFile] = {}
        entries: dict[str, _Entry] = {}
        try:
            for shard, path in paths.items():
                if not path.is_file():
                    raise WeightError(shard, "the index names this shard and it is not in the folder; fetch it")
                files[shard] = MappedFile(path)
                for name, entry in _read_header(files[shard]).items():
                    _check_place(name, shard, index)
                    entries[name] = entry
            _check_complete(entries, index)
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(files, entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order, shard by shard; scales of 8-bit floats belong to those."""
        scales = frozenset(self._scales.values())
        return tuple(name for name in self._entries if name not in scales)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""
        return self._entry(name).shape

    def storage(self, name: str) -> TensorStorage:
        """The tensor's type and size, from the header alone."""
        entry = self._entry(name)
        kind = "MXFP4" if entry.dtype == "U8" and name.endswith(_BYTE_SUFFIXES) else entry.dtype
        return TensorStorage(kind, sum(one.stop - one.start for one in self._parts(name)))

    def tensor(self, name: str) -> Weight:
        """A view of the file: floats, those of 8 bits with their scales, or the planes of experts in MXFP4."""
        if self._entry(name).dtype == "U8" and name.endswith(_BYTE_SUFFIXES):
            found = self._view(name, torch.uint8)
            if name.endswith("_scales") and bool((found == _NO_EXPONENT).any()):
                raise WeightError(name, f"has exponents of {_NO_EXPONENT}, which stand for no number")
            return found
        scales = self._scales.get(name)
        if scales is None:
            return self.floats(name)
        try:
            own = check_scales(scales, self.floats(scales))
            return QuantTensor.of_float8(self._view(name, torch.float8_e4m3fn), own)
        except ValueError as error:
            raise WeightError(scales, str(error)) from None

    def floats(self, name: str) -> torch.Tensor:
        """A tensor of ordinary floats as a view of the file."""
        entry = self._entry(name)
        dtype = _FLOATS.get(entry.dtype)
        if dtype is None:
            raise WeightError(name, f"is stored as {entry.dtype}; only {', '.join(_FLOATS)} can be used")
        return self._view(name, dtype)

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers of 32 or 64 bits as a view of the file."""
        entry = self._entry(name)
        dtype = _INTEGERS.get(entry.dtype)
        if dtype is None:
            raise WeightError(name, f"is stored as {entry.dtype}; whole numbers were expected")
        return self._view(name, dtype)

    def _view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        entry = self._entry(name)
        if not self._announced:  # the caller wants weights, not only the header
            self._announced = True
            for file in self._files.values():
                file.will_need()
        data = torch.from_numpy(entry.file.view(entry.start, entry.stop))
        if entry.start % dtype.itemsize:  # writers pad their headers; one that did not costs a copy
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def forget(self, name: str) -> None:
        """Give the memory of a mapped tensor back."""
        for entry in self._parts(name):
            entry.file.forget(entry.start, entry.stop)

    def _parts(self, name: str) -> list[_Entry]:
        """The entries of a tensor: its own, and that of its scales."""
        scales = self._scales.get(name)
        return [self._entry(name)] if scales is None else [self._entry(name), self._entry(scales)]

    def digest(self) -> str:
        """sha256 over the names and every byte of the files; read once, on first use."""
        parts = "\n".join(f"{shard} {file.digest()}" for shard, file in self._files.items())
        return hashlib.sha256(parts.encode()).hexdigest()

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise WeightError(name, "the checkpoint holds no tensor of that name") from None


def check_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """The scales of a packed weight; those of a damaged file are refused."""
    if not bool(torch.isfinite(scales).all()) or bool((scales == 0).any()):
        raise WeightError(name, "has scales that are zero or no numbers; the file is damaged")
    return scales


def _scales_of(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, str]]:
    """Matrices of 8-bit floats, and the tensors that hold their scales."""
    for name, entry in entries.items():
        if entry.dtype == FLOAT8 and len(entry.shape) == 2:
            found = [f"{name}{suffix}" for suffix in _SCALE_SUFFIXES if f"{name}{suffix}" in entries]
            if found:
                yield name, found[0]


def _check_place(name: str, shard: str, index: Mapping[str, str] | None) -> None:
    if index is not None and index.get(name) != shard:
        raise WeightError(name, f"lies in {shard} and the index says {index.get(name)!r}")


def _check_complete(entries: Mapping[str, _Entry], index: Mapping[str, str] | None) -> None:
    for name, shard in (index or {}).items():
        if name not in entries:
            raise WeightError(name, f"the index places it in {shard}, which does not hold it")


def _read_header(file: MappedFile) -> dict[str, _Entry]:
    """Check a whole header: every tensor inside the file, of its right size, side by side without gap or overlap."""
    if file.size < 8:
        raise WeightError("header length", f"{file.path.name} has {file.size} bytes; it is damaged or cut short")
    (length,) = struct.unpack_from("<Q", file.map)
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise WeightError("header length", f"{length} bytes cannot be right for {file.path.name} of {file.size}")
    described = parse_object(file.map[8 : 8 + length], "header")
    _check_metadata(described.pop("__metadata__", {}))
    entries = {name: _read_entry(name, fields, file, 8 + length) for name, fields in described.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 8 + length
    for name, entry in ordered.items():
        if entry.start != end:
            raise WeightError(name, f"its data starts at byte {entry.start} and the data before it ends at {end}")
        end = entry.stop
    if end != file.size:
        raise WeightError("data", f"the tensors end at byte {end} and {file.path.name} at {file.size}")
    return ordered


def _check_metadata(found: Any) -> None:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise WeightError("__metadata__", "must be an object of texts")


def _read_entry(name: str, fields: Any, file: MappedFile, data_start: int) -> _Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise WeightError(name, "must be described by dtype, shape and data_offsets")
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise WeightError(name, f"dtype {dtype!r:.80} is not known")
    shape, offsets = _naturals(name, fields["shape"]), _naturals(name, fields["data_offsets"])
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= file.size - data_start:
        raise WeightError(name, f"data_offsets {list(offsets)} do not lie in the file; it is damaged or cut short")
    if prod(extent for extent in shape if extent) >= 1 << 60:  # an empty tensor has strides too
        raise WeightError(name, f"has the impossible shape {list(shape)}")
    if prod(shape) * _SIZES[dtype] != offsets[1] - offsets[0]:
        raise WeightError(name, f"{dtype} {list(shape)} does not take {offsets[1] - offsets[0]} bytes")
    return _Entry(file, dtype, shape, data_start + offsets[0], data_start + offsets[1])


def _naturals(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, list) and len(values) > MAX_DIMS:  # before they are multiplied
        raise WeightError(name, f"{len(values)} dimensions are more than the {MAX_DIMS} that a tensor can have")
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise WeightError(name, "shape and data_offsets must be lists of whole numbers from 0 to 2^63 - 1")
    return tuple(values)
