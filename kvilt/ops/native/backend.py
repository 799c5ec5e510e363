"""The operations contract on C++ kernels. A row's result is bit-identical whatever stands beside it in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import Unsupported
from ...quant.tensor import Weight
from ..contract import (
    Activation,
    AttentionMask,
    Interpolation,
    KeysValues,
    LinearMap,
    PackedWeight,
    PageShape,
    PageStore,
    Paging,
    Pairing,
    Prepared,
    Rotation,
)
from ..lowrank import AdapterSlots, LowRank, LowRankTable
from . import lora
from . import pages as paged
from .border import I64, check, check_dims, checked
from .memory import Buffers, Slabs
from .pack import pack
from .record import NativeRecorder
from .reduce import NativeReductions
from .threads import one_torch_thread

_ACTIVATIONS: MappingProxyType[Activation, int] = MappingProxyType({"silu": 0, "gelu_tanh": 1, "gelu": 2})


class NativeOps:
    """C++ kernels on the CPU."""

    name = "native"
    kv_dtype = torch.float16  # half the bytes of a long context, which is what decoding it waits for

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
        self._slabs = Slabs()
        self.buffers = Buffers()
        self._recorder = NativeRecorder(self._engine, self.using)
        self.reductions = NativeReductions(self._engine)

    @property
    def numerics(self) -> str:
        # The module's own revision, whatever Python code runs beside it: modules before the third did not say it.
        return f"native-{getattr(self._module, 'REVISION', 2)}/{self._engine.isa}"

    def alone(self) -> AbstractContextManager[None]:
        # Torch's threads spin for a while after each of its operations, on the cores that our own threads need.
        return one_torch_thread()

    def recorder(self) -> NativeRecorder:
        return self._recorder

    @contextmanager
    def using(self, buffers: Buffers) -> Iterator[None]:
        """Put results into other buffers for a while."""
        own, self.buffers = self.buffers, buffers
        try:
            yield
        finally:
            self.buffers = own

    def prepare(self, weight: Weight) -> PackedWeight:
        return pack(self._module, self._engine, self._slabs, weight)

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        packed, ids = self._packed(table), checked("ids", ids.contiguous(), (ids.numel(),), I64)
        out = self.buffers.empty(len(ids), packed.shape[1])
        self._engine.embed(packed.handle, ids.data_ptr(), len(ids), scale, out.data_ptr())
        return out

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        packed = self._packed(weight)
        x = _input(x, packed)
        _check_bias(bias, packed)
        if residual is not None:
            residual = checked("residual", residual.contiguous(), (x.shape[0], packed.shape[0]))
        out = self.buffers.empty(x.shape[0], packed.shape[0])
        to = ([_at(bias)], [_at(residual)], [out.data_ptr()])
        self._engine.linears([packed.handle], *to, x.data_ptr(), x.shape[0])
        return out

    def linears(self, x: Tensor, maps: Sequence[LinearMap]) -> list[Tensor]:
        packed = [self._packed(weight) for weight, _ in maps]
        for (_, bias), one in zip(maps, packed, strict=True):
            x = _input(x, one)
            _check_bias(bias, one)
        outs = [self.buffers.empty(x.shape[0], one.shape[0]) for one in packed]
        to = ([_at(bias) for _, bias in maps], [0] * len(maps), [out.data_ptr() for out in outs])
        self._engine.linears([one.handle for one in packed], *to, x.data_ptr(), x.shape[0])
        return outs

    def gate_up(self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation) -> Tensor:
        opens, act_mul = self._packed(gate[0]), self._packed(up[0])
        check(opens.shape == act_mul.shape, "up", "a gate and what it opens must have one shape")
        x = _input(x, opens)
        _check_bias(gate[1], opens)
        _check_bias(up[1], act_mul)
        out = self.buffers.empty(x.shape[0], opens.shape[0])
        maps = (opens.handle, _at(gate[1]), act_mul.handle, _at(up[1]))
        self._engine.gated(*maps, x.data_ptr(), x.shape[0], _ACTIVATIONS[activation], out.data_ptr())
        return out

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        gate, up = checked("gate", gate, gate.shape), checked("up", up, gate.shape)
        out = self.buffers.empty(*gate.shape)
        self._engine.open(gate.data_ptr(), up.data_ptr(), gate.numel(), _ACTIVATIONS[activation], out.data_ptr())
        return out

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        return lora.prepare(self._engine, product)

    def new_table(self, outputs: int, inputs: int, slots: int) -> LowRankTable:
        return lora.NativeTable(outputs, inputs, slots)

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        lora.adapt(self._engine, x, tables, outs, adapter_slots)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = checked("x", x.contiguous(), x.shape), checked("y", y.contiguous(), x.shape)
        out = self.buffers.empty(*x.shape)
        self._engine.add(x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n = x.shape[-1] if x.dim() else 0
        check(n > 0, "x", "must have at least one number in each row")
        x, weight = checked("x", x.contiguous(), x.shape), checked("weight", weight, (n,))
        out = self.buffers.empty(*x.shape)
        self._engine.rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n, out.data_ptr())
        return out

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        positions = checked("positions", positions.contiguous(), (positions.numel(),), I64)
        inv_freq, shape = checked("inv_freq", inv_freq, (inv_freq.numel(),)), (len(positions), len(inv_freq))
        cos, sin = self.buffers.empty(*shape), self.buffers.empty(*shape)
        angles = (positions.data_ptr(), len(positions), inv_freq.data_ptr(), len(inv_freq))
        self._engine.rotation(*angles, mscale, cos.data_ptr(), sin.data_ptr())
        return Rotation(cos, sin, pairing)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        check_dims("x", x, 3)
        x = checked("x", x.contiguous(), x.shape)
        out = self.buffers.empty(*x.shape)
        tokens, heads, dim = x.shape
        pairs = paged.check_rotation(rotation, tokens, dim)
        at = (x.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr())
        self._engine.rotate(*at, tokens, heads, dim, pairs, rotation.pairing == "interleaved", out.data_ptr())
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        x = checked("x", x, x.shape)
        self._engine.soft_cap(x.data_ptr(), x.numel(), cap)
        return x

    def attention(self, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
        return paged.attention(self._engine, self.buffers, query, store, layer, paging, mask)

    def key_mass(
        self, query: Tensor, store: PageStore, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
    ) -> Tensor:
        return paged.key_mass(self._engine, query, store, layer, table, positions, mask)

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        return paged.new_pages(self._module, shape, pages, device)

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        paged.write(self._engine, store, layer, slots, keys, values, rotation)

    def interpolate(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        who: Interpolation,
        kept: tuple[Tensor, Tensor],
        fresh: tuple[Tensor, Tensor],
        rotation: Rotation | None = None,
    ) -> None:
        paged.interpolate(self._engine, store, layer, slots, who, kept, fresh, rotation)

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        paged.copy_pages(source, sources, target, targets)

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        return paged.read_slots(self._engine, store, slots)

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        paged.write_slots(self._engine, store, slots, kv)

    def _packed(self, weight: Prepared) -> PackedWeight:
        return weight if isinstance(weight, PackedWeight) else self.prepare(weight)


def _input(x: Tensor, packed: PackedWeight) -> Tensor:
    """What a weight is multiplied with, [rows, inputs]."""
    check_dims("x", x, 2)
    return checked("x", x.contiguous(), (x.shape[0], packed.shape[1]))


def _check_bias(bias: Tensor | None, packed: PackedWeight) -> None:
    if bias is not None:
        checked("bias", bias, (packed.shape[0],))


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
