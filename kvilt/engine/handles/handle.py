"""One named handle in memory, as a note that the next process reads, and as a request borrows it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ...batch import Adapted, Adapter
from ...errors import InputError
from ...executor.lora import Adapters
from ...kv.cache import KVCache
from ...kv.owner import owner_of
from ...kv.row import BASE, made_by
from ...store.note import HandleNote


@dataclass(slots=True, eq=False)
class Handle:
    """Tokens of a tenant with a time to live, and their KV while there is room. Times are of this process's clock."""

    tenant: str  # hashed, as in notes: it must be the same before and after a restart
    ids: array[int]
    kv: KVCache | None
    expires_s: float
    used_s: float
    maker: str = BASE
    pinned_until_s: float = -math.inf
    noted: bool = True  # the next process knows it too

    @property
    def owner(self) -> str:
        """The API key that quotas count for, without salts."""
        return owner_of(self.tenant)

    def free_kv(self) -> None:
        """Free the KV; the tokens stay."""
        if self.kv is not None:
            self.kv.close()
        self.kv = None

    def fits(self, kv: KVCache) -> bool:
        """Whether a cache holds what this handle names."""
        return kv.row(0).ids == self.ids and kv.maker == self.maker

    def note(self, name: str, now_s: float, today_s: float) -> HandleNote:
        """Its note, where the process's clock says `now_s` and the calendar `today_s`."""
        since_s = today_s - now_s
        pinned_s = self.pinned_until_s + since_s if self.pinned_until_s > now_s else None
        expires_s, used_s = self.expires_s + since_s, self.used_s + since_s
        return HandleNote(name, self.tenant, self.ids[:], self.maker, expires_s, pinned_s, used_s)


def from_note(note: HandleNote, now_s: float, today_s: float) -> Handle:
    """A handle that an earlier process had; its KV is not here."""
    since_s = today_s - now_s
    pinned_s = -math.inf if note.pinned_until_s is None else note.pinned_until_s - since_s
    expires_s, used_s = note.expires_s - since_s, note.used_s - since_s
    return Handle(note.owner, note.tokens, None, expires_s, used_s, note.maker, pinned_s)


def pages_of(handles: Sequence[Handle]) -> int:
    """Pages that these handles hold of the group of which it is the largest share, shared ones once."""
    held = [one.kv for one in handles if one.kv is not None]
    groups = zip(*(kv.pages() for kv in held), strict=True)
    counts = [len({page for pages in group for page in pages}) for group in groups]
    return held[0].pool.largest_share(counts) if held else 0


@dataclass(frozen=True, slots=True)
class HandleLoan:
    """What a request starts with: the handle's tokens, and a fork of its KV, if that is here; the request closes it."""

    tokens: Sequence[int]
    kv: KVCache | None
    maker: str = BASE  # what computed the KV: the base model, or an adapter by content and scale


def check_loan(loan: HandleLoan, adapter: Adapter, adapters: Adapters) -> None:
    """Raise unless a handle's KV was computed with the adapter that the request runs on."""
    begins = adapter.begins if isinstance(adapter, Adapted) else 0
    wanted = made_by(adapters.identity(adapter), begins) if len(loan.tokens) > begins else BASE
    if loan.maker != wanted:
        raise InputError(
            f"this KV handle was made with {loan.maker[:80]!r} and the request needs {wanted[:80]!r}; "
            "give the adapter and scale it was made with, or create another handle"
        )
