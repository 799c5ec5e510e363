"""The operations contract on a CUDA device. What has no kernel here runs as plain torch on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
from torch import Tensor

from ...errors import Unsupported
from ...quant.tensor import QuantTensor
from ..contract import Activation, AttentionMask, LinearMap, PageStore, Paging, Prepared, RmsNorm, Rotation
from ..kv_dtypes import BFLOAT16, FLOAT32
from ..reference import ReferenceOps, ReferencePages
from . import attention as paged
from . import pages, products, vectors
from .graphs import GraphRecorder
from .sampling import TritonSampling

REVISION = 1


class TritonOps(ReferenceOps):
    """Triton kernels and cuBLAS; pages, activations and weights in bfloat16 unless told otherwise."""

    name = "triton"

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise Unsupported(f"the triton kernels run on CUDA devices, not on {device}; use backend='native'")
        super().__init__(device, dtype)
        self.kv_dtype = FLOAT32 if dtype == torch.float32 else BFLOAT16
        self._recorder = GraphRecorder() if device.type == "cuda" else None
        self._sampling = TritonSampling(device)
        self._counters = torch.zeros(paged.COUNTERS, dtype=torch.int32, device=device)

    @property
    def numerics(self) -> str:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreter"
        return f"triton-{REVISION}/{str(self.dtype).removeprefix('torch.')}/{kind}"

    @property
    def sampling(self) -> TritonSampling:
        return self._sampling

    def recorder(self) -> GraphRecorder | None:  # type: ignore[override]
        return self._recorder

    def _dense(self, weight: Prepared) -> Tensor:
        if isinstance(weight, QuantTensor):
            return self.prepare(weight)
        assert isinstance(weight, Tensor), "a weight packed by another backend"
        return weight

    def _fused(self, weights: Sequence[Prepared]) -> Tensor:
        """Weights of one input as one tensor. The first time they move into it, so that they are in memory once.

        That is before any step with them is captured: a graph knows memory by its address.
        """
        dense = [self._dense(weight) for weight in weights]
        if not _adjacent(dense):
            whole, start = torch.cat(dense), 0
            for one in dense:
                one.set_(whole[start : start + len(one)])  # type: ignore[call-overload]
                start += len(one)
        outputs, first = sum(len(one) for one in dense), dense[0]
        return first.as_strided((outputs, first.shape[1]), first.stride(), first.storage_offset())

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        dense = self._dense(weight)
        if len(x) == 1:
            return products.gemv(x.contiguous(), [dense], [bias], residual)[0]
        if residual is None:
            return F.linear(x, dense, bias)
        if bias is not None:
            residual = residual + bias
        return residual.addmm_(x, dense.T) if residual.dtype == x.dtype else residual + F.linear(x, dense)

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        weights, biases = [weight for weight, _ in maps], [bias for _, bias in maps]
        whole = self._fused(weights)
        if len(x) == 1 and len(maps) <= 3:
            return products.gemv(x.contiguous(), [self._dense(weight) for weight in weights], biases, None, norm)
        x = x if norm is None else self.rms_norm(x, *norm)
        parts = F.linear(x, whole).split([weight.shape[0] for weight in weights], dim=1)
        return [part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)]

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        if len(x) == 1 and gate[1] is None and up[1] is None:
            self._fused([gate[0], up[0]])
            return products.gate_up(x.contiguous(), self._dense(gate[0]), self._dense(up[0]), activation, norm)
        opened, passed = self.linears(x, [gate, up], norm)
        return vectors.act_mul(opened, passed, activation)

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return vectors.act_mul(gate, up, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return vectors.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return vectors.rotate(x, rotation)

    def attention(self, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
        return paged.attention(query, _own(store), layer, paging, mask, self._counters)

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
        return pages.rotate_and_write(_own(store), layer, slots, query, keys, values, rotation)


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
