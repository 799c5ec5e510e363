"""What adapters add to linear maps: low-rank products by slot, each token with its own.

The values that every backend exchanges, and the products in plain torch. Refuses to know adapters' files and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """scale * up(down(x)). Once a backend has prepared them, their layout is the backend's own."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Which slot each token of a step uses, and how strongly."""

    slots: Tensor  # [tokens] int64, -1: none
    scales: Tensor  # [tokens] float32

    def to(self, device: torch.device) -> AdapterSlots:
        """The same there, in one copy that the host does not wait for."""
        if device.type == "cpu":
            return self
        words = torch.cat([self.slots.view(torch.int32), self.scales.view(torch.int32)])
        there, split = words.pin_memory().to(device, non_blocking=True), 2 * len(self.slots)
        return AdapterSlots(there[:split].view(torch.int64), there[split:].view(torch.float32))

    def of(self, tokens: Tensor | slice) -> AdapterSlots:
        """Those of some of the tokens."""
        return AdapterSlots(self.slots[tokens].contiguous(), self.scales[tokens].contiguous())


class LowRankTable(Protocol):
    """The products of one linear map by slot."""

    def put(self, slot: int, product: LowRank | None) -> None:
        """Give a slot a product that this backend prepared, or none."""
        ...


class PlainTable:
    """Products in a list."""

    __slots__ = ("products",)

    def __init__(self, slots: int) -> None:
        self.products: list[LowRank | None] = [None] * slots

    def put(self, slot: int, product: LowRank | None) -> None:
        self.products[slot] = product


def adapt(x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots) -> None:
    """Add to each of `outs` [tokens, out] what each token's slot makes of `x` [tokens, in]; an obvious loop."""
    for slot in sorted(set(adapter_slots.slots.tolist()) - {-1}):
        mine = adapter_slots.slots == slot
        for table, out in zip(tables, outs, strict=True):
            assert isinstance(table, PlainTable)
            if (product := table.products[slot]) is not None:
                inner = x[mine].float() @ product.down.to(torch.float32).T @ product.up.to(torch.float32).T
                out[mine] += (inner * (product.scale * adapter_slots.scales[mine, None])).to(out.dtype)
