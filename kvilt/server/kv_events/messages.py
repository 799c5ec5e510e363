"""KV events as values and as msgpack, in vLLM's schema: a batch is an array, and so is each event, tagged first.

Decoding takes events as arrays and as maps, with hashes as numbers or bytes, and refuses everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgpack

from ...errors import InputError

BlockHash = int | bytes
# Limits of one message; a publisher stays far below.
_MOST_ITEMS = 1 << 24
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks one after the other whose KV is there now; `token_ids` are those of all of them."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None  # for each block, what besides tokens is in its hash

    def __post_init__(self) -> None:
        if self.block_size < 1 or len(self.token_ids) != len(self.block_hashes) * self.block_size:
            raise InputError("a BlockStored event has block_size tokens for each hash")
        if self.extra_keys is not None and len(self.extra_keys) != len(self.block_hashes):
            raise InputError("extra_keys has one item for each hash")


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks whose KV is gone."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block is there any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[BlockStored] | type[BlockRemoved] | type[AllBlocksCleared]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Events that were published together."""

    ts: float
    events: tuple[KVEvent, ...]


def encode_batch(batch: KVEventBatch) -> bytes:
    """A batch as msgpack."""
    data: bytes = msgpack.packb([batch.ts, [_as_array(event) for event in batch.events]])
    return data


def decode_batch(data: bytes) -> KVEventBatch:
    """A batch from msgpack; raises InputError for anything else."""
    if len(data) > _MOST_BYTES:
        raise InputError(f"a batch of KV events has {_MOST_BYTES} bytes at the most, not {len(data)}")
    try:
        ts, events, *_ = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_array_len=_MOST_ITEMS,
            max_map_len=64,
            use_list=False,
        )
        return KVEventBatch(float(ts), tuple(_event(one) for one in events))
    except InputError:
        raise
    except Exception as error:  # msgpack has many, and this came from a network
        raise InputError(f"this is no batch of KV events: {type(error).__name__}") from None


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *(getattr(event, one.name) for one in fields(event))]


def _event(given: Any) -> KVEvent:
    """One event; fields that this version does not know are left out."""
    if isinstance(given, dict):
        kind = _KINDS[given["type"]]
        return _checked(kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given}))
    tag, *values = given
    kind = _KINDS[tag]
    return _checked(kind(*values[: len(fields(kind))]))


def _checked(event: KVEvent) -> KVEvent:
    match event:
        case BlockStored(hashes, parent, tokens, size, _, medium, name):
            parents = () if parent is None else (parent,)
            right = _all(hashes + parents, (int, bytes)) and _all(tokens, (int,)) and type(size) is int
            right = right and _are_texts(medium, name) and _are_keys(event.extra_keys)
        case BlockRemoved(hashes, medium):
            right = _all(hashes, (int, bytes)) and _are_texts(medium)
        case _:
            right = True
    if not right:
        raise InputError(f"this {type(event).__name__} event has fields of wrong types")
    return event


def _all(values: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(values, tuple) and all(type(value) in kinds for value in values)


def _are_texts(*values: Any) -> bool:
    return all(value is None or isinstance(value, str) for value in values)


def _are_keys(keys: Any) -> bool:
    return keys is None or (isinstance(keys, tuple) and all(key is None or isinstance(key, tuple) for key in keys))
