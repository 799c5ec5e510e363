"""The CUDA backend whose results do not depend on the batch: law 5 to the bit.

Each output element is summed in one order, whatever else is in a step. Products of any number of rows are kernels of
one order of accumulation (`invariant_products`), keys are walked in segments of a fixed size (`invariant_attention`),
and adapters' products have one tile. The other kernels look at one token at a time already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...quant.formats import FLOAT8, Format
from ..contract import (
    Activation,
    AttentionMask,
    ExpertMaps,
    ExpertStack,
    LinearMap,
    NewKV,
    PackedWeight,
    PageStore,
    Paging,
    Prepared,
    RmsNorm,
)
from ..lowrank import AdapterSlots, LowRankTable
from ..new_kv import write_new
from . import invariant_attention, lora, vectors
from .backend import TritonOps, _fused, _fused_data, _own
from .invariant_products import REVISION, SlabProducts, packed_product


class DeterministicTritonOps(TritonOps):
    """As `TritonOps`, with kernels whose bits do not depend on the number of rows."""

    deterministic = True

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(device, dtype)
        self._products = SlabProducts()

    @property
    def numerics(self) -> str:
        """Also names the compiler, since it orders the operations of a kernel."""
        return f"{super().numerics}/deterministic-{REVISION}/triton-{triton.__version__}"

    def expands(self, format_: Format) -> bool:
        """Also 8-bit floats, whose kernel sums in other orders for other numbers of rows."""
        return format_.name == FLOAT8 or super().expands(format_)

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        made = self._product(x.contiguous(), self._here(weight), residual)
        return made if bias is None else made + bias

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        x = x if norm is None else self.rms_norm(x, *norm)
        parts = self._together(x, [self._here(weight) for weight, _ in maps])
        return [part if bias is None else part + bias for part, (_, bias) in zip(parts, maps, strict=True)]

    def norm_linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm) -> tuple[Tensor, list[Tensor]]:
        normed = self.rms_norm(x, *norm)
        return normed, self.linears(normed, maps)

    def _product(self, x: Tensor, weight: Tensor | PackedWeight, residual: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedWeight):
            return packed_product(self._products, x, weight.data, weight.handle, residual)
        return self._products.product(x, weight, residual)

    def _together(self, x: Tensor, weights: Sequence[Tensor | PackedWeight]) -> list[Tensor]:
        first, sizes, x = weights[0], [weight.shape[0] for weight in weights], x.contiguous()
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(dense) == len(weights):
            made = self._products.product(x, _fused(dense))
        elif isinstance(first, PackedWeight) and (data := _fused_data(weights)) is not None:
            made = packed_product(self._products, x, data, first.handle)
        else:
            return [self._product(x, weight) for weight in weights]
        return list(made.split(sizes, dim=1))

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        opened, passed = self.linears(x, [gate, up], norm)
        return vectors.act_mul(opened, passed, activation)

    def stack_experts(self, experts: Sequence[ExpertMaps]) -> ExpertStack:
        """One expert after the other, by products whose bits do not depend on the number of rows."""
        return ExpertStack(tuple(experts))

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        lora.adapt(x, tables, outs, adapter_slots, few=0)

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
        return invariant_attention.attention(query, _own(store), layer, paging, mask, self._counters)
