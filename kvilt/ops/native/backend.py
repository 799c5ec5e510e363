"""The operations contract on C++ kernels. A row's result is bit-identical whatever stands beside it in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType

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
from . import pages as paged
from .pack import KINDS, pack

REVISION = 1  # of the arithmetic: KV of another revision is not the same bits
_ACTIVATIONS: MappingProxyType[Activation, int] = MappingProxyType({"silu": 0, "gelu_tanh": 1})


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
        return paged.attend(self._engine, query, store, layer, paging, mask)

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        return paged.new_pages(self._module, shape, pages, device)

    def write(self, store: PageStore, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        paged.write(self._engine, store, layer, slots, keys, values)

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        paged.copy_pages(source, sources, target, targets)

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        return paged.read_slots(store, slots)

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        paged.write_slots(store, slots, kv)

    def _packed(self, weight: Prepared) -> PackedWeight:
        return weight if isinstance(weight, PackedWeight) else self.prepare(weight)
