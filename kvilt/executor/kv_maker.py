"""Which adapter made the KV of a row: rows are marked with it, and rows that another one made are refused."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import Adapted, Adapter, Base, Row
from ..errors import InputError
from ..kv.row import BASE, CacheRow, made_by
from .lora import Adapters


def mark_rows(rows: Sequence[Row], adapters: Adapters) -> None:
    """Name the adapter of each row in its cache; refuse rows whose KV another adapter made."""
    for row in rows:
        own = row.cache.row(row.cache_row)
        if type(row.adapter) is Base and own.adapter == BASE:
            own.adapted_from = 0
            continue
        check_maker(own, row.adapter, adapters)
        own.adapter, own.adapted_from = adapters.identity(row.adapter), _begins(row.adapter)


def check_maker(row: CacheRow, adapter: Adapter, adapters: Adapters) -> None:
    """Raise unless an adapter may continue the KV of a cache's row.

    KV of the base model, of an adapter and of the same adapter at another scale are three kinds; only an adapter that
    is switched on by tokens continues KV of the base model.
    """
    made, begins = adapters.identity(adapter), _begins(adapter)
    wanted = made_by(made, begins) if row.length > begins else BASE
    if row.length and row.maker != wanted:
        raise InputError(
            f"this cache holds KV of {row.maker[:80]!r} and that of {wanted[:80]!r} is needed; "
            "compute it again, or give the adapter and scale it was made with"
        )


def _begins(adapter: Adapter) -> int:
    return adapter.begins if isinstance(adapter, Adapted) else 0
