"""The operations contract on a CUDA device. What has no kernel here runs as plain torch on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
import triton
from torch import Tensor

from ...errors import Unsupported
from ...quant.tensor import QuantTensor
from ..contract import Activation, AttentionMask, LinearMap, PageStore, Paging, Prepared, Rotation
from ..kv_dtypes import BFLOAT16, FLOAT32
from ..reference import ReferenceOps, ReferencePages
from . import attention as paged
from . import products, vectors
from .graphs import GraphRecorder

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

    @property
    def numerics(self) -> str:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "interpreter"
        return f"triton-{REVISION}/{str(self.dtype).removeprefix('torch.')}/{kind}"

    def recorder(self) -> GraphRecorder | None:  # type: ignore[override]
        return self._recorder

    def _dense(self, weight: Prepared) -> Tensor:
        if isinstance(weight, QuantTensor):
            return self.prepare(weight)
        assert isinstance(weight, Tensor), "a weight packed by another backend"
        return weight

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        dense = self._dense(weight)
        if len(x) == 1:
            return products.gemv(x.contiguous(), [dense], [bias], residual)[0]
        if residual is None:
            return F.linear(x, dense, bias)
        return torch.addmm(residual if bias is None else residual + bias, x, dense.T)

    def linears(self, x: Tensor, maps: Sequence[LinearMap]) -> list[Tensor]:
        if len(x) == 1 and len(maps) <= 3:
            return products.gemv(
                x.contiguous(), [self._dense(weight) for weight, _ in maps], [bias for _, bias in maps], None
            )
        return [self.linear(x, weight, bias) for weight, bias in maps]

    def gate_up(self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation) -> Tensor:
        if len(x) == 1 and gate[1] is None and up[1] is None:
            return products.gate_up(x.contiguous(), self._dense(gate[0]), self._dense(up[0]), activation)
        return vectors.act_mul(self.linear(x, *gate), self.linear(x, *up), activation)

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return vectors.act_mul(gate, up, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return vectors.rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return vectors.rotate(x, rotation)

    def attention(self, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
        return paged.attention(query, _own(store), layer, paging, mask)

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        pages = _own(store)
        if pages.shape.scales:
            super().write(store, layer, slots, keys, values, rotation)
        else:
            vectors.write(pages, layer, slots, keys, values, rotation)


def _own(store: PageStore) -> ReferencePages:
    assert isinstance(store, ReferencePages)
    return store
