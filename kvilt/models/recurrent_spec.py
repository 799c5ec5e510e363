"""Recurrent layers as data: what stands in a layer in the place of attention, and the state it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import WeightError
from ..ops.contract import FoldHeads
from .spec_repr import spec_repr


@dataclass(frozen=True, slots=True)
class FoldSpec:
    """Heads that fold tokens into a memory, behind a causal convolution of what they read."""

    heads: FoldHeads
    width: int  # of the convolution

    def __post_init__(self) -> None:
        values, keys = self.heads.value_heads, self.heads.key_heads
        if values % keys:
            raise WeightError("heads", f"{values} value heads cannot share {keys} key heads evenly")

    @property
    def tail(self) -> tuple[int, int]:
        """[channels, inputs] that its state keeps of the convolution."""
        return self.heads.channels, self.width - 1

    @property
    def memory(self) -> tuple[int, int, int]:
        """[heads, key_dim, value_dim] that its state keeps of all tokens."""
        return self.heads.value_heads, self.heads.key_dim, self.heads.value_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(FoldSpec):
    """A gated delta net: a causal convolution of queries, keys and values, then the gated delta rule."""


@dataclass(frozen=True, slots=True)
class Mamba2Spec(FoldSpec):
    """Mamba-2: a causal convolution of values, keys (B) and queries (C), then a decaying sum."""

    conv_bias: bool = True
    least_step: float = 0.0
    most_step: float = float("inf")
    norm: bool = field(default=True, repr=False)  # of what is read
    norm_groups: int = field(default=1, repr=False)  # parts of it that are normed each for itself
    gate_first: bool = field(default=True, repr=False)  # the gate comes before the norm
    # Of gates, values, keys, queries and step sizes, as the input projection makes them; empty: 1.
    scales: tuple[float, ...] = field(default=(), repr=False)

    __repr__ = spec_repr


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution over the last few tokens (LFM2); its state is the tail alone."""

    channels: int
    width: int

    @property
    def tail(self) -> tuple[int, int]:
        return self.channels, self.width - 1

    @property
    def memory(self) -> tuple[int, int, int]:
        return 0, 0, 0


RecurrentSpec = GatedDeltaSpec | Mamba2Spec | ShortConvSpec


def recurrent_shapes(spec: RecurrentSpec, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a recurrent block by our names."""
    match spec:
        case GatedDeltaSpec(heads, kernel):
            values = heads.value_heads * heads.value_dim
            return {
                "qkv": (heads.channels, width),
                "z": (values, width),
                "b": (heads.value_heads, width),
                "a": (heads.value_heads, width),
                "conv": (heads.channels, 1, kernel),
                "dt_bias": (heads.value_heads,),
                "a_log": (heads.value_heads,),
                "memory_norm": (heads.value_dim,),
                "memory_out": (width, values),
            }
        case Mamba2Spec(heads, kernel):
            values = heads.value_heads * heads.value_dim
            shapes: dict[str, tuple[int, ...]] = {
                "z": (values, width),
                "qkv": (heads.channels, width),
                "a": (heads.value_heads, width),
                "conv": (heads.channels, 1, kernel),
                "dt_bias": (heads.value_heads,),
                "a_log": (heads.value_heads,),
                "skip": (heads.value_heads,),
                "memory_out": (width, values),
            }
            shapes |= {"memory_norm": (values,)} if spec.norm else {}
            return shapes | ({"conv_bias": (heads.channels,)} if spec.conv_bias else {})
        case ShortConvSpec(channels, kernel):
            parts = dict.fromkeys(("conv_b", "conv_c", "conv_x"), (channels, width))
            return {**parts, "conv": (channels, 1, kernel), "memory_out": (width, channels)}
