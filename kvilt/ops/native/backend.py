"""The operations contract on C++ kernels. A row's result is bit-identical whatever stands beside it in the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import Unsupported
from ...quant.formats import Format
from ...quant.tensor import Weight
from ..contract import (
    Activation,
    AttentionMask,
    Decay,
    ExpertMaps,
    ExpertStack,
    FoldHeads,
    HostCopy,
    Interpolation,
    KeysValues,
    LinearMap,
    NewKV,
    PackedWeight,
    PageShape,
    PageStore,
    Paging,
    Pairing,
    Prepared,
    RmsNorm,
    Rotation,
    Routed,
    Routing,
    SharedExpert,
    StatePlace,
    TemperatureScaling,
)
from ..host_copies import DirectCopies
from ..kv_dtypes import FLOAT16
from ..lowrank import AdapterSlots, LowRank, LowRankTable
from ..new_kv import write_new
from . import experts as experts_of
from . import lora, per_head, recurrent
from . import pages as paged
from .border import I64, F32Address, check, check_dims, checked, f32, i64
from .cores import default_threads, find_cores, placement
from .memory import Buffers, Slabs
from .pack import kernel, pack, packs
from .record import NativeRecorder
from .reduce import NativeReductions
from .streams import streams_of
from .threads import one_torch_thread

if TYPE_CHECKING:
    from _kvilt_native import Activation as NativeActivation
    from _kvilt_native import KernelRunner


def native_isas() -> tuple[str, ...]:
    """The instruction sets of the native kernels that this machine can run, best first; none without the kernels."""
    try:
        import _kvilt_native as module
    except ImportError:
        return ()
    return tuple(module.available_isas())


class NativeOps:
    """C++ kernels on the CPU."""

    name = "native"
    deterministic = True  # law 5: each sum has one order
    device = torch.device("cpu")
    dtype = torch.float32
    kv_dtype = FLOAT16  # half the bytes of a long context, which is what decoding it waits for

    def __init__(self, threads: int | None = None, isa: str = "auto", *, numa: bool = True) -> None:
        try:
            import _kvilt_native as module
        except ImportError as error:
            raise Unsupported(
                f"the native CPU kernels are not installed ({error}); "
                "install a C++20 compiler and reinstall kvilt to build them"
            ) from None
        if not hasattr(module, "KernelRunner"):
            raise Unsupported(
                "the installed native kernels are older than this kvilt; reinstall it to build them again"
            )
        self._module = module
        try:
            count = threads or default_threads(torch.get_num_threads())
            cpus = placement(count, find_cores()) if numa else []
            self._runner: KernelRunner = module.KernelRunner(count, isa, cpus)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        self._activations: dict[str, NativeActivation] = dict(module.Activation.__members__)
        self._slabs = Slabs()
        self.host_copies = DirectCopies(self.device)
        self.buffers = Buffers()
        self._recorder = NativeRecorder(self._runner, self.using)
        self.reductions = NativeReductions(self._runner)
        self.streams = streams_of(self._runner, self)

    @property
    def numerics(self) -> str:
        # The module's own revision, whatever Python code runs beside it: modules before the third did not say it.
        return f"native-{getattr(self._module, 'REVISION', 2)}/{self._runner.numerics}"

    def alone(self) -> AbstractContextManager[None]:
        # Torch's threads spin for a while after each of its operations, on the cores that our own threads need.
        return one_torch_thread()

    @property
    def sampling(self) -> None:
        return None

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

    def expands(self, format_: Format) -> bool:
        return format_.packed and not packs(format_)

    def numerics_for(self, formats: Collection[str]) -> str:
        # These became float32 before they had tiles.
        return "/".join((self.numerics, *(f"{name} tiles" for name in ("F8_E4M3", "Q2_K", "Q3_K") if name in formats)))

    def kernel(self, format_: Format) -> str:
        return kernel(format_)

    def prepare(self, weight: Weight) -> PackedWeight:
        return pack(self._runner, self._slabs, weight)

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        packed, ids = self._packed(table), checked("ids", ids.contiguous(), (ids.numel(),), I64)
        out = self.buffers.empty(len(ids), packed.shape[1])
        self._runner.embed(packed.handle, i64(ids), len(ids), scale, f32(out))
        return out

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        packed = self._packed(weight)
        x = _input(x, packed)
        _check_bias(bias, packed)
        if residual is not None:
            residual = checked("residual", residual.contiguous(), (x.shape[0], packed.shape[0]))
        out = self.buffers.empty(x.shape[0], packed.shape[0])
        to = ([f32(bias)], [f32(residual)], [f32(out)])
        self._runner.linears([packed.handle], *to, f32(x), x.shape[0])
        return out

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        x = x if norm is None else self.rms_norm(x, *norm)
        packed = [self._packed(weight) for weight, _ in maps]
        for (_, bias), one in zip(maps, packed, strict=True):
            x = _input(x, one)
            _check_bias(bias, one)
        outs = [self.buffers.empty(x.shape[0], one.shape[0]) for one in packed]
        to = ([f32(bias) for _, bias in maps], [F32Address(0)] * len(maps), [f32(out) for out in outs])
        self._runner.linears([one.handle for one in packed], *to, f32(x), x.shape[0])
        return outs

    def norm_linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm) -> tuple[Tensor, list[Tensor]]:
        normed = self.rms_norm(x, *norm)
        return normed, self.linears(normed, maps)

    def prepare_per_head(self, weight: Tensor) -> PackedWeight:
        return per_head.pack(weight)

    def per_head_linear(self, x: Tensor, weight: Prepared, moved: int = 0) -> Tensor:
        return per_head.linear(self._runner, self.buffers, x, weight, moved)

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        x = x if norm is None else self.rms_norm(x, *norm)
        gate_weight, up_weight = self._packed(gate[0]), self._packed(up[0])
        check(gate_weight.shape == up_weight.shape, "up", "a gate and what it opens must have one shape")
        x = _input(x, gate_weight)
        _check_bias(gate[1], gate_weight)
        _check_bias(up[1], up_weight)
        out = self.buffers.empty(x.shape[0], gate_weight.shape[0])
        maps = (gate_weight.handle, f32(gate[1]), up_weight.handle, f32(up[1]))
        self._runner.gate_up(*maps, f32(x), x.shape[0], self._activations[activation], f32(out))
        return out

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        gate, up = checked("gate", gate, gate.shape), checked("up", up, gate.shape)
        out = self.buffers.empty(*gate.shape)
        self._runner.act_mul(f32(gate), f32(up), gate.numel(), self._activations[activation], f32(out))
        return out

    def stack_experts(self, experts: Sequence[ExpertMaps]) -> ExpertStack:
        return experts_of.stack(experts)

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
    ) -> Routed:
        return experts_of.route(self._runner, self.buffers, logits, routing, bias, factors)

    def experts(
        self,
        x: Tensor,
        routed: Routed,
        stack: ExpertStack,
        activation: Activation,
        residual: Tensor | None = None,
        shared: SharedExpert | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        how = self._activations[activation]
        return experts_of.experts(self._runner, self.buffers, x, routed, stack, how, residual, shared, weigh_inputs)

    def sum_experts(
        self, made: Tensor, routed: Routed, residual: Tensor | None = None, shared: SharedExpert | None = None
    ) -> Tensor:
        return experts_of.sum_experts(self._runner, self.buffers, made, routed, residual, shared)

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        return lora.prepare(product)

    def new_table(self, outputs: int, inputs: int, slots: int) -> LowRankTable:
        return lora.NativeTable(outputs, inputs, slots)

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        lora.adapt(self._runner, x, tables, outs, adapter_slots)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        x = checked("x", x, x.shape)
        out = self.buffers.empty(*x.shape)
        self._runner.act_mul(f32(x), F32Address(0), x.numel(), self._activations[activation], f32(out))
        return out

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        x, y = checked("x", x.contiguous(), x.shape), checked("y", y.contiguous(), x.shape)
        out = self.buffers.empty(*x.shape)
        if scale == 1.0:
            self._runner.add(f32(x), f32(y), x.numel(), f32(out))
        else:
            self._runner.add_scaled(f32(x), f32(y), scale, x.numel(), f32(out))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n = x.shape[-1] if x.dim() else 0
        check(n > 0, "x", "must have at least one number in each row")
        x, weight = checked("x", x.contiguous(), x.shape), checked("weight", weight, (n,))
        out = self.buffers.empty(*x.shape)
        self._runner.rms_norm(f32(x), f32(weight), eps, x.numel() // n, n, f32(out))
        return out

    def rms_norms(self, xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> list[Tensor]:
        return [self.rms_norm(x, *norm) for x, norm in zip(xs, norms, strict=True)]

    def gated_norm(self, x: Tensor, norm: RmsNorm, gate: Tensor) -> Tensor:
        return self.act_mul(gate, self.rms_norm(x, *norm).view(gate.shape), "silu")

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        n = x.shape[-1] if x.dim() else 0
        check(n > 0, "x", "must have at least one number in each row")
        x, weight = checked("x", x.contiguous(), x.shape), checked("weight", weight, (n,))
        if bias is not None:
            checked("bias", bias, (n,))
        out = self.buffers.empty(*x.shape)
        self._runner.layer_norm(f32(x), f32(weight), f32(bias), eps, x.numel() // n, n, f32(out))
        return out

    def scale_queries(self, query: Tensor, positions: Tensor, scaling: TemperatureScaling) -> Tensor:
        check_dims("query", query, 3)
        query = checked("query", query.contiguous(), query.shape)
        positions = checked("positions", positions.contiguous(), (len(query),), I64)
        out = self.buffers.empty(*query.shape)
        at = (f32(query), i64(positions), len(query), query.shape[1] * query.shape[2])
        self._runner.scale_queries(*at, scaling.beta, scaling.length, scaling.offset, f32(out))
        return out

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        positions = checked("positions", positions.contiguous(), (positions.numel(),), I64)
        inv_freq, shape = checked("inv_freq", inv_freq, (inv_freq.numel(),)), (len(positions), len(inv_freq))
        cos, sin = self.buffers.empty(*shape), self.buffers.empty(*shape)
        angles = (i64(positions), len(positions), f32(inv_freq), len(inv_freq))
        self._runner.rope_cos_sin(*angles, mscale, f32(cos), f32(sin))
        return Rotation(cos, sin, pairing)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        check_dims("x", x, 3)
        x = checked("x", x.contiguous(), x.shape)
        out = self.buffers.empty(*x.shape)
        tokens, heads, dim = x.shape
        pairs = paged.check_rotation(rotation, tokens, dim)
        at = (f32(x), f32(rotation.cos), f32(rotation.sin))
        self._runner.rotate(*at, tokens, heads, dim, pairs, rotation.pairing == "interleaved", f32(out))
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        x = checked("x", x, x.shape)
        self._runner.soft_cap(f32(x), x.numel(), cap)
        return x

    def attention(
        self,
        query: Tensor,
        store: PageStore,
        layer: int,
        paging: Paging,
        mask: AttentionMask,
        new: NewKV | None = None,
    ) -> Tensor:
        if new is not None:
            query = write_new(self, query, store, layer, paging, new)
        return paged.attention(self._runner, self.buffers, query, store, layer, paging, mask)

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
        return recurrent.causal_conv(self._runner, self.buffers, x, weight, bias, silu, place)

    def gated_delta(
        self, mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.gated_delta(self._runner, self.buffers, mixed, step, beta, decay, heads, place)

    def mamba2(
        self, mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.mamba2(self._runner, self.buffers, mixed, step, skip, decay, heads, place)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return recurrent.sigmoid_mul(self._runner, self.buffers, x, gate)

    def key_mass(
        self, query: Tensor, store: PageStore, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
    ) -> Tensor:
        return paged.key_mass(self._runner, query, store, layer, table, positions, mask)

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        return paged.new_pages(shape, pages, device)

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        paged.write(self._runner, store, layer, slots, keys, values, rotation)

    def rotate_and_write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        query = self.rotate(query, rotation)
        self.write(store, layer, slots, keys, values, rotation)
        return query

    def interpolate(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        interpolation: Interpolation,
        kept: tuple[Tensor, Tensor],
        fresh: tuple[Tensor, Tensor],
        rotation: Rotation | None = None,
    ) -> None:
        paged.interpolate(self._runner, store, layer, slots, interpolation, kept, fresh, rotation)

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        paged.copy_pages(source, sources, target, targets)

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        return paged.read_slots(self._runner, store, slots)

    def copy_out(self, store: PageStore, slots: Tensor) -> HostCopy:
        kv = self.read_slots(store, slots)
        return HostCopy((kv.keys, kv.values, kv.key_scales, kv.value_scales))

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        paged.write_slots(self._runner, store, slots, kv)

    def _packed(self, weight: Prepared) -> PackedWeight:
        return weight if isinstance(weight, PackedWeight) else self.prepare(weight)


def _input(x: Tensor, packed: PackedWeight) -> Tensor:
    """What a weight is multiplied with, [rows, inputs]."""
    check_dims("x", x, 2)
    return checked("x", x.contiguous(), (x.shape[0], packed.shape[1]))


def _check_bias(bias: Tensor | None, packed: PackedWeight) -> None:
    if bias is not None:
        checked("bias", bias, (packed.shape[0],))
