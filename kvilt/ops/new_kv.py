"""The keys and values that a step brings along, for backends whose attention does not write them by itself."""

from __future__ import annotations

from torch import Tensor

from .contract import NewKV, Ops, PageStore, Paging


def write_new(ops: Ops, query: Tensor, store: PageStore, layer: int, paging: Paging, new: NewKV) -> Tensor:
    """Normalize and rotate queries and keys, write keys and values into the slots of `paging`; gives the queries."""
    keys = new.keys
    if new.norms is not None:
        query, keys = ops.rms_norms([query, keys], new.norms)
    return ops.rotate_and_write(store, layer, paging.slots, query, keys, new.values, new.rotation)
