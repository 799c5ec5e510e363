"""How one layer's KV becomes bytes: raw and zstd give the same bits back, int8 and k8v4 do not and say so.

A codec knows sizes from the form, never from the bytes: no frame can ask for more memory than its record promised.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import BlobError, StoreError
from ..ops.kv_dtypes import KV_DTYPES
from .address import LayerForm
from .layer import LayerKV, layer_bytes, part_bytes

_NOT_FLOATS = "only finite floats can be rounded; store this KV with the codec raw"
GROUP = 32  # values of a head that share a step in k8v4
Data = bytes | bytearray | memoryview


class Codec(Protocol):
    """One way to write a layer."""

    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool: ...

    def encode(self, layer: LayerKV) -> bytes: ...

    def decode(self, data: Data, form: LayerForm, tokens: int) -> LayerKV:
        """The layer in these bytes; a BlobError where they cannot be one of this form."""
        ...


class Raw:
    """Keys, values and scales one after the other, little endian."""

    name = "raw"
    lossy = False

    def encode(self, layer: LayerKV) -> bytes:
        return b"".join(to_bytes(part) for part in layer.parts)

    def decode(self, data: Data, form: LayerForm, tokens: int) -> LayerKV:
        check_size(data, layer_bytes(form, tokens))
        heads, buffer = (tokens, form.heads), _own(data)
        scales = heads if form.scaled else (0,)
        own = KV_DTYPES[form.dtype]
        shapes = ((*heads, form.key_dim), (*heads, own.value_width(form.value_dim)), scales, scales)
        dtypes = (own.storage, own.value_storage, torch.float32, torch.float32)
        parts, at = [], 0
        for size, shape, dtype in zip(part_bytes(form, tokens), shapes, dtypes, strict=True):
            parts.append(_tensor(buffer, at, size, shape, dtype))
            at += size
        return LayerKV(*parts)


class Int8:
    """Keys and values in 255 steps, with a float32 scale for each token and head."""

    name = "int8"
    lossy = True

    def encode(self, layer: LayerKV) -> bytes:
        _check_unscaled(layer)
        return b"".join(part for one in (layer.keys, layer.values) for part in _to_int8(one))

    def decode(self, data: Data, form: LayerForm, tokens: int) -> LayerKV:
        cells = tokens * form.heads
        check_size(data, cells * (8 + form.key_dim + form.value_dim))
        buffer, split = _own(data), cells * (4 + form.key_dim)
        shape, dtype = (tokens, form.heads), KV_DTYPES[form.dtype].storage
        keys = _from_int8(buffer, 0, (*shape, form.key_dim), dtype)
        return LayerKV(keys, _from_int8(buffer, split, (*shape, form.value_dim), dtype))


class K8V4:
    """Keys like int8; values in 16 steps between the smallest and the largest of 32 neighbours."""

    name = "k8v4"
    lossy = True

    def encode(self, layer: LayerKV) -> bytes:
        _check_unscaled(layer)
        return b"".join((*_to_int8(layer.keys), *_to_int4(layer.values)))

    def decode(self, data: Data, form: LayerForm, tokens: int) -> LayerKV:
        cells, groups = tokens * form.heads, math.ceil(form.value_dim / GROUP)
        check_size(data, cells * (4 + form.key_dim + groups * (4 + GROUP // 2)))
        buffer, split = _own(data), cells * (4 + form.key_dim)
        shape, dtype = (tokens, form.heads), KV_DTYPES[form.dtype].storage
        keys = _from_int8(buffer, 0, (*shape, form.key_dim), dtype)
        return LayerKV(keys, _from_int4(buffer, split, (*shape, form.value_dim), dtype))


def to_bytes(part: Tensor) -> bytes:
    return part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b""


def check_size(data: Data, expected: int) -> None:
    if len(data) != expected:
        raise BlobError("payload", f"a layer of {expected} bytes was promised and {len(data)} are there")


def _own(data: Data) -> bytearray:
    return data if isinstance(data, bytearray) else bytearray(data)


def _tensor(buffer: bytearray, at: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if at % dtype.itemsize:  # where a tensor may not begin
        buffer, at = buffer[at : at + size], 0
    return torch.frombuffer(buffer, dtype=dtype, count=size // dtype.itemsize, offset=at).view(shape)


def _check_unscaled(layer: LayerKV) -> None:
    """Numbers that have scales were rounded already."""
    if layer.form.scaled:
        raise StoreError("nonfinite", _NOT_FLOATS)


def _to_int8(x: Tensor) -> tuple[bytes, bytes]:
    if not bool(torch.isfinite(x).all()):
        raise StoreError("nonfinite", _NOT_FLOATS)
    if x.shape[2] == 0:
        return to_bytes(torch.zeros(x.shape[:2])), b""
    x = x.float()
    scale = x.abs().amax(dim=2) / 127
    rounded = torch.round(x / torch.where(scale > 0, scale, torch.ones(()))[..., None])
    return to_bytes(scale), to_bytes(rounded.clamp(-127, 127).to(torch.int8))


def _from_int8(buffer: bytearray, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    cells = shape[0] * shape[1]
    scale = _tensor(buffer, at, 4 * cells, shape[:2], torch.float32)
    steps = _tensor(buffer, at + 4 * cells, cells * shape[2], shape, torch.int8)
    return (steps.float() * scale[..., None]).to(dtype)


def _to_int4(x: Tensor) -> tuple[bytes, bytes]:
    if not bool(torch.isfinite(x).all()):
        raise StoreError("nonfinite", _NOT_FLOATS)
    tokens, heads, dim = x.shape
    groups = math.ceil(dim / GROUP)
    if groups * GROUP > dim:  # the last value again, so that padding widens no range
        x = torch.cat([x, x[..., -1:].expand(tokens, heads, groups * GROUP - dim)], dim=2)
    x = x.float().reshape(tokens, heads, groups, GROUP)
    low = x.amin(dim=3).half() if groups else torch.zeros(tokens, heads, 0, dtype=torch.half)
    high = x.amax(dim=3) if groups else low.float()
    step = ((high - low.float()) / 15).half()
    if not bool(torch.isfinite(low).all() and torch.isfinite(step).all()):
        raise StoreError("nonfinite", "a value is past the range of float16; store this KV with the codec raw")
    wide = torch.where(step > 0, step.float(), torch.ones(()))
    nibbles = torch.round((x - low.float()[..., None]) / wide[..., None]).clamp(0, 15).to(torch.uint8)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return to_bytes(torch.stack([low, step], dim=3)), to_bytes(packed)


def _from_int4(buffer: bytearray, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tokens, heads, dim = shape
    groups = math.ceil(dim / GROUP)
    count = tokens * heads * groups
    ranges = _tensor(buffer, at, 4 * count, (tokens, heads, groups, 2), torch.float16).float()
    packed = _tensor(buffer, at + 4 * count, count * GROUP // 2, (tokens, heads, groups, GROUP // 2), torch.uint8)
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(tokens, heads, groups, GROUP)
    values = ranges[..., :1] + nibbles.float() * ranges[..., 1:]
    return values.reshape(tokens, heads, groups * GROUP)[..., :dim].to(dtype).contiguous()


def planes(data: bytes, width: int) -> bytes:
    """All first bytes of numbers, then all second ones: exponents beside exponents compress better."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes() if width > 1 else data


def unplanes(data: bytes, width: int) -> bytearray:
    """The inverse of `planes`."""
    if width == 1:
        return bytearray(data)
    made = bytearray(len(data))
    np.frombuffer(made, np.uint8).reshape(-1, width)[:] = np.frombuffer(data, np.uint8).reshape(width, -1).T
    return made
