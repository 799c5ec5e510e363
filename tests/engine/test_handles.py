"""Named KV handles: owned, budgeted, mortal, and never more than slow when their pages had to go."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small import load_small

from kvilt import Inputs
from kvilt.config import EngineConfig
from kvilt.engine.counters import ENGINE_METRICS, HANDLES
from kvilt.engine.handles.handle import Handle, from_note
from kvilt.engine.handles.handles import Handles
from kvilt.errors import (
    BlobError,
    CacheClosed,
    HandleExpired,
    HandleLimit,
    HandleUnknown,
    InputError,
    KviltError,
    ParamError,
    TruncateError,
)
from kvilt.executor.protocol import Executor
from kvilt.kv.cache import KVCache
from kvilt.kv.owner import part_of
from kvilt.metrics import Metrics
from kvilt.store.address import tenant_of

PAGES = 20
TEXT = [i * 5 % 61 for i in range(70)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module", params=["full", "window"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("small"), PAGES, 40 if request.param == "window" else None, "native")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handles(executor: Executor, clock: Clock) -> Iterator[Handles]:
    config = EngineConfig(max_handles=4, handle_share=0.5, handle_ttl_s=60)
    made = Handles(executor, config, Metrics(ENGINE_METRICS), clock)
    yield made
    made.close()
    assert executor.pool.usage().used == 0


def computed(executor: Executor, tokens: list[int]) -> KVCache:
    kv = executor.create_kv_cache()
    executor.prefill(tokens, kv)
    return kv


def test_a_handle_lends_forks_and_is_never_changed_by_them(executor: Executor, handles: Handles) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    assert (made.tokens, made.resident, made.pinned, made.expires_in_s) == (70, True, False, 60)
    for _ in range(2):
        loan = handles.lend("a", made.id)
        assert list(loan.tokens) == TEXT
        assert loan.kv is not None
        with loan.kv as kv:
            executor.sample_tokens(9, [5], kv)
    assert handles.info("a", made.id) == made


def test_ids_cannot_be_guessed_and_are_nobody_elses(executor: Executor, handles: Handles) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    assert len(bytes.fromhex(made.id)) == 16
    for tenant, handle in (("b", made.id), ("", made.id), ("a", "0" * 32)):
        for verb in (
            lambda t, h: handles.lend(t, h),
            lambda t, h: handles.info(t, h),
            lambda t, h: handles.fork(t, h),
            lambda t, h: handles.truncate(t, h, 1),
            lambda t, h: handles.pin(t, h, 5),
            lambda t, h: handles.delete(t, h),
        ):
            with pytest.raises(HandleUnknown):
                verb(tenant, handle)
    assert handles.owned("b") == []
    assert [one.id for one in handles.owned("a")] == [made.id]


def test_time_ends_a_handle_and_a_pin_puts_that_off(executor: Executor, handles: Handles, clock: Clock) -> None:
    short, pinned = (handles.keep("a", computed(executor, TEXT), ttl_s=10) for _ in range(2))
    assert handles.pin("a", pinned.id, 30).pinned
    clock.now += 11
    with pytest.raises(HandleExpired):
        handles.lend("a", short.id)
    with pytest.raises(HandleUnknown):  # whether it ever was is not the other tenant's business
        handles.lend("b", short.id)
    assert handles.info("a", pinned.id).expires_in_s == 19
    clock.now += 20
    assert handles.owned("a") == []
    assert executor.pool.usage().used == 0


def test_a_pin_may_end_before_its_handle(executor: Executor, handles: Handles, clock: Clock) -> None:
    made = handles.keep("a", computed(executor, TEXT), ttl_s=50)
    handles.pin("a", made.id, 5)
    clock.now += 6
    assert not handles.info("a", made.id).pinned


def test_fork_truncate_and_delete_touch_only_what_they_name(executor: Executor, handles: Handles) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    used = executor.pool.usage().used
    twin = handles.fork("a", made.id)
    assert executor.pool.usage().used == used
    assert handles.truncate("a", twin.id, 66).tokens == 66
    assert handles.info("a", made.id).tokens == 70
    handles.delete("a", made.id)
    with pytest.raises(HandleUnknown):
        handles.info("a", made.id)
    loan = handles.lend("a", twin.id)
    assert list(loan.tokens) == TEXT[:66]
    assert loan.kv is not None
    loan.kv.close()


def test_a_truncate_past_a_window_leaves_tokens_to_compute_again(executor: Executor, handles: Handles) -> None:
    long = (TEXT * 3)[:160]
    made = handles.keep("a", computed(executor, long))
    cut = handles.truncate("a", made.id, 20)
    loan = handles.lend("a", made.id)
    assert list(loan.tokens) == long[:20]
    assert cut.resident == (loan.kv is not None)
    if loan.kv is not None:
        loan.kv.close()
    handles.fill("a", made.id, computed(executor, long[:20]))
    assert handles.info("a", made.id).resident


@pytest.mark.parametrize("length", [0, -1, 71, 1.5, True, None])
def test_lengths_that_cannot_be_are_refused(executor: Executor, handles: Handles, length: int) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    with pytest.raises(TruncateError):
        handles.truncate("a", made.id, length)
    assert handles.info("a", made.id).tokens == 70


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), "soon", True])
def test_times_that_cannot_be_are_refused(executor: Executor, handles: Handles, ttl_s: float) -> None:
    with pytest.raises(ParamError, match="ttl_s"):
        handles.keep("a", computed(executor, TEXT), ttl_s)
    assert executor.pool.usage().used == 0


def test_a_tenant_has_so_many_handles_and_no_more(executor: Executor, handles: Handles) -> None:
    made = [handles.keep("a", computed(executor, TEXT[:3])) for _ in range(4)]
    for again in (lambda: handles.keep("a", computed(executor, TEXT[:3])), lambda: handles.fork("a", made[0].id)):
        with pytest.raises(HandleLimit, match="5 handles"):
            again()
    handles.keep("b", computed(executor, TEXT[:3]))
    handles.delete("a", made[0].id)
    handles.keep("a", computed(executor, TEXT[:3]))


def test_a_tenants_own_older_handles_give_way_to_its_newer_ones(executor: Executor, handles: Handles) -> None:
    other = handles.keep("b", computed(executor, TEXT))
    first, pinned, last = (handles.keep("a", computed(executor, [n, *TEXT])) for n in (1, 2, 3))
    handles.pin("a", pinned.id, 50)
    handles.lend("a", first.id).kv.close()  # type: ignore[union-attr]
    handles.keep("a", computed(executor, [4, *TEXT]))
    state = {one.id: handles.info("a", one.id).resident for one in (first, pinned, last)}
    assert state == {first.id: True, pinned.id: True, last.id: False}, "of those not pinned, the longest unused"
    assert handles.info("b", other.id).resident
    with pytest.raises(HandleLimit, match="11 pages"):
        handles.check_room("c", 321)


def test_pages_are_given_up_for_requests_the_unpinned_first(executor: Executor, handles: Handles) -> None:
    one, two, pinned = (handles.keep(t, computed(executor, [n, *TEXT])) for n, t in enumerate("aba"))
    handles.pin("a", pinned.id, 50)
    handles.lend("a", one.id).kv.close()  # type: ignore[union-attr]
    assert [handles.evict_one(False) for _ in range(3)] == [True, True, False]
    assert not handles.info("b", two.id).resident
    assert handles.info("a", pinned.id).resident
    assert [handles.evict_one(True) for _ in range(2)] == [True, False]
    assert executor.pool.usage().used == 0
    assert list(handles.lend("a", pinned.id).tokens) == [2, *TEXT]


def owned(executor: Executor, owner: str, tokens: list[int]) -> KVCache:
    kv = executor.create_kv_cache(owner=owner)
    executor.prefill(tokens, kv)
    return kv


def test_quotas_are_the_owners_whatever_its_salts(executor: Executor, handles: Handles) -> None:
    """Four handles, and half of all pages, for a key and all its salts."""
    parts = [part_of("a", str(n)) for n in range(6)]
    made = [handles.keep(part, owned(executor, "a", [n, *TEXT])) for n, part in enumerate(parts[:4])]
    with pytest.raises(HandleLimit, match="handles"):
        handles.keep(parts[4], owned(executor, "a", TEXT))
    with pytest.raises(HandleLimit, match="handles"):
        handles.check_room("a", 1)
    there = [handles.info(part, one.id).resident for part, one in zip(parts, made, strict=False)]
    assert there == [False, True, True, True], "ten pages, three for each"
    handles.keep("b", owned(executor, "b", TEXT))
    with pytest.raises(HandleUnknown):
        handles.info("a", made[0].id)
    with pytest.raises(HandleUnknown):
        handles.info(parts[1], made[0].id)


def test_quotas_of_an_owner_outlive_the_process() -> None:
    note = Handle(tenant_of(part_of("a", "x")), array("q", [1]), None, 10.0, 0.0).note("n", 0.0, 100.0)
    back = from_note(note, 0.0, 100.0)
    assert back.tenant == tenant_of(part_of("a", "x")) != tenant_of("a")
    assert back.owner == tenant_of("a")


def test_the_owner_with_the_most_pages_gives_up_first(executor: Executor, handles: Handles) -> None:
    quiet = handles.keep("a", owned(executor, "a", [7, *TEXT]))
    loud = [handles.keep(part_of("b", str(n)), owned(executor, "b", [n, *TEXT])) for n in range(2)]
    assert handles.evict_one(False)
    assert handles.info("a", quiet.id).resident, "though it was used before all others"
    assert not handles.info(part_of("b", "0"), loud[0].id).resident


def test_a_pin_holds_no_more_than_a_fair_share(executor: Executor, handles: Handles) -> None:
    """`b` pins all it may have, and runs; what another owner left unpinned outlives that."""
    quiet = handles.keep("a", owned(executor, "a", [7, *TEXT]))
    loud = [handles.keep("b", owned(executor, "b", [n, *TEXT])) for n in range(3)]
    for one in loud:
        handles.pin("b", one.id, 50)
    with owned(executor, "b", TEXT[:40]):
        assert handles.evict_one(False)
    assert [handles.info("b", one.id).resident for one in loud] == [False, True, True]
    assert handles.info("a", quiet.id).resident
    assert handles.evict_one(False)
    assert not handles.info("a", quiet.id).resident, "within its fair share, what is pinned stays"


def test_what_was_computed_again_must_still_fit(executor: Executor, handles: Handles) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    handles.evict_one(True)
    handles.fill("a", made.id, computed(executor, TEXT[:-1]))
    handles.fill("b", made.id, computed(executor, TEXT))
    handles.fill("a", "gone", computed(executor, TEXT))
    assert not handles.info("a", made.id).resident
    handles.fill("a", made.id, computed(executor, TEXT))
    handles.fill("a", made.id, computed(executor, TEXT))
    assert handles.info("a", made.id).resident


def test_saved_and_restored_by_the_same_tenant_alone(executor: Executor, handles: Handles, tmp_path: Path) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    size = handles.save("a", made.id, tmp_path / "kv")
    assert (tmp_path / "kv").stat().st_size == size
    assert b'"salt":"a"' not in (tmp_path / "kv").read_bytes()
    back = handles.restore("a", tmp_path / "kv")
    assert (back.tokens, back.resident) == (70, True)
    before, after = handles.lend("a", made.id).kv, handles.lend("a", back.id).kv
    assert before is not None
    assert after is not None
    with before, after:
        assert torch.equal(executor.step([5], before), executor.step([5], after))
    for tenant in ("b", ""):
        with pytest.raises(BlobError, match=r"identity\.salt"):
            handles.restore(tenant, tmp_path / "kv")
    handles.evict_one(True)
    handles.evict_one(True)
    with pytest.raises(InputError, match="compute it first"):
        handles.save("a", made.id, tmp_path / "kv")


def test_kv_of_other_numerics_is_restored_as_tokens(
    executor: Executor, handles: Handles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = handles.keep("a", computed(executor, TEXT))
    handles.save("a", made.id, tmp_path / "kv")
    own = executor.pool.identity()
    monkeypatch.setattr(executor.pool, "identity", lambda: type(own)(own.model, "another cpu"))
    back = handles.restore("a", tmp_path / "kv")
    assert (back.tokens, back.resident) == (70, False)
    assert list(handles.lend("a", back.id).tokens) == TEXT


def test_a_damaged_file_is_refused(executor: Executor, handles: Handles, tmp_path: Path) -> None:
    made = handles.keep("a", computed(executor, TEXT[:5]))
    handles.save("a", made.id, tmp_path / "kv")
    data = bytearray((tmp_path / "kv").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "kv").write_bytes(data)
    with pytest.raises(BlobError, match="checksum"):
        handles.restore("a", tmp_path / "kv")
    assert len(handles) == 1


def test_only_one_row_of_tokens_is_named(executor: Executor, handles: Handles) -> None:
    two = executor.create_kv_cache(2)
    embedded = executor.create_kv_cache()
    executor.prefill(Inputs([7, 0], [1], torch.zeros(1, executor.spec.hidden_size)), embedded)
    for kv in (two, embedded):
        with pytest.raises(InputError, match="one row of tokens"):
            handles.keep("a", kv)
        with pytest.raises(CacheClosed):
            kv.fork()


def test_handles_are_counted(executor: Executor, clock: Clock) -> None:
    metrics = Metrics(ENGINE_METRICS)
    handles = Handles(executor, EngineConfig(), metrics, clock)
    made = handles.keep("a", computed(executor, TEXT))
    handles.fork("a", made.id)

    def counted() -> float:
        return metrics.snapshot()[HANDLES.name]["series"][0]["value"]

    assert counted() == 2
    handles.close()
    assert counted() == 0


def test_verbs_from_many_threads_leave_nothing_behind(executor: Executor) -> None:
    handles = Handles(executor, EngineConfig(max_handles=1000))
    made = handles.keep("a", computed(executor, TEXT))
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(30):
                twin = handles.fork("a", made.id)
                loan = handles.lend("a", twin.id)
                handles.truncate("a", twin.id, 69 - n % 3)
                if n % 4 == 0:
                    handles.evict_one(True)
                if loan.kv is not None:
                    assert loan.kv.num_entries == 70
                    loan.kv.close()
                handles.delete("a", twin.id)
        except KviltError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    handles.close()
    assert executor.pool.usage().used == 0
