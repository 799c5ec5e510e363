"""GGUF files: the tensors behind a header that is checked field by field before any of it is used.

Tensors are views of the mapped file; nothing is copied and nothing is unpacked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from ..errors import WeightError
from ..quant.tensor import QuantTensor, Weight
from .gguf_header import TensorInfo, read_header
from .mapped import MappedFile

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
    """An open GGUF file: its metadata and, by name, its tensors."""

    def __init__(self, file: MappedFile, metadata: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> None:
        self.metadata = metadata
        self.infos = infos
        self._file = file
        self._announced = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map `path` and check its whole header; raises WeightError naming the field that is wrong."""
        file = MappedFile(path)
        try:
            header = read_header(file.map, file.size)
        except BaseException:
            file.close()
            raise
        return cls(file, header.metadata, header.tensors)

    def names(self) -> tuple[str, ...]:
        """Tensor names in file order."""
        return tuple(self.infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order."""
        return self._info(name).shape

    def tensor(self, name: str) -> Weight:
        """The tensor as a view of the file: packed blocks, or a torch tensor where torch has the type."""
        info = self._info(name)
        if not self._announced:  # someone wants weights, not only the header
            self._announced = True
            self._file.will_need()
        data = torch.from_numpy(self._file.view(info.start, info.start + info.nbytes))
        if dtype := _PLAIN.get(info.format.name):
            return data.view(dtype).view(info.shape)
        return QuantTensor(info.format, info.shape, data.view(-1, info.format.row_bytes(info.shape[-1])))

    def digest(self) -> str:
        """sha256 of the whole file, metadata included; read once, on first use."""
        return self._file.digest()

    def close(self) -> None:
        """Let go of the file; tensors handed out stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.infos[name]
        except KeyError:
            raise WeightError(name, "the file holds no tensor of that name") from None
