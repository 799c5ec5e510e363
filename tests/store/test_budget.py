"""Who leaves when room is needed: the same rules for the ledger in memory, the index on disk and Redis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from effort import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvilt.errors import ParamError, StoreError
from kvilt.store.index import DiskIndex, IndexRow
from kvilt.store.record import RecordInfo
from kvilt.store.tenant_lru import TenantLRU
from kvilt.store.tier import Budget, TierUsage


class Books(Protocol):
    """What all three have in common."""

    def add(self, key: int, tenant: str, nbytes: int, retain: bool = False) -> bool: ...
    def touch(self, key: int) -> None: ...
    def held(self) -> set[int]: ...
    def usage(self) -> TierUsage: ...


def name(key: int) -> bytes:
    return key.to_bytes(32, "big")


class InMemory:
    def __init__(self, budget: Budget) -> None:
        self._ledger, self._keys = TenantLRU(budget), set[int]()

    def add(self, key: int, tenant: str, nbytes: int, retain: bool = False) -> bool:
        gone = self._ledger.add(name(key), tenant, nbytes, retain)
        self._keys = (self._keys | ({key} if gone is not None else set())) - {
            int.from_bytes(one, "big") for one in gone or []
        }
        return gone is not None

    def touch(self, key: int) -> None:
        self._ledger.touch(name(key))

    def held(self) -> set[int]:
        assert all((name(key) in self._ledger) for key in self._keys)
        return set(self._keys)

    def usage(self) -> TierUsage:
        return TierUsage(len(self._ledger), self._ledger.nbytes)


class InIndex:
    def __init__(self, budget: Budget, folder: Path) -> None:
        self._budget, self._now_s = budget, 0.0
        self.index = DiskIndex(folder / f"{id(self)}.sqlite3")

    def add(self, key: int, tenant: str, nbytes: int, retain: bool = False) -> bool:
        self._now_s += 1
        if nbytes > self._budget.record:
            return False
        self.index.admit(IndexRow(name(key), tenant, "chunk", nbytes, False, self._now_s), self._budget)
        if retain:
            self.index.retain(name(key), self._budget)
        return True

    def touch(self, key: int) -> None:
        self._now_s += 1
        self.index.touch([name(key)], self._now_s)

    def held(self) -> set[int]:
        return {int.from_bytes(key, "big") for key in self.index.keys(bytes(32), b"\xff" * 32)}

    def usage(self) -> TierUsage:
        return self.index.usage()


class InRedis:
    def __init__(self, budget: Budget, url: str, namespace: str = "kvilt") -> None:
        from kvilt.store.redis import Redis

        self.tier = Redis(url, budget, namespace=namespace, read_timeout_s=60, write_timeout_s=60)
        self._seen = set[int]()

    def add(self, key: int, tenant: str, nbytes: int, retain: bool = False) -> bool:
        self._seen.add(key)
        try:
            self.tier.put(name(key), [bytes(nbytes)], RecordInfo(tenant, "chunk", retain))
        except StoreError as error:
            assert error.reason == "too_large"
            return False
        finally:
            wait_a_millisecond()
        return True

    def touch(self, key: int) -> None:
        self.tier.touch([name(key)])
        wait_a_millisecond()

    def held(self) -> set[int]:
        seen = sorted(self._seen)
        there = self.tier.has([name(key) for key in seen])
        return {key for key, known in zip(seen, there, strict=True) if known}

    def usage(self) -> TierUsage:
        return self.tier.usage()


def wait_a_millisecond() -> None:
    """The server's clock for the order of use ticks that fast."""
    import time

    time.sleep(0.0015)


