"""Which replica has the KV of which prefix, from KV events. A replica is a slot, and a set of them an integer of bits.

Refuses to know requests, speeds and sockets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import InputError
from ..server.kv_events.messages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from .prefix_hash import PrefixHasher

MOST_SLOTS = 4096


class Match(NamedTuple):
    """Replicas that have a prefix of exactly so many blocks."""

    blocks: int
    slots: int  # bits


class PrefixDirectory:
    """The prefixes of all replicas. A block is known by its router's key, which all replicas share."""

    def __init__(self, hasher: PrefixHasher) -> None:
        self._hasher = hasher
        self._bits = [1 << slot for slot in range(MOST_SLOTS)]  # one object for each, whatever number of blocks has it
        self._holders: dict[int, int] = {}  # by key: bits of slots
        self._blocks: dict[int, dict[BlockHash, int]] = {}  # by slot: keys by the replica's own hashes

    def __len__(self) -> int:
        return len(self._holders)

    def known(self, slot: int) -> int:
        """How many blocks a replica has."""
        return len(self._blocks.get(slot, ()))

    def apply(self, slot: int, events: Iterable[KVEvent]) -> None:
        """Take events of one replica in; InputError: they do not fit what is known, and a snapshot is needed."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(slot, event)
                case BlockRemoved(hashes):
                    self._remove(slot, hashes)
                case AllBlocksCleared():
                    self.clear(slot)

    def clear(self, slot: int) -> None:
        """Forget all that a replica has."""
        blocks = self._blocks.pop(slot, {})
        self._drop(slot, blocks.values())

    def match(self, keys: Sequence[int], slots: int) -> list[Match]:
        """How far each of the given replicas has the prompt with these keys; those that have nothing are left out.

        A replica that has a block has those before it, so bisection finds where the holders change: a few looks
        instead of one for each block, and each look at a large table is slow.
        """
        holders = self._holders
        found: list[Match] = []
        before = 0
        depth = bisect_left(keys, True, key=lambda key: not holders.get(key, 0) & slots)
        while depth:
            here = holders.get(keys[depth - 1], 0) & slots
            if here & ~before:
                found.append(Match(depth, here & ~before))
            before, depth = here, self._change(keys[: depth - 1], slots, here)
        return found

    def _change(self, keys: Sequence[int], slots: int, same: int) -> int:
        """After how many blocks only the replicas `same` are left."""
        holders = self._holders
        return bisect_left(keys, True, key=lambda key: holders.get(key, 0) & slots == same)

    def _store(self, slot: int, event: BlockStored) -> None:
        if event.block_size != self._hasher.block_tokens:
            raise InputError(f"blocks have {self._hasher.block_tokens} tokens in this cluster, not {event.block_size}")
        blocks = self._blocks.setdefault(slot, {})
        parent = 0 if event.parent_block_hash is None else blocks.get(event.parent_block_hash)
        if parent is None:
            raise InputError("a block follows one that the replica does not have")
        bit, holders = self._bits[slot], self._holders
        scope = self._hasher.scope(event.lora_name, _salt(event))
        keys = self._hasher.following(parent, event.token_ids, scope)
        for block, key in zip(event.block_hashes, keys, strict=True):
            blocks[block] = key
            held = holders.get(key)
            holders[key] = bit if held is None else held | bit

    def _remove(self, slot: int, hashes: Iterable[BlockHash]) -> None:
        blocks = self._blocks.get(slot, {})
        self._drop(slot, [key for one in hashes if (key := blocks.pop(one, None)) is not None])

    def _drop(self, slot: int, keys: Iterable[int]) -> None:
        bit, holders = self._bits[slot], self._holders
        for key in keys:
            left = holders.get(key, 0) & ~bit
            if not left:
                holders.pop(key, None)
            else:
                holders[key] = self._bits[left.bit_length() - 1] if left.bit_count() == 1 else left


def _salt(event: BlockStored) -> str:
    """The tenant of an event's blocks; its blocks share it."""
    keys = event.extra_keys[0] if event.extra_keys else None
    return keys[0] if keys and isinstance(keys[0], str) else ""
