"""Tensors of a checkpoint by our names, in the form that a backend wants; of a split model, this rank's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import WeightError
from ..ops.contract import Ops, Prepared
from ..quant.formats import FORMATS
from ..quant.tensor import QuantTensor, Weight
from ..quant.unpack import dequantize
from ..weights.source import Checkpoint
from .expert_slices import ExpertSlice
from .families.family import CheckpointDialect
from .fused_slice import FusedSlice
from .layers import AnyNorm, LayerNorm, Linear, Norm
from .spec import ModelSpec
from .split import ModelShare

Progress = Callable[[int, int], None]  # tensors done, tensors in all
Slices = Mapping[str, FusedSlice | ExpertSlice]
_MXFP4_BLOCK = FORMATS["MXFP4"].block_elements


@dataclass(slots=True)
class TensorLoader:
    """Takes tensors out of a checkpoint by our names, in the form the backend wants."""

    checkpoint: Checkpoint
    found: Mapping[str, str]
    slices: Slices
    ops: Ops
    dialect: CheckpointDialect
    spec: ModelSpec
    progress: Progress | None
    share: ModelShare | None = None  # of a model that several ranks have together
    taken: set[str] = field(default_factory=set)

    def _take(self, name: str) -> Weight:
        tensor = self.checkpoint.tensors.tensor(self.found[name])
        self.taken.add(name)  # a fused tensor is taken once for each of its parts
        if self.progress is not None:
            self.progress(len(self.taken), len(self.found))
        return tensor

    def weight(self, name: str) -> Prepared:
        part = self.slices.get(name)
        wholes = (name,) if part is None else tuple(part.wholes)
        weights = [self._take(whole) for whole in wholes]
        if wholes[0].rpartition(".")[2] in self.dialect.transposed:
            weights = [self._plain(whole, weight).T for whole, weight in zip(wholes, weights, strict=True)]
        own = self._own(name, weights[0] if part is None else part.take(*weights))
        prepared = self.ops.prepare(own.unsqueeze(0) if isinstance(own, Tensor) and own.dim() == 1 else own)
        if part is None or part.last:
            for whole in wholes:
                self.checkpoint.tensors.forget(self.found[whole])  # so that a model is never in memory twice
        return prepared

    def vector(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self.slices.get(name)
        wholes = (name,) if part is None else tuple(part.wholes)
        tensor = self._plain(wholes[0], self._take(wholes[0]))
        own = tensor if part is None else part.take(tensor)
        assert isinstance(own, Tensor)
        own = self._own(name, own)
        assert isinstance(own, Tensor)
        if transform := self.dialect.transforms.get(name.rpartition(".")[2]):
            own = transform(own.float())
        return own.to(self.ops.device, dtype, copy=True, memory_format=torch.contiguous_format)

    def _own(self, name: str, whole: Weight) -> Weight:
        """What this rank has of a tensor."""
        cut = None if self.share is None else self.share.split.cut(name)
        return whole if cut is None else cut.take(whole)

    def _plain(self, name: str, tensor: Weight) -> Tensor:
        if isinstance(tensor, QuantTensor):
            raise WeightError(self.found[name], f"is packed as {tensor.format.name}, expected plain floats")
        return tensor

    def linear(self, name: str, reduced: bool = True) -> Linear:
        """A linear map. `reduced`: where ranks have parts of its inputs, their results are summed."""
        bias, share = f"{name}_bias", self.share
        held = (bias in self.found or bias in self.slices) and (share is None or share.split.adds_bias(name))
        cut = None if share is None else share.split.cut(name)
        all_reduce = share.ranks.sum if share is not None and cut is not None and cut.axis == 1 and reduced else None
        return Linear(self.weight(name), self.vector(bias, self.ops.dtype) if held else None, name, all_reduce)

    def floats(self, name: str) -> Tensor:
        """A tensor as floats, packed or not."""
        tensor = self._take(name)
        plain = dequantize(tensor) if isinstance(tensor, QuantTensor) else tensor
        self.checkpoint.tensors.forget(self.found[name])
        return plain

    def norm(self, name: str, eps: float | None = None) -> AnyNorm:
        weight, shift, bias = self.vector(name, torch.float32), self.dialect.norm_shift, f"{name}_bias"
        weight, eps = weight + shift if shift else weight, self.spec.norm_eps if eps is None else eps
        if self.spec.norm_kind == "rms":
            return Norm(weight, eps)
        own = self.vector(bias, torch.float32) if bias in self.found else None
        return LayerNorm(weight, own, eps)

    @property
    def norm_eps(self) -> float:
        return self.spec.norm_eps

    def plain_norm(self, size: int) -> Norm:
        """A norm without a learned scale."""
        return Norm(torch.ones(size, device=self.ops.device), self.spec.norm_eps)

    def maybe_norm(self, name: str) -> AnyNorm | None:
        return self.norm(name) if name in self.found else None


def block_sizes(checkpoint: Checkpoint, found: Mapping[str, str], slices: Slices) -> Callable[[str], tuple[int, int]]:
    """The numbers of rows and columns of tensors, by our names, that lie in one block of their format."""

    def sizes(name: str) -> tuple[int, int]:
        part = slices.get(name)
        whole = name if part is None else next(iter(part.wholes))
        if whole not in found:
            return 1, 1
        if whole.endswith("_blocks") and isinstance(part, ExpertSlice):
            return 1, _MXFP4_BLOCK
        format_ = FORMATS.get(checkpoint.tensors.storage(found[whole]).format)
        if format_ is None:
            return 1, 1
        return max(plane.rows for plane in format_.planes), max(plane.columns for plane in format_.planes)

    return sizes
