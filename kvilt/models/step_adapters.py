"""What adapters add to one forward: for each token the slot it uses, for each linear map a table of products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..ops.contract import Ops, Prepared
from ..ops.lowrank import AdapterSlots, LowRank, LowRankTable

EMBEDDING = "embedding"
HEAD = "head"


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRows:
    """What an adapter adds to the embedding: a few numbers for each token, and what they are multiplied with."""

    numbers: Tensor  # [vocab, rank]
    up: Tensor  # [rank, hidden]
    scale: float

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.up.nbytes

    def of(self, ids: Tensor, scale: float) -> Tensor:
        """[tokens, hidden]. One rank after the other, number by number: no sum depends on how many tokens there are."""
        numbers, up = self.numbers[ids].to(torch.float32), self.up.to(torch.float32)
        added = torch.zeros(len(ids), up.shape[1], device=ids.device)
        for rank in range(up.shape[0]):
            added += numbers[:, rank, None] * up[rank]
        return added * (self.scale * scale)


@dataclass(frozen=True, slots=True)
class RowEmbedding:
    """What one row's adapter adds to those of its tokens that enter as ids."""

    rows: EmbeddedRows
    scale: float
    tokens: Tensor  # [n] int64, indices into the step's tokens


class LinearModule(Protocol):
    """A linear map of the model."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> Prepared: ...

    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class MagnitudeGain:
    """The share of itself that each output of a base map gains (DoRA), for the tokens of adapters with magnitudes."""

    gains: Mapping[str, Tensor]  # by the name of a map, [slots, out]
    slots: frozenset[int]  # that have some
    tokens: Tensor  # [n]
    adapter_slots: AdapterSlots  # of these

    @staticmethod
    def for_slots(gains: Mapping[str, Tensor], slots: frozenset[int], adapter_slots: AdapterSlots) -> MagnitudeGain:
        """For the tokens that use one of the slots."""
        wanted = torch.tensor(sorted(slots), device=adapter_slots.slots.device)
        tokens = torch.isin(adapter_slots.slots, wanted).nonzero()[:, 0]
        return MagnitudeGain(gains, slots, tokens, adapter_slots.of(tokens))

    def of(self, adapter_slots: AdapterSlots) -> MagnitudeGain:
        """The same for other tokens."""
        return MagnitudeGain.for_slots(self.gains, self.slots, adapter_slots)

    def grow(self, one: LinearModule, x: Tensor, out: Tensor, ops: Ops, whole: bool) -> None:
        """Add the gain to `out`, in place; other tokens keep their bits.

        Only the map's product is scaled. Where `out` holds more than that, it is a `whole`, and the product is computed
        once more.
        """
        if (gains := self.gains.get(one.name)) is None or not len(self.tokens):
            return
        made = ops.linear(x[self.tokens], one.weight) if whole else out[self.tokens]
        grown = made * (gains[self.adapter_slots.slots] * self.adapter_slots.scales[:, None])
        out.index_add_(0, self.tokens, grown.to(out.dtype))


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of the rows of one step."""

    parts: frozenset[str]  # kinds of maps that some row of the step changes: q, gate, head, ...
    tables: Mapping[str, LowRankTable]  # by the name of a linear map, all of those kinds
    adapter_slots: AdapterSlots  # of all tokens of the step
    embedded: tuple[RowEmbedding, ...] = ()  # of rows whose adapters change the embedding
    gain: MagnitudeGain | None = None  # of those that have some

    def touches(self, *names: str) -> bool:
        """Whether some row changes one of these maps."""
        return any(name in self.tables for name in names)

    @property
    def is_recordable(self) -> bool:
        """Whether a step with these adapters consists of operations of the backend alone."""
        return not self.embedded and self.gain is None

    def add(
        self, maps: Sequence[LinearModule], x: Tensor, outs: Sequence[Tensor], ops: Ops, residual: bool = False
    ) -> None:
        """Add what the adapters make of `x` to `outs`; `residual`: `outs` hold more than the products of these maps."""
        chosen = [(one, out) for one, out in zip(maps, outs, strict=True) if one.name in self.tables]
        if not chosen:
            return
        if self.gain is not None:
            for one, out in chosen:
                self.gain.grow(one, x, out, ops, whole=residual or one.bias is not None)
        ops.adapt(x, [self.tables[one.name] for one, _ in chosen], [out for _, out in chosen], self.adapter_slots)

    def tables_are(self, other: StepAdapters) -> bool:
        """Whether both read the same memory."""
        return all(other.tables.get(name) is table for name, table in self.tables.items())

    def of(self, tokens: Tensor | None) -> StepAdapters:
        """For some tokens of the step; None: all of them."""
        if tokens is None:
            return self
        adapter_slots = self.adapter_slots.of(tokens)
        return replace(
            self, adapter_slots=adapter_slots, gain=None if self.gain is None else self.gain.of(adapter_slots)
        )


class AdapterTables:
    """The products of all adapters that are in memory, by slot. A step keeps the tables it began with."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], ops: Ops, slots: int = 16) -> None:
        self._shapes = shapes  # by the name of a linear map, [out, in]
        self._ops = ops
        self._held: list[Mapping[str, LowRank] | None] = [None] * slots
        self.tables = self._new_tables(slots)
        self.gains: dict[str, Tensor] = {}  # by the name of a linear map, [slots, out]: see MagnitudeGain

    def put(self, products: Mapping[str, LowRank], gains: Mapping[str, Tensor] | None = None) -> int:
        """Give prepared products, and by how much outputs grow beside them, a slot."""
        if None not in self._held:
            self._grow()
        slot = self._held.index(None)
        self._fill(slot, products)
        for name, gain in (gains or {}).items():
            if name not in self.gains:
                self.gains[name] = gain.new_zeros(len(self._held), len(gain))
            self.gains[name][slot] = gain
        return slot

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        for name in self._held[slot] or ():
            self.tables[name].put(slot, None)
        for gains in self.gains.values():
            gains[slot] = 0.0
        self._held[slot] = None

    def _fill(self, slot: int, products: Mapping[str, LowRank]) -> None:
        self._held[slot] = products
        for name, product in products.items():
            self.tables[name].put(slot, product)

    def _grow(self) -> None:
        self.gains = {name: torch.cat([one, torch.zeros_like(one)]) for name, one in self.gains.items()}
        self._held += [None] * len(self._held)
        self.tables = self._new_tables(len(self._held))
        for slot, products in enumerate(self._held):
            if products is not None:
                self._fill(slot, products)

    def _new_tables(self, slots: int) -> dict[str, LowRankTable]:
        return {name: self._ops.new_table(*shape, slots) for name, shape in self._shapes.items()}


def part_of(name: str) -> str:
    """The kind of a linear map: q of 3.q."""
    return name.rpartition(".")[2]
