"""What operations on recurrent state take beside tensors of tokens: heads, decay, and the place of the states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .states import StateSlots, StateStore


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where one layer of a step finds and leaves its states."""

    store: StateStore
    layer: int
    slots: StateSlots


@dataclass(frozen=True, slots=True)
class FoldHeads:
    """The heads of a recurrent layer; each key head serves several value heads.

    These follow each other, or, where heads are tiled, value heads take the key heads in turn.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

    def __repr__(self) -> str:
        # The identity of saved KV is made of it, so an option that a model does not use must not show.
        names = ("key_heads", "value_heads", "key_dim", "value_dim", *["tiled"] * self.tiled)
        return f"FoldHeads({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Decay:
    """How fast each head forgets: float32 [value_heads] each."""

    log_rate: Tensor
    bias: Tensor  # of the step size, before softplus
    most: float = float("inf")  # step sizes are cut to [least, most]
    least: float = 0.0
