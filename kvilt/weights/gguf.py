"""GGUF files, whole or split: the tensors behind a header that is checked field by field before any of it is used.

Tensors are views of the mapped file; nothing is copied and nothing is unpacked here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from ..errors import WeightError
from ..quant.block_scales import has_finite_scales
from ..quant.tensor import QuantTensor, Weight
from .gguf_header import raw_metadata
from .gguf_split import GGUFPart, TensorLocation, join, open_parts
from .mapped import MappedFile
from .tensor_storage import TensorStorage

# Formats that torch itself can hold come out as ordinary tensors.
_PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
    }
)


class GGUFFile:
    """An open GGUF model, one file or several parts: its metadata and, by name, its tensors."""

    def __init__(
        self, parts: Sequence[GGUFPart], metadata: Mapping[str, Any], places: Mapping[str, TensorLocation]
    ) -> None:
        self.metadata = metadata
        self._files = tuple(part.file for part in parts)
        self._places = places
        self._announced = False
        self._checked: set[str] = set()  # tensors whose scales were looked at: experts are taken one by one

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map `path`, and its siblings if it is a part, and check every header; WeightError names what is wrong."""
        return cls._joined(open_parts(path))

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> Self:
        """One file whose bytes are in memory; a part of several is not looked for in others."""
        return cls._joined((GGUFPart.of(MappedFile.in_memory(name, data)),))

    @classmethod
    def _joined(cls, parts: Sequence[GGUFPart]) -> Self:
        try:
            return cls(parts, *join(parts))
        except BaseException:
            for part in parts:
                part.file.close()
            raise

    def raw_metadata(self) -> dict[str, bytes]:
        """The metadata as it is stored, without what describes this file alone."""
        found = raw_metadata(self._files[0].map, self._files[0].size)
        return {key: raw for key, raw in found.items() if not key.startswith("split.") and key != "general.alignment"}

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order, part by part."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""
        return self._place(name).info.shape

    def storage(self, name: str) -> TensorStorage:
        """The tensor's format and size, from the header alone."""
        info = self._place(name).info
        return TensorStorage(info.format.name, info.nbytes)

    def tensor(self, name: str) -> Weight:
        """The tensor as a view of the file: packed blocks, or a torch tensor where torch has the type."""
        place = self._place(name)
        info = place.info
        if not self._announced:  # someone wants weights, not only the header
            self._announced = True
            for file in self._files:
                file.will_need()
        data = torch.from_numpy(place.file.view(info.start, info.start + info.nbytes))
        if dtype := _PLAIN.get(info.format.name):
            return data.view(dtype).view(info.shape)
        weight = QuantTensor.of_blocks(info.format, info.shape, data.view(-1, info.format.row_bytes(info.shape[-1])))
        if name not in self._checked and not has_finite_scales(weight):
            raise WeightError(name, f"some of its {info.format.name} scales are NaN or infinite; fetch the file again")
        self._checked.add(name)
        return weight

    def forget(self, name: str) -> None:
        """Give the memory of a mapped tensor back."""
        place = self._place(name)
        place.file.forget(place.info.start, place.info.start + place.info.nbytes)

    def digest(self) -> str:
        """sha256 of the whole file, or over those of all parts, metadata included; read once, on first use."""
        digests = [file.digest() for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Let go of the files; tensors handed out stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _place(self, name: str) -> TensorLocation:
        try:
            return self._places[name]
        except KeyError:
            raise WeightError(name, "the file holds no tensor of that name") from None
