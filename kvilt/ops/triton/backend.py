"""The operations contract on a CUDA device. What has no kernel here runs as plain torch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
from torch import Tensor

from ...errors import Unsupported
from ...quant.formats import FLOAT8, Format
from ...quant.tensor import QuantTensor, Weight
from ..contract import (
    Activation,
    AttentionMask,
    Decay,
    ExpertMaps,
    ExpertStack,
    FoldHeads,
    Interpolation,
    LinearMap,
    NewKV,
    PackedWeight,
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
from ..kv_dtypes import BFLOAT16, FLOAT32
from ..lowrank import AdapterSlots, LowRank, LowRankTable
from ..native.threads import one_torch_thread
from ..new_kv import write_new
from ..reference import ReferenceOps, ReferencePages
from . import attention as paged
from . import experts as experts_of
from . import (
    float8_pairs,
    invariant_attention,
    lora,
    pages,
    per_head,
    products,
    quantized,
    recurrent,
    repair,
    router,
    vectors,
)
from .copy_stream import host_copies
from .graphs import GraphRecorder
from .packed import pack, packs
from .sampling import TritonSampling
from .streams import TritonStreams

REVISION = 6


class TritonOps(ReferenceOps):
    """Triton kernels and cuBLAS; pages, activations and weights in bfloat16 unless told otherwise."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise Unsupported(f"the triton kernels run on CUDA devices, not on {device}; use backend='native'")
        super().__init__(device, dtype)
        self.kv_dtype = FLOAT32 if dtype == torch.float32 else BFLOAT16
        self.host_copies = host_copies(device)
        self._sampling = TritonSampling(device)
        self.streams = TritonStreams()
        self._recorder = GraphRecorder(self._sampling) if device.type == "cuda" else None
        self._counters = torch.zeros(paged.COUNTERS, dtype=torch.int32, device=device)

    @property
    def numerics(self) -> str:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreter"
        return f"triton-{REVISION}/{str(self.dtype).removeprefix('torch.')}/{kind}"

    @property
    def sampling(self) -> TritonSampling:
        return self._sampling

    def alone(self) -> AbstractContextManager[None]:
        # What is left for the host are small tensors, for which waking other threads takes longer than the work.
        return one_torch_thread()

    def recorder(self) -> GraphRecorder | None:  # type: ignore[override]
        return self._recorder

    def expands(self, format_: Format) -> bool:
        return format_.packed and not packs(format_)

    def kernel(self, format_: Format) -> str:
        if format_.packed and not self.expands(format_):
            return f"packed codes{self._rounds(format_)}"
        return super().kernel(format_)

    def _rounds(self, format_: Format) -> str:
        """What is told of products that round their inputs."""
        if format_.name != FLOAT8 or self.dtype != torch.bfloat16 or self.device.type != "cuda":
            return ""
        index = self.device.index or 0
        return "; 17 to 256 rows of inputs in 8-bit floats" if float8_pairs.has_pairs(index) else ""

    def prepare(self, weight: Weight) -> Prepared:  # type: ignore[override]
        if isinstance(weight, QuantTensor) and len(weight.shape) == 2 and not self.expands(weight.format):
            return pack(weight, self.device)
        return super().prepare(weight)

    def _here(self, weight: Prepared) -> Tensor | PackedWeight:
        """As `prepare` made it, also where the caller did not."""
        made = self.prepare(weight) if isinstance(weight, QuantTensor) else weight
        assert isinstance(made, Tensor | PackedWeight)
        return made

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        table = self._here(table)
        if isinstance(table, PackedWeight):
            return quantized.embed(table.data, table.handle, ids, scale, self.dtype)
        return super().embed(table, ids, scale)

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        weight = self._here(weight)
        if isinstance(weight, PackedWeight):
            made = quantized.product(x.contiguous(), weight.data, weight.handle, residual)
            return made if bias is None else made + bias
        if len(x) == 1:
            return products.gemv(x.contiguous(), weight, bias, residual)
        if residual is None:
            return F.linear(x, weight, bias)
        if bias is not None:
            residual = residual + bias
        return residual.addmm_(x, weight.T) if residual.dtype == x.dtype else residual + F.linear(x, weight)

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        weights, biases = [self._here(weight) for weight, _ in maps], [bias for _, bias in maps]
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(dense) == len(weights) and len(x) == 1:
            return _of_one_row(x, dense, biases, norm)
        _fused_biases(biases)
        parts = self._together(x if norm is None else self.rms_norm(x, *norm), weights)
        return [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]

    def norm_linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm) -> tuple[Tensor, list[Tensor]]:
        dense = [weight for weight, _ in maps if isinstance(weight, Tensor)]
        if len(dense) < len(maps) or len(x) > 1:
            return super().norm_linears(x, maps, norm)
        normed = torch.empty_like(x)
        return normed, _of_one_row(x, dense, [bias for _, bias in maps], norm, normed)

    def _together(self, x: Tensor, weights: Sequence[Tensor | PackedWeight]) -> list[Tensor]:
        """The products of one input, in one launch where the weights have one form."""
        first, sizes = weights[0], [weight.shape[0] for weight in weights]
        if isinstance(first, Tensor) and all(isinstance(weight, Tensor) for weight in weights):
            made = F.linear(x, _fused([weight for weight in weights if isinstance(weight, Tensor)]))
        elif isinstance(first, PackedWeight) and (data := _fused_data(weights)) is not None:
            made = quantized.product(x.contiguous(), data, first.handle)
        else:
            return [self.linear(x, weight) for weight in weights]
        return list(made.split(sizes, dim=1))

    def per_head_linear(self, x: Tensor, weight: Prepared, moved: int = 0) -> Tensor:
        assert isinstance(weight, Tensor)
        return per_head.linear(x, weight, moved)

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        a, b = self._here(gate[0]), self._here(up[0])
        plain = gate[1] is None and up[1] is None
        if isinstance(a, Tensor) and isinstance(b, Tensor) and len(x) == 1 and plain:
            _fused([a, b])
            return products.gate_up(x.contiguous(), a, b, activation, norm)
        fused = isinstance(a, PackedWeight) and not quantized.rounds_inputs(x, a.handle)
        if fused and isinstance(a, PackedWeight) and plain and len(x) < quantized.MANY_ROWS:
            data = _fused_data([a, b])
            if data is not None:
                x = x if norm is None else self.rms_norm(x, *norm)
                return quantized.gate_up(x.contiguous(), data, a.handle, activation)
        opened, passed = self.linears(x, [(a, gate[1]), (b, up[1])], norm)
        return vectors.act_mul(opened, passed, activation)

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return vectors.act_mul(gate, up, activation)

    def stack_experts(self, experts: Sequence[ExpertMaps]) -> ExpertStack:
        tensors = experts_of.gather(experts, self.dtype)
        return ExpertStack(tuple(experts), tensors, asks_the_host=tensors is None)

    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, factors: Tensor | None = None
    ) -> Routed:
        return router.route(logits, routing, bias, factors)

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
        if stack.handle is None:
            return super().experts(x, routed, stack, activation, residual, shared, weigh_inputs)
        held, counters = stack.handle, self._counters
        return experts_of.experts(x, routed, held, activation, residual, shared, weigh_inputs, counters)

    def sum_experts(
        self, made: Tensor, routed: Routed, residual: Tensor | None = None, shared: SharedExpert | None = None
    ) -> Tensor:
        return experts_of.sum_experts(made, routed, residual, shared, made.dtype)

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        return lora.prepare(product, self.device, self.dtype)

    def new_table(self, outputs: int, inputs: int, slots: int) -> lora.TritonTable:  # type: ignore[override]
        return lora.TritonTable(outputs, inputs, slots, self.device)

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        lora.adapt(x, tables, outs, adapter_slots)

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, place: StatePlace) -> Tensor:
        return recurrent.causal_conv(x, weight, bias, silu, place)

    def gated_delta(
        self, mixed: Tensor, step: Tensor, beta: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.gated_delta(mixed, step, beta, decay, heads, place)

    def mamba2(
        self, mixed: Tensor, step: Tensor, skip: Tensor, decay: Decay, heads: FoldHeads, place: StatePlace
    ) -> Tensor:
        return recurrent.mamba2(mixed, step, skip, decay, heads, place)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return vectors.rms_norm(x, weight, eps)

    def rms_norms(self, xs: Sequence[Tensor], norms: Sequence[RmsNorm]) -> list[Tensor]:
        return vectors.rms_norms(xs, norms) if vectors.together(xs, norms) else super().rms_norms(xs, norms)

    def gated_norm(self, x: Tensor, norm: RmsNorm, gate: Tensor) -> Tensor:
        return vectors.gated_norm(x, norm, gate)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return vectors.act_mul(gate, x, "sigmoid")

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return vectors.layer_norm(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return vectors.act_mul(x, None, activation)

    def scale_queries(self, query: Tensor, positions: Tensor, scaling: TemperatureScaling) -> Tensor:
        return vectors.scale_queries(query, positions, scaling)

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        return Rotation(*vectors.angles(positions, inv_freq, mscale), pairing)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return vectors.rotate(x, rotation)

    def attention(
        self,
        query: Tensor,
        store: PageStore,
        layer: int,
        paging: Paging,
        mask: AttentionMask,
        new: NewKV | None = None,
    ) -> Tensor:
        pages = _own(store)
        apart = paging.lengths.max_query > 1 or pages.shape.scales or pages.shape.latent  # no kernel does both
        if new is not None and apart:
            query = write_new(self, query, store, layer, paging, new)
            new = None
        if pages.shape.latent:
            return invariant_attention.attention(query, pages, layer, paging, mask, self._counters)
        return paged.attention(query, pages, layer, paging, mask, self._counters, new)

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        pages.write(_own(store), layer, slots, keys, values, rotation)

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
        own = _own(store)
        if own.shape.latent:  # queries and keys have not one size
            pages.write(own, layer, slots, keys, values, rotation)
            return vectors.rotate(query, rotation)
        return pages.rotate_and_write(own, layer, slots, query, keys, values, rotation)

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
        repair.interpolate(_own(store), layer, slots, interpolation, kept, fresh, rotation)


def _of_one_row(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm: RmsNorm | None,
    normed: Tensor | None = None,
) -> list[Tensor]:
    """Maps of one row in one launch; some biases and not others are added apart."""
    fused = _fused_biases(biases)
    made = products.gemv(x.contiguous(), _fused(weights), fused, None, norm, normed)
    parts = list(made.split([len(weight) for weight in weights], dim=1))
    if fused is not None:
        return parts
    return [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]


def _fused(rows: Sequence[Tensor]) -> Tensor:
    """Weights of one input as one tensor. The first time they move into it, so that they are in memory once.

    That is before any step with them is captured: a graph knows memory by its address.
    """
    if not _adjacent(rows):
        whole, start = torch.cat(list(rows)), 0
        for one in rows:
            one.set_(whole[start : start + len(one)])  # type: ignore[call-overload]
            start += len(one)
    outputs, first = sum(len(one) for one in rows), rows[0]
    return first.as_strided((outputs, *first.shape[1:]), first.stride(), first.storage_offset())


def _fused_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Biases of one input as one, like `_fused`; None if some are missing."""
    there = [bias for bias in biases if bias is not None]
    return _fused(there) if there and len(there) == len(biases) else None


def _fused_data(weights: Sequence[Tensor | PackedWeight]) -> Tensor | None:
    """Packed weights as one, like `_fused`; None if they have not the same layout."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) < len(weights) or any(one.handle != packed[0].handle for one in packed):
        return None
    return _fused([one.data for one in packed])


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether they stand one after the other in one piece of memory."""
    at, storage = tensors[0].storage_offset(), tensors[0].untyped_storage().data_ptr()
    for one in tensors:
        if one.untyped_storage().data_ptr() != storage or one.storage_offset() != at:
            return False
        at += one.numel()
    return True


def _own(store: PageStore) -> ReferencePages:
    assert isinstance(store, ReferencePages)
    return store