@pytest.fixture(params=["memory", "index", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    match request.param:
        case "memory":
            yield InMemory
        case "index":
            made: list[InIndex] = []
            yield lambda budget: made.append(InIndex(budget, tmp_path)) or made[-1]
            for one in made:
                one.index.close()
        case _:
            server = request.getfixturevalue("redis_server")
            tiers: list[InRedis] = []
            yield lambda budget: tiers.append(InRedis(budget, server.url)) or tiers[-1]
            for one in tiers:
                one.tier.close()


def test_the_least_recently_used_leaves(make: Any) -> None:
    books: Books = make(Budget(300))
    for key in (1, 2, 3):
        books.add(key, "a", 100)
    books.touch(1)
    assert books.add(4, "a", 100)
    assert books.held() == {1, 3, 4}
    assert books.usage() == TierUsage(3, 300)


def test_what_comes_again_is_counted_once(make: Any) -> None:
    books: Books = make(Budget(300))
    for _ in range(5):
        books.add(1, "a", 100)
    assert books.usage() == TierUsage(1, 100)


def test_a_tenant_makes_room_from_its_own(make: Any) -> None:
    books: Books = make(Budget(1000, tenant_bytes=200))
    books.add(1, "b", 100)
    for key in (2, 3, 4):
        books.add(key, "a", 100)
    assert books.held() == {1, 3, 4}


def test_one_tenant_cannot_flush_another(make: Any) -> None:
    books: Books = make(Budget(400))
    books.add(1, "quiet", 100)
    for key in range(2, 30):
        books.add(key, "loud", 100)
    assert 1 in books.held()
    assert books.usage() == TierUsage(4, 400)


def test_retention_is_a_bias(make: Any) -> None:
    books: Books = make(Budget(300, retain_bytes=100))
    books.add(1, "a", 100, retain=True)
    for key in range(2, 6):
        books.add(key, "a", 100)
    assert books.held() == {1, 4, 5}


def test_retention_has_a_budget(make: Any) -> None:
    books: Books = make(Budget(400, retain_bytes=100))
    books.add(1, "a", 100, retain=True)
    books.add(2, "a", 100, retain=True)  # takes the bias from the first
    for key in range(3, 9):
        books.add(key, "a", 100)
    assert books.held() == {2, 6, 7, 8}


@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")])
def test_the_bias_to_stay_moves_on(make: Any, tenants: tuple[str, str]) -> None:
    """Whoever asked for it first does not keep others from it."""
    books: Books = make(Budget(400, retain_bytes=100))
    books.add(1, tenants[0], 100, retain=True)
    books.add(2, tenants[1], 100, retain=True)
    for key in range(3, 9):
        books.add(key, tenants[1], 100)
    assert 2 in books.held()
    assert books.usage() == TierUsage(4, 400)


def test_retention_is_never_a_lock(make: Any) -> None:
    books: Books = make(Budget(300, retain_bytes=300))
    for key in range(6):
        assert books.add(key, "a", 100, retain=True)
    assert books.held() == {3, 4, 5}


def test_what_is_too_large_is_refused_and_moves_nobody(make: Any) -> None:
    books: Books = make(Budget(300, tenant_bytes=200, record_bytes=150))
    books.add(1, "a", 100)
    assert not books.add(2, "a", 151)
    assert not books.add(3, "b", 500)
    assert books.held() == {1}


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from("abc"), st.integers(0, 60), st.booleans(), st.booleans()), max_size=40
)


BYTES = st.integers(0, 200)


@pytest.mark.parametrize("kind", ["memory", "index"])
@settings(max_examples=examples(25))
@given(steps=STEPS, total=BYTES, tenant=BYTES, retain=BYTES)
def test_no_budget_is_ever_exceeded(
    kind: str, tmp_path_factory: pytest.TempPathFactory, steps: list[Any], total: int, tenant: int, retain: int
) -> None:
    budget = Budget(total, tenant_bytes=tenant, retain_bytes=retain)
    books: Any = InMemory(budget) if kind == "memory" else InIndex(budget, tmp_path_factory.mktemp("index"))
    stays_within(books, budget, steps)
    if kind == "index":
        books.index.close()


@pytest.mark.needs("redis")
@settings(
    max_examples=examples(10),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example(steps=[(0, "a", 0, False, True), (0, "a", 1, False, True)], total=9, tenant=9, retain=9)
@given(steps=STEPS, total=BYTES, tenant=BYTES, retain=BYTES)
def test_no_budget_is_ever_exceeded_on_a_server(
    redis_server: Any, steps: list[Any], total: int, tenant: int, retain: int
) -> None:
    budget = Budget(total, tenant_bytes=tenant, retain_bytes=retain)
    books = InRedis(budget, redis_server.url, namespace=secrets.token_hex(8))
    stays_within(books, budget, steps)
    books.tier.close()


def stays_within(books: Books, budget: Budget, steps: list[Any]) -> None:
    """Whatever is added and used, sums are right and nobody has more than is theirs."""
    sizes: dict[int, tuple[str, int]] = {}
    for key, who, nbytes, again, keep in steps:
        books.touch(key) if again else None
        if books.add(key, who, nbytes, keep):
            sizes[key] = (who, nbytes)
        held = books.held()
        assert books.usage() == TierUsage(len(held), sum(sizes[one][1] for one in held))
        assert books.usage().nbytes <= budget.total_bytes
        for one in "abc":
            assert sum(sizes[key][1] for key in held if sizes[key][0] == one) <= budget.tenant


@pytest.mark.parametrize("field", ["total_bytes", "tenant_bytes", "record_bytes", "retain_bytes"])
def test_a_budget_is_a_number_of_bytes(field: str) -> None:
    for bad in (-1, 1.5, True, "1"):
        with pytest.raises(ParamError, match=field):
            Budget(**{"total_bytes": 1, field: bad})  # type: ignore[arg-type]
