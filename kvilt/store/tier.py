"""What a tier below memory promises: bytes by key, within a budget. Refuses to know what the bytes mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import ParamError
from .codecs import Data
from .record import RecordInfo


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes a tier may hold: in all, of one tenant, in one record, and of retained records."""

    total_bytes: int
    tenant_bytes: int | None = None  # None: no less than all
    record_bytes: int | None = None  # None: as much as a tenant may have
    retain_bytes: int | None = None  # None: a quarter of all

    def __post_init__(self) -> None:
        for name in ("total_bytes", "tenant_bytes", "record_bytes", "retain_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ParamError(name, f"must be a whole number of bytes and not negative, not {value!r}")

    @property
    def tenant(self) -> int:
        return self.total_bytes if self.tenant_bytes is None else min(self.tenant_bytes, self.total_bytes)

    @property
    def record(self) -> int:
        return self.tenant if self.record_bytes is None else min(self.record_bytes, self.tenant)

    @property
    def retain(self) -> int:
        return self.total_bytes // 4 if self.retain_bytes is None else self.retain_bytes


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds now, as far as it knows."""

    records: int
    nbytes: int


class RecordReader(Protocol):
    """An open record. One thread reads; `abort` and `close` may come from another."""

    @property
    def nbytes(self) -> int:
        """The size; negative if there is no such record after all."""
        ...

    def read(self, offset: int, size: int) -> Data:
        """Up to `size` bytes from `offset` on; fewer where the record ends."""
        ...

    def abort(self) -> None:
        """The caller no longer waits: end a read that is under way, if that is possible."""
        ...

    def close(self) -> None: ...


class Tier(Protocol):
    """Records by key. Every method may be called from any thread and raises StoreError, with a reason, or nothing."""

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> Budget: ...

    def open(self, key: bytes) -> RecordReader | None:
        """The record of that key, or None where there is none."""
        ...

    def has(self, keys: Sequence[bytes]) -> list[bool]: ...

    def put(self, key: bytes, record: Sequence[bytes], info: RecordInfo) -> int:
        """Write a record completely or not at all; returns how many others were evicted for it."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark records as used now."""
        ...

    def discard(self, key: bytes) -> None:
        """Remove a record: it is damaged or no longer wanted."""
        ...

    def every_key(self) -> Iterator[bytes]:
        """Every key, in no order; may take long."""
        ...

    def usage(self) -> TierUsage: ...

    def probe(self) -> None:
        """Raise unless the tier would answer now."""
        ...

    def close(self) -> None: ...
