"""Where the maps of experts lie in checkpoints that keep those of all experts in one tensor."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.formats import FORMATS
from ..quant.tensor import QuantTensor, Weight
from .families.family import CheckpointDialect, StackedTensor, expert_part
from .spec import ExpertsSpec, LayerSpec

_MXFP4 = FORMATS["MXFP4"]


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One expert's part of a stacked tensor."""

    stack: StackedTensor
    expert: int
    wholes: Mapping[str, tuple[int, ...]]  # the checkpoint's tensors that it is made of, with their shapes
    last: bool  # the wholes are not needed after it

    def take(self, whole: Weight, scales: Weight | None = None) -> Weight:
        """A matrix [outputs, inputs], or a bias [outputs]; packed as the whole is."""
        if isinstance(whole, QuantTensor):
            rows = whole.shape[1]
            return self._share(whole.rows(self.expert * rows, (self.expert + 1) * rows))
        own = whole[self.expert]
        if scales is not None:
            assert isinstance(scales, Tensor)
            return self._share(_from_mxfp4(own, scales[self.expert]))
        return self._share(own.T.contiguous() if self.stack.transposed and own.dim() == 2 else own)

    def _share(self, own: Weight) -> Weight:
        """The rows of one of the maps that it holds."""
        if self.stack.shares == 1:
            return own
        if isinstance(own, QuantTensor):
            planes = {name: self._rows(plane) for name, plane in own.planes.items()}
            return QuantTensor(own.format, (own.shape[0] // self.stack.shares, own.shape[1]), planes)
        return self._rows(own)

    def _rows(self, plane: Tensor) -> Tensor:
        rows = len(plane) // self.stack.shares
        if self.stack.alternating:
            return plane[self.stack.share :: self.stack.shares].contiguous()
        return plane[self.stack.share * rows : (self.stack.share + 1) * rows]


def expert_slices(
    index: int,
    layer: LayerSpec,
    shapes: Mapping[str, tuple[int, ...]],
    dialect: CheckpointDialect,
    present: Container[str],
) -> dict[str, ExpertSlice]:
    """The stacked parts of a layer's experts by our names; `shapes` are those of all parts of the layer."""
    if not isinstance(layer.feed_forward, ExpertsSpec):
        return {}
    experts, found = layer.feed_forward.experts, {}
    for name, shape in shapes.items():
        if (stack := dialect.stacks.get(expert_part(name))) is not None:
            expert, whole = int(name.split(".")[1]), stack.name.format(i=index)
            wholes = _wholes(stack, whole, (experts, stack.shares * shape[0], *shape[1:]), present)
            found[name] = ExpertSlice(stack, expert, wholes, expert == experts - 1)
    return found


def _wholes(
    stack: StackedTensor, name: str, shape: tuple[int, ...], present: Container[str]
) -> dict[str, tuple[int, ...]]:
    if stack.mxfp4 and f"{name}_blocks" in present:
        groups = (*shape[:2], shape[2] // _MXFP4.block_elements)
        return {f"{name}_blocks": (*groups, _MXFP4.block_bytes - 1), f"{name}_scales": groups}
    return {name: (shape[0], *reversed(shape[1:])) if stack.transposed else shape}


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> QuantTensor:
    """GGML's blocks of MXFP4: codes 0 to 15 in the low halves and 16 to 31 in the high ones, behind the exponent.

    Files of transformers have codes 2 i and 2 i + 1 in byte i [rows, groups, 16], and exponents apart [rows, groups].
    """
    rows, groups, _ = blocks.shape
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(rows, groups, 2, 16)
    packed = torch.cat((scales.unsqueeze(-1), codes[:, :, 0] | (codes[:, :, 1] << 4)), dim=-1)
    shape = (rows, groups * _MXFP4.block_elements)
    return QuantTensor.of_blocks(_MXFP4, shape, packed.view(rows, groups * _MXFP4.block_bytes))
