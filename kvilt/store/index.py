"""The disk tier's index: sizes, owners and order of use, in SQLite. It can be rebuilt from the records at any time.

Refuses to know files; several processes may share one index.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tier import Budget, TierUsage

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, nbytes INTEGER NOT NULL,
    retained INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (tenant, retained, used);
CREATE TABLE IF NOT EXISTS tenants (
    tenant TEXT PRIMARY KEY, records INTEGER NOT NULL, nbytes INTEGER NOT NULL, retained INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON records BEGIN
    INSERT INTO tenants VALUES (new.tenant, 1, new.nbytes, new.retained * new.nbytes)
    ON CONFLICT (tenant) DO UPDATE SET records = records + 1, nbytes = nbytes + new.nbytes,
        retained = retained + new.retained * new.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON records BEGIN
    UPDATE tenants SET records = records - 1, nbytes = nbytes - old.nbytes,
        retained = retained - old.retained * old.nbytes WHERE tenant = old.tenant;
    DELETE FROM tenants WHERE tenant = old.tenant AND records = 0;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF retained ON records BEGIN
    UPDATE tenants SET retained = retained + (new.retained - old.retained) * new.nbytes WHERE tenant = new.tenant;
END;
"""
_BUSY_S = 2.0
VERSION = 1  # of the schema; another one is dropped and built again


@dataclass(frozen=True, slots=True)
class IndexRow:
    """The row of one record."""

    key: bytes
    tenant: str
    kind: str
    nbytes: int
    retained: bool
    used_s: float


class DiskIndex:
    """One connection, for one thread at a time. Every method may raise sqlite3.Error, and then nothing has changed."""

    def __init__(self, path: Path) -> None:
        self._sql = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._sql.execute("PRAGMA journal_mode=WAL")
            # Safe against a crash of the process; what a crash of the machine takes is found again in the records.
            self._sql.execute("PRAGMA synchronous=NORMAL")
            found = self._sql.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                raise sqlite3.DatabaseError(f"an index of version {found}")
            self._sql.executescript(_SCHEMA)
            self._sql.execute(f"PRAGMA user_version={VERSION}")
            # Reads every table once, so that a file that is no database is noticed here.
            self._sql.execute("SELECT count(*) FROM tenants").fetchone()
        except BaseException:
            self._sql.close()
            raise

    def close(self) -> None:
        self._sql.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """A transaction."""
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    def add(self, rows: Iterable[IndexRow]) -> None:
        """Add these records, replacing rows with the same keys."""
        with self.change():
            for row in rows:
                self._sql.execute("DELETE FROM records WHERE key = ?", (row.key,))
                self._insert(row)

    def remove(self, keys: Sequence[bytes]) -> None:
        with self.change():
            self._sql.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])

    def touch(self, keys: Sequence[bytes], now_s: float) -> list[bytes]:
        """Mark records as used now; returns the keys that have no row."""
        with self.change():
            update = "UPDATE records SET used = ? WHERE key = ?"
            return [key for key in keys if not self._sql.execute(update, (now_s, key)).rowcount]

    def retain(self, key: bytes, budget: Budget) -> None:
        """Mark a record as retained; if the retained budget is full, unmark the oldest of the tenant with the most."""
        with self.change():
            found = self._one("SELECT nbytes, retained FROM records WHERE key = ?", key)
            if found is None or found[1] or found[0] > budget.retain:
                return
            while (self._one("SELECT total(retained) FROM tenants") or (0,))[0] + found[0] > budget.retain:
                (tenant,) = self._one("SELECT tenant FROM tenants ORDER BY retained DESC LIMIT 1") or ("",)
                oldest = self._one(
                    "SELECT key FROM records WHERE tenant = ? AND retained = 1 ORDER BY used LIMIT 1", tenant
                )
                if oldest is None:
                    return
                self._sql.execute("UPDATE records SET retained = 0 WHERE key = ?", oldest)
            self._sql.execute("UPDATE records SET retained = 1 WHERE key = ?", (key,))

    def admit(self, row: IndexRow, budget: Budget) -> list[bytes]:
        """Count a record that is about to be written; returns the keys that are evicted for it."""
        gone: list[bytes] = []
        with self.change():
            self._sql.execute("DELETE FROM records WHERE key = ?", (row.key,))
            while self.tenant_bytes(row.tenant) + row.nbytes > budget.tenant:
                gone.append(self._drop_oldest(row.tenant))
            while self.usage().nbytes + row.nbytes > budget.total_bytes:
                # Records of another format have no tenant, and are never read here: they are evicted first.
                query = "SELECT tenant FROM tenants ORDER BY tenant = '' DESC, nbytes DESC LIMIT 1"
                (largest,) = self._one(query) or ("",)
                gone.append(self._drop_oldest(largest))
            self._insert(row)
        return gone

    def _drop_oldest(self, tenant: str) -> bytes:
        found = self._one("SELECT key FROM records WHERE tenant = ? ORDER BY retained, used LIMIT 1", tenant)
        if found is None:
            raise sqlite3.DatabaseError("the sums do not agree with the rows")
        self._sql.execute("DELETE FROM records WHERE key = ?", found)
        key: bytes = found[0]
        return key

    def _insert(self, row: IndexRow) -> None:
        fields = (row.key, row.tenant, row.kind, row.nbytes, int(row.retained), row.used_s)
        self._sql.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", fields)

    def tenant_bytes(self, tenant: str) -> int:
        found = self._one("SELECT nbytes FROM tenants WHERE tenant = ?", tenant)
        return int(found[0]) if found else 0

    def usage(self) -> TierUsage:
        records, nbytes = self._one("SELECT total(records), total(nbytes) FROM tenants") or (0, 0)
        return TierUsage(int(records), int(nbytes))

    def keys(self, first: bytes, last: bytes) -> set[bytes]:
        """All keys from `first` to `last`."""
        found = self._sql.execute("SELECT key FROM records WHERE key BETWEEN ? AND ?", (first, last))
        return {row[0] for row in found}

    def _one(self, query: str, *values: object) -> tuple[Any, ...] | None:
        found: tuple[Any, ...] | None = self._sql.execute(query, values).fetchone()
        return found
