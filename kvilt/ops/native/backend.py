"""The operations contract on C++ kernels. A row's result is bit-identical whatever stands beside it in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from ...quant.tensor import Weight
from ..contract import (
    Activation,
    AttentionMask,
    KeysValues,
    PackedWeight,
    PageShape,
    PageStore,
    Paging,
    Prepared,
    Rotation,
)
from ..reference import ReferenceOps
from .pack import KINDS, pack

REVISION = 1  # of the arithmetic: KV of another revision is not the same bits
_DTYPES = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})
_ACTIVATIONS: MappingProxyType[Activation, int] = MappingProxyType({"silu": 0, "gelu_tanh": 1})


@dataclass(frozen=True, slots=True)
class NativePages:
    """Keys with tokens as lanes, values with dims as lanes, so that both products run along memory."""

    shape: PageShape
    keys: Tensor  # [layers, pages, kv_heads, key_dim, lanes]
    values: Tensor  # [layers, pages, kv_heads, page_tokens, value_dim]
    layers: tuple[Any, ...]  # handles for the kernels, one per layer


class NativeOps:
    """C++ kernels on the CPU; what they do not have is done by the reference."""

    name = "native"

    def __init__(self, threads: int | None = None, isa: str = "auto") -> None:
        try:
            import _kvilt_native as module
        except ImportError as error:
            raise Unsupported(
                f"the native CPU kernels are not installed ({error}); "
                "install a C++20 compiler and reinstall kvilt to build them"
            ) from None
        self._module = module
        try:
            self._engine = module.Engine(threads or torch.get_num_threads(), isa)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        self._reference = ReferenceOps()

    @property
    def numerics(self) -> str:
        return f"native-{REVISION}/{self._engine.isa}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        # Torch's threads spin for a while after each of its operations, on the cores that our own threads need.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def prepare(self, weight: Weight) -> PackedWeight:
        layout = pack(weight)
        at = (layout.data.data_ptr(), layout.data.numel())
        handle = self._module.Weight(layout.kind, layout.outputs, layout.inputs, *at)
        return PackedWeight(KINDS[layout.kind], (layout.outputs, layout.inputs), layout.data, handle)

    def embed(self, table: Prepared, ids: Tensor) -> Tensor:
        packed, ids = self._packed(table), ids.contiguous()
        out = torch.empty((len(ids), packed.shape[1]))
        self._engine.embed(packed.handle, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None) -> Tensor:
        return self.linears(x, [(weight, bias)])[0]

    def linears(self, x: Tensor, maps: Sequence[tuple[Prepared, Tensor | None]]) -> list[Tensor]:
        x = x.contiguous()
        packed = [self._packed(weight) for weight, _ in maps]
        outs = [torch.empty((x.shape[0], one.shape[0])) for one in packed]
        biases = [0 if bias is None else bias.data_ptr() for _, bias in maps]
        handles, out_at = [one.handle for one in packed], [out.data_ptr() for out in outs]
        self._engine.linears(handles, biases, out_at, x.data_ptr(), x.shape[0])
        return outs

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.shape[-1]
        self._engine.rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n, out.data_ptr())
        return out

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        tokens, heads, dim = x.shape
        pairs = rotation.cos.shape[1]
        at = (x.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr())
        self._engine.rotate(*at, tokens, heads, dim, pairs, rotation.pairing == "interleaved", out.data_ptr())
        return out

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        if activation not in _ACTIVATIONS:
            return self._reference.gate(gate, up, activation)
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        kind = _ACTIVATIONS[activation]
        self._engine.gate(gate.data_ptr(), up.data_ptr(), gate.numel(), kind, out.data_ptr())
        return out

    def attend(self, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
        pages, query = _own(store), query.contiguous()
        out = torch.empty((query.shape[0], query.shape[1], pages.shape.value_dim))
        tables, positions = paging.tables.contiguous(), paging.positions.contiguous()
        where = (tables.data_ptr(), tables.shape[1], list(paging.starts), positions.data_ptr())
        sees = (mask.scale, mask.window, mask.soft_cap)
        self._engine.attend(query.data_ptr(), query.shape[1], pages.layers[layer], *where, *sees, out.data_ptr())
        return out

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> NativePages:
        if device.type != "cpu" or shape.dtype not in _DTYPES:
            raise Unsupported(f"the native backend keeps pages of floats on the CPU, not {shape.dtype} on {device}")
        lanes = -(-shape.page_tokens // 16) * 16
        keys = torch.empty((shape.layers, pages, shape.kv_heads, shape.key_dim, lanes), dtype=shape.dtype)
        values = torch.empty(
            (shape.layers, pages, shape.kv_heads, shape.page_tokens, shape.value_dim), dtype=shape.dtype
        )
        sizes = (_DTYPES[shape.dtype], shape.page_tokens, lanes, shape.kv_heads, shape.key_dim, shape.value_dim)
        layers = tuple(
            self._module.PageLayer(*sizes, keys[layer].data_ptr(), values[layer].data_ptr())
            for layer in range(shape.layers)
        )
        return NativePages(shape, keys, values, layers)

    def write(self, store: PageStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        pages, slots, keys, values = _own(store), slots.contiguous(), keys.contiguous(), values.contiguous()
        at = (slots.data_ptr(), len(slots), keys.data_ptr(), values.data_ptr())
        self._engine.write(pages.layers[layer], *at)

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        here, there = _own(source), _own(target)
        there.keys[:, targets] = here.keys[:, sources]
        there.values[:, targets] = here.values[:, sources]

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        pages = _own(store)
        page, at = slots // pages.shape.page_tokens, slots % pages.shape.page_tokens
        # Indices around a slice put the tokens first: [tokens, layers, heads, dim].
        keys = pages.keys[:, page, :, :, at].transpose(0, 1)
        values = pages.values[:, page, :, at].transpose(0, 1)
        return KeysValues(keys.contiguous(), values.contiguous())

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        pages = _own(store)
        page, at = slots // pages.shape.page_tokens, slots % pages.shape.page_tokens
        pages.keys[:, page, :, :, at] = kv.keys.transpose(0, 1)
        pages.values[:, page, :, at] = kv.values.transpose(0, 1)

    def _packed(self, weight: Prepared) -> PackedWeight:
        return weight if isinstance(weight, PackedWeight) else self.prepare(weight)


def _own(store: PageStore) -> NativePages:
    assert isinstance(store, NativePages)
    return store
