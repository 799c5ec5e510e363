"""Messages between ranks: typed values one after the other, each with a byte that says what it is.

Whole numbers, floats, texts and tensors; no pickle. Refuses to know what a message means.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import RankFailed

_ALIGN = 64  # bytes, so that kernels may read tensors where they arrive
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.float8_e4m3fn, torch.bool,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_INT, _FLOAT, _TEXT, _INTS, _TENSOR, _NONE = b"ifsntz"
_HEAD = struct.Struct("<BxxxxxxxQ")  # a tag and a number
_REAL = struct.Struct("<Bxxxxxxxd")


class MessageWriter:
    """Puts values into a message."""

    def __init__(self, kind: int) -> None:
        self._parts: list[bytes | memoryview] = []
        self._size = 0
        self.number(kind)

    def number(self, value: int) -> None:
        """A whole number of 63 bits and a sign."""
        self._add(_HEAD.pack(_INT, value & (1 << 64) - 1))

    def real(self, value: float) -> None:
        self._add(_REAL.pack(_FLOAT, value))

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogateescape")
        self._add(_HEAD.pack(_TEXT, len(data)))
        self._add(data + bytes(-len(data) % 8))

    def numbers(self, values: Sequence[int]) -> None:
        """Whole numbers, perhaps none."""
        self._add(_HEAD.pack(_INTS, len(values)))
        self._add(struct.pack(f"<{len(values)}q", *values))

    def tensor(self, value: Tensor | None) -> None:
        """A tensor with its dtype and shape, or None."""
        if value is None:
            self._add(_HEAD.pack(_NONE, 0))
            return
        self._add(_HEAD.pack(_TENSOR, _CODES[value.dtype]))
        self.numbers(value.shape)
        self._add(bytes(-self._size % _ALIGN))
        flat = value.detach().cpu().contiguous().reshape(-1)
        self._add(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        self._add(bytes(-self._size % 8))

    def _add(self, part: bytes | memoryview) -> None:
        self._parts.append(part)
        self._size += len(part)

    def data(self) -> bytes:
        """The message."""
        return b"".join(self._parts)


class MessageReader:
    """Takes values out of a message, in the order they were put in; a RankFailed where something else is there."""

    def __init__(self, data: bytearray) -> None:
        self._data, self._at = data, 0
        self.kind = self.number()

    def number(self) -> int:
        value = self._head(_INT)
        return value - (1 << 64) if value >> 63 else value

    def real(self) -> float:
        tag, value = _REAL.unpack(self._take(_REAL.size))
        if tag != _FLOAT:
            raise _garbled()
        return float(value)

    def text(self) -> str:
        size = self._head(_TEXT)
        text = bytes(self._take(size)).decode("utf-8", "surrogateescape")
        self._take(-size % 8)
        return text

    def numbers(self) -> tuple[int, ...]:
        count = self._head(_INTS)
        return struct.unpack(f"<{count}q", self._take(8 * count))

    def tensor(self) -> Tensor:
        """A tensor; it lies in the memory of the message."""
        found = self.maybe_tensor()
        if found is None:
            raise _garbled()
        return found

    def maybe_tensor(self) -> Tensor | None:
        """A tensor, or None."""
        tag, code = _HEAD.unpack(self._take(_HEAD.size))
        if tag == _NONE:
            return None
        if tag != _TENSOR or code >= len(_DTYPES):
            raise _garbled()
        shape, dtype = self.numbers(), _DTYPES[code]
        self._take(-self._at % _ALIGN)
        count = 1
        for extent in shape:
            count *= extent
        start, data = self._at, self._take(count * dtype.itemsize)
        self._take(-self._at % 8)
        if not count:
            return torch.empty(shape, dtype=dtype)
        del data
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=start).view(shape)

    def _head(self, tag: int) -> int:
        found, value = _HEAD.unpack(self._take(_HEAD.size))
        if found != tag:
            raise _garbled()
        return int(value)

    def _take(self, size: int) -> memoryview:
        if size < 0 or self._at + size > len(self._data):
            raise _garbled()
        self._at += size
        return memoryview(self._data)[self._at - size : self._at]


def _garbled() -> RankFailed:
    return RankFailed("a message between ranks is not what was expected of it")
