"""Pages whose heads lie on several ranks, as the pool sees them: one backend, with all heads in canonical order.

What the pool does with pages (copy, read, write) every rank does with its own heads, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ...kv.layout import KVLayout
from ...models.split import ModelSplit, joined_heads
from ...ops.contract import (
    HostCopies,
    HostCopy,
    KeysValues,
    Ops,
    PageShape,
    PageStore,
    Rotation,
    StateShape,
    StateStore,
)
from .command import RankCommand
from .group import RankGroup
from .message import MessageReader, MessageWriter


def own_shape(shape: PageShape, split: ModelSplit) -> PageShape:
    """The pages of one rank, for those of a whole model."""
    return replace(shape, kv_heads=len(split.kv_heads(shape.kv_heads, shape.latent)))


def held_layout(layout: KVLayout, splits: Sequence[ModelSplit]) -> KVLayout:
    """A layout whose pages have as many heads as all ranks hold together: what memory has to be counted for."""
    groups = [
        replace(one, shape=replace(one.shape, kv_heads=sum(own_shape(one.shape, split).kv_heads for split in splits)))
        for one in layout.groups
    ]
    return replace(layout, groups=tuple(groups))


class ParallelOps:
    """Rank 0's backend for its page pool. All that is no operation on pages is the backend's own."""

    def __init__(self, ops: Ops, group: RankGroup) -> None:
        self._ops, self._group = ops, group
        self._stores: list[PageStore] = []  # in the order of layer groups
        self._heads: list[list[range]] = []  # of each of them, the KV heads of every rank

    @classmethod
    def over(cls, ops: Ops, group: RankGroup) -> Ops:
        """As the pool takes it; `__getattr__` has what is missing here."""
        return cast(Ops, cls(ops, group))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    @property
    def numerics(self) -> str:
        return self._group.numerics(self._ops.numerics)

    def numerics_for(self, formats: Collection[str]) -> str:
        return self._group.numerics(self._ops.numerics_for(formats))

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        """Room for this rank's heads; the others make theirs with `RankGroup.make_pages`."""
        splits = self._group.splits
        store = self._ops.new_pages(own_shape(shape, splits[0]), pages, device)
        self._stores.append(store)
        self._heads.append([split.kv_heads(shape.kv_heads, shape.latent) for split in splits])
        return store

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        message = MessageWriter(RankCommand.COPY_PAGES)
        message.numbers([self._index(source), self._index(target)])
        message.numbers(sources)
        message.numbers(targets)
        self._group.send(lambda _: message.data())
        self._ops.copy_pages(source, sources, target, targets)

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        """The KV of all heads, whichever rank has them."""
        index, own = self._index(store), self._ops.read_slots(store, slots)
        spans = self._heads[index]
        # Ranks that share a head have the same of it: the first one is asked.
        asked = [r for r in range(1, len(spans)) if spans[r].stop > max(span.stop for span in spans[:r])]
        if not asked:
            return own
        message = MessageWriter(RankCommand.READ_SLOTS)
        message.number(index)
        message.tensor(slots)
        parts = [own, *(read_kv(answer) for answer in self._group.ask(message, asked))]
        held = [spans[0], *(spans[r] for r in asked)]

        def joined(each: Sequence[Tensor]) -> Tensor:
            return joined_heads(each, held, 2) if each[0].dim() > 2 else each[0]

        keys, values = joined([one.keys for one in parts]), joined([one.values for one in parts])
        scales = (joined([one.key_scales for one in parts]), joined([one.value_scales for one in parts]))
        return KeysValues(keys, values, *scales)

    def copy_out(self, store: PageStore, slots: Tensor) -> HostCopy:
        found = self.read_slots(store, slots)
        return HostCopy((found.keys, found.values, found.key_scales, found.value_scales))

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        """Each rank writes its own heads."""
        index = self._index(store)

        def message_for(rank: int) -> bytes:
            message = MessageWriter(RankCommand.WRITE_SLOTS)
            message.number(index)
            message.tensor(slots)
            write_kv(message, heads_of(kv, self._heads[index][rank]))
            return message.data()

        self._group.send(message_for)
        self._ops.write_slots(store, slots, heads_of(kv, self._heads[index][0]))

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Stored KV that is placed in pages, keys not rotated yet, of all heads."""
        index = self._index(store)

        def message_for(rank: int) -> bytes:
            span = self._heads[index][rank]
            message = MessageWriter(RankCommand.WRITE_KV)
            message.numbers([index, layer])
            for tensor in (slots, keys[:, span.start : span.stop], values[:, span.start : span.stop]):
                message.tensor(tensor)
            message.tensor(None if rotation is None else rotation.cos)
            if rotation is not None:
                message.tensor(rotation.sin)
                message.text(rotation.pairing)
            return message.data()

        self._group.send(message_for)
        own = self._heads[index][0]
        mine = [part[:, own.start : own.stop].contiguous() for part in (keys, values)]
        self._ops.write(store, layer, slots, mine[0], mine[1], rotation)

    def _index(self, store: PageStore) -> int:
        return next(i for i, one in enumerate(self._stores) if one is store)


@dataclass(frozen=True, slots=True)
class ParallelStates(StateStore):
    """Recurrent states, which every rank has as a whole: what is written here is written there."""

    group: RankGroup

    @staticmethod
    def following(group: RankGroup, shape: StateShape, slots: int, device: torch.device) -> StateStore:
        """Room for so many slots; the other ranks make theirs with `RankGroup.make_pages`."""
        own = StateStore.empty(shape, slots, device)
        return ParallelStates(own.shape, own.tails, own.memories, group)

    def write(self, slots: Tensor, states: KeysValues, copies: HostCopies) -> None:
        message = MessageWriter(RankCommand.WRITE_STATES)
        for tensor in (slots, states.keys, states.values):
            message.tensor(tensor)
        self.group.send(lambda _: message.data())
        StateStore.write(self, slots, states, copies)


def heads_of(kv: KeysValues, span: range) -> KeysValues:
    """Some heads of KV in canonical order."""

    def part(x: Tensor) -> Tensor:
        return x[:, :, span.start : span.stop].contiguous() if x.dim() > 2 else x

    return KeysValues(part(kv.keys), part(kv.values), part(kv.key_scales), part(kv.value_scales))


def write_kv(message: MessageWriter, kv: KeysValues) -> None:
    """KV into a message."""
    for tensor in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
        message.tensor(tensor)


def read_kv(message: MessageReader) -> KeysValues:
    """The inverse of `write_kv`."""
    return KeysValues(*(message.tensor() for _ in range(4)))
