"""The weights of recurrent blocks, as a backend takes them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import Decay
from .layers import Linear, Norm
from .recurrent import GatedDeltaNet, Mamba2, Recurrent, ShortConv
from .recurrent_spec import GatedDeltaSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec


class WeightLoader(Protocol):
    """Takes tensors out of a checkpoint by our names."""

    @property
    def norm_eps(self) -> float: ...

    def linear(self, name: str) -> Linear: ...

    def vector(self, name: str, dtype: torch.dtype) -> Tensor: ...


def recurrent_block(loader: WeightLoader, index: int, spec: RecurrentSpec, place: LayerSlot) -> Recurrent:
    """The block of one layer."""

    def linear(name: str) -> Linear:
        return loader.linear(f"{index}.{name}")

    def vector(name: str) -> Tensor:
        return loader.vector(f"{index}.{name}", torch.float32).view(-1)

    def conv() -> Tensor:
        return vector("conv").view(spec.tail[0], -1)

    match spec:
        case GatedDeltaSpec():
            qkv, z, b, a = (linear(name) for name in ("qkv", "z", "b", "a"))
            decay, norm = Decay(vector("a_log"), vector("dt_bias")), Norm(vector("memory_norm"), loader.norm_eps)
            return GatedDeltaNet(spec, place, qkv, z, b, a, conv(), decay, norm, linear("memory_out"))
        case Mamba2Spec():
            decay = Decay(vector("a_log"), vector("dt_bias"), spec.most_step, spec.least_step)
            bias = vector("conv_bias") if spec.conv_bias else None
            z, qkv, a = (linear(name) for name in ("z", "qkv", "a"))
            norm = Norm(vector("memory_norm"), loader.norm_eps)
            return Mamba2(spec, place, z, qkv, a, conv(), bias, decay, vector("skip"), norm, linear("memory_out"))
        case ShortConvSpec():
            b, c, x = (linear(name) for name in ("conv_b", "conv_c", "conv_x"))
            return ShortConv(spec, place, b, c, x, conv(), linear("memory_out"))
