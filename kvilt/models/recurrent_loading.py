"""The weights of recurrent blocks, as a backend takes them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..kv.layout import LayerSlot
from ..ops.contract import Decay
from .layers import Linear, Norm
from .recurrent import GatedDeltaNet, GroupNorm, Mamba2, Recurrent, ShortConv
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
            groups = GroupNorm(vector("memory_norm"), spec.norm_groups, loader.norm_eps) if spec.norm else None
            skip, out = vector("skip"), linear("memory_out")
            return Mamba2(spec, place, z, qkv, a, _scaled(conv(), spec), bias, decay, skip, groups, out)
        case ShortConvSpec():
            b, c, x = (linear(name) for name in ("conv_b", "conv_c", "conv_x"))
            return ShortConv(spec, place, b, c, x, conv(), linear("memory_out"))


def _scaled(conv: Tensor, spec: Mamba2Spec) -> Tensor:
    """A convolution of values, keys and queries with the factors of its inputs."""
    if not spec.scales:
        return conv
    keys = spec.heads.key_heads * spec.heads.key_dim
    sizes = torch.tensor([spec.heads.value_heads * spec.heads.value_dim, keys, keys])
    factors = torch.tensor(spec.scales[1:4]).repeat_interleave(sizes)
    return conv * factors.to(conv.device)[:, None]
