"""The door: what is put is found, by nobody else, in order, in time, and without anybody waiting for a tier."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Shelfware

from kvilt.errors import InputError, ParamError, StoreError, StoreMiss
from kvilt.store.address import Kind, LayerForm
from kvilt.store.breaker import CircuitBreaker
from kvilt.store.layer import LayerKV
from kvilt.store.store import StoreLimits
from kvilt.store.tier import Budget

HASTY = StoreLimits(lookup_s=0.05, layer_s=0.05, close_s=5)
HOUR = StoreLimits(lookup_s=120, layer_s=120, close_s=120, cooldown_s=3600)


@pytest.fixture
def fake() -> Shelfware:
    return Shelfware()


def test_what_is_put_is_found_in_memory_at_once(kit: Any) -> None:
    with kit.store(memory=kit.roomy) as store:
        kit.put(store)
        found = kit.open(store)
        assert (found.layers_ready, found.tier, found.lossy) == (3, "memory", False)
        assert kit.served(found)
        assert kit.count(store, "hits_total", tier="memory", kind="chunk") == 1


def test_what_was_never_put_is_absent(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, memory=kit.roomy) as store:
        kit.put(store)
        others = [kit.open(store, [5, 6, 7, 8, 10]), kit.open(store, [5, 6, 7, 8]), kit.open(store, [])]
        for field in ("model", "numerics", "adapter", "origin", "salt"):
            others.append(kit.open(store, identity=dataclasses.replace(kit.identity, **{field: "x"})))
        assert [one.hit() for one in others] == [False] * len(others)
        assert {one.reason for one in others} == {"absent"}
        assert kit.count(store, "misses_total", reason="absent") == len(others)
        with pytest.raises(StoreMiss, match="absent"):
            others[0].layer(0)


@pytest.mark.parametrize("tokens", [[], [7]])
def test_chunks_of_no_token_and_of_one(kit: Any, fake: Shelfware, tokens: list[int]) -> None:
    for codec in ("raw", "zstd", "int8", "k8v4"):
        with kit.store(fake, chunk_codec=codec) as store:
            put = store.put_chunk(kit.identity, tokens, kit.layers(len(tokens)))
            store.flush()
            found = store.open_chunk(kit.identity, tokens, kit.form())
            assert kit.same(found.layers(), put.layers())


def test_a_hit_below_is_promoted_to_every_tier_above(kit: Any) -> None:
    near, far = Shelfware("near"), Shelfware("far")
    with kit.store(far) as store:
        kit.put(store)
    with kit.store(near, far, memory=kit.roomy) as store:
        found = kit.open(store)
        assert kit.served(found)
        assert found.tier == "far"
        store.flush()
        assert near.records == far.records
        assert kit.open(store).tier == "memory"
        assert any(isinstance(one, tuple) and one[0] == "touch" for one in far.log)


def test_layers_arrive_in_order_and_the_first_of_all_before_the_second_of_any(kit: Any, fake: Shelfware) -> None:
    documents = [[seed, 1, 2] for seed in range(4)]
    with kit.store(fake) as store:
        for seed, tokens in enumerate(documents):
            kit.put(store, tokens, seed)
        fake.reads.clear()
        fake.log.clear()
    with kit.store(fake, limits=dataclasses.replace(kit.patient, readers=1)) as store:
        loading = [kit.open(store, tokens) for tokens in documents]
        fake.reads.set()
        assert all(kit.served(one, seed) for seed, one in enumerate(loading))
    reads = [entry[1:] for entry in fake.log if entry[0] == "read"]
    frames = sorted({offset for _, offset in reads})[-3:]
    order = [frames.index(offset) for _, offset in reads if offset in frames]
    assert order == sorted(order)


def test_a_layer_is_served_while_later_ones_still_load(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        fake.fail_at = len(next(iter(fake.records.values()))) - 10
        found = kit.open(store)
        assert kit.same([found.layer(0), found.layer(1)], kit.layers()[:2])
        with pytest.raises(StoreMiss) as error:
            found.layer(2)
        assert error.value.reason == "io"
        assert not found.wait()
        assert kit.count(store, "hits_total") == 0
        with pytest.raises(InputError, match="layer 3"):
            found.layer(3)


def test_a_tier_that_fails_half_way_is_given_up_for_the_next(kit: Any) -> None:
    near, far = Shelfware("near"), Shelfware("far")
    with kit.store(near, far) as store:
        kit.put(store)
        key, data = next(iter(near.records.items()))
        near.records[key] = data[:-1] + bytes([data[-1] ^ 1])
        found = kit.open(store)
        assert kit.served(found)
        assert found.tier == "far"
        assert kit.count(store, "refused_total", tier="near", reason="checksum") == 1
        assert kit.count(store, "hits_total", tier="far") == 1
        store.flush()
        assert near.records == far.records  # the damaged one is gone, and the good one was promoted


def test_nobody_waits_longer_than_the_deadline(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, limits=HASTY) as store:
        kit.put(store)
        fake.reads.clear()
        found = kit.open(store)
        assert not found.hit()
        assert found.reason == "deadline"
        assert store.count_leading([found.address]) == 0
        assert kit.count(store, "misses_total", reason="deadline") == 1
        fake.reads.set()


def test_whoever_does_not_wait_hears_of_what_comes_and_of_the_end_of_patience(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        fake.reads.clear()
        found, heard, whole = kit.open(store), threading.Event(), threading.Event()
        found.watch(heard.set)
        found.watch(whole.set, 3)
        assert not found.settled()
        assert 0 < found.patience_s() <= kit.patient.lookup_s
        assert not heard.is_set()
        fake.reads.set()
        assert heard.wait(300)
        assert found.settled()
        assert whole.wait(300)
        assert found.settled(3)
        assert found.patience_s(3) == 0
        assert kit.served(found)
    with kit.store(fake, limits=HASTY) as store:
        fake.reads.clear()
        late = store.open(found.address)
        late.watch(heard.set, 3)
        heard.clear()
        kit.until(lambda: late.settled(3))  # nobody waited, and it ends all the same
        assert late.reason == "deadline"
        assert heard.is_set()
        fake.reads.set()


def test_a_read_nobody_waits_for_is_cut(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        address = kit.open(store).address
    with kit.store(fake, limits=dataclasses.replace(kit.patient, layer_s=0.05)) as store:
        found = store.open(address)
        assert found.hit()
        fake.reads.clear()
        if not found.wait():  # it may have come before the gate closed
            assert found.reason == "deadline"
            assert "abort" in fake.log
        fake.reads.set()


def test_a_caller_who_puts_never_waits_and_what_does_not_fit_is_dropped_and_counted(kit: Any, fake: Shelfware) -> None:
    limits = dataclasses.replace(kit.patient, queue_records=3)
    with kit.store(fake, memory=kit.roomy, limits=limits) as store:
        fake.writes.clear()
        for seed in range(10):
            store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
        dropped = kit.count(store, "dropped_total", tier="fake", reason="queue_full")
        assert dropped in (6, 7)  # one may be in the writer's hands already
        assert not store.flush(timeout_s=0.01)
        fake.writes.set()
        assert store.flush()
        assert len(fake.records) == 10 - dropped
        assert kit.served(kit.open(store, [9]), 9)  # memory has it all the same


def test_the_queue_is_bounded_in_bytes(kit: Any, fake: Shelfware) -> None:
    size = sum(one.nbytes for one in kit.layers(1)) + 8
    with kit.store(fake, limits=dataclasses.replace(kit.patient, queue_bytes=2 * size)) as store:
        fake.writes.clear()
        for seed in range(5):
            store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
        assert kit.count(store, "dropped_total", tier="fake", reason="queue_full") == 3
        fake.writes.set()
        store.flush()
        kit.put(store, [9])  # and there is room again
        assert len(fake.records) == 3


def test_a_dead_tier_is_left_alone_probed_and_taken_back(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, limits=dataclasses.replace(kit.patient, cooldown_s=0.01)) as store:
        kit.put(store)
        fake.error = StoreError("down", "ordered")
        for _ in range(3):
            assert kit.open(store).hit() is False
        assert kit.count(store, "tier_up", tier="fake") == 0
        asked = fake.log.count("open")
        fake.error = None
        kit.until(lambda: kit.open(store).hit())
        assert kit.count(store, "tier_up", tier="fake") == 1
        assert fake.probes >= 1
        assert fake.log.count("open") > asked


def test_a_tier_that_is_busy_with_others_is_not_taken_for_a_dead_one(kit: Any, fake: Shelfware) -> None:
    """Whoever comes late in a long line misses; the tier that serves the line all the while is well."""
    limits = dataclasses.replace(HOUR, lookup_s=0.05, readers=1)
    with kit.store(fake, limits=limits) as store:
        kit.put(store)
        fake.reads.clear()
        waiting = [kit.open(store, [seed]) for seed in range(8)]
        store._channels[0]._served_s = float("inf")  # somebody is served whenever anybody looks
        assert [one.hit() for one in waiting] == [False] * 8
        assert {one.reason for one in waiting} == {"deadline"}
        assert store.count_leading([waiting[0].address]) == 0
        assert kit.count(store, "tier_up", tier="fake") == 1
        store._channels[0]._served_s = 0.0  # and here nobody is
        for _ in range(3):
            assert not kit.open(store).hit()
        assert kit.count(store, "tier_up", tier="fake") == 0
        fake.reads.set()


def test_a_read_that_fails_serves_nobody(kit: Any, fake: Shelfware) -> None:
    """Else a tier that is slow for everybody would look busy, because those it kept waiting end after all."""
    with kit.store(fake, limits=kit.patient) as store:
        kit.put(store)
        channel = store._channels[0]
        before_s = channel._served_s
        fake.error = StoreError("timeout", "ordered")
        assert not kit.open(store).hit()
        assert channel._served_s == before_s
        fake.error = None
        assert kit.served(kit.open(store))
        assert channel._served_s > before_s


def test_headers_are_read_before_any_layer(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, limits=dataclasses.replace(kit.patient, readers=1)) as store:
        for seed in range(3):
            kit.put(store, [seed], seed)
        found: list[Any] = []

        def late() -> None:
            """The third comes when the first record's layers wait already."""
            if fake.log.count("open") == 2 and len(found) == 2:
                found.append(kit.open(store, [2]))

        fake.log.clear()
        fake.reads.clear()
        fake.each_read = late
        found += [kit.open(store, [0]), kit.open(store, [1])]
        fake.reads.set()
        assert all(one.wait() for one in found)
        kit.until(lambda: len(found) == 3)
        assert found[2].wait()
        third = [at for at, what in enumerate(fake.log) if what == "open"][2]
        assert sum(what[0] == "read" for what in fake.log[:third]) == 4  # headers and tokens of the first two


def test_a_tier_that_is_left_alone_is_not_asked(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, limits=HOUR) as store:
        kit.put(store)
        assert store.last_failures() == {}
        fake.error = StoreError("timeout", "ordered")
        for _ in range(10):
            assert not kit.open(store).hit()
        assert fake.log.count("open") == 3
        assert store.last_failures()["fake"].message == "timeout: ordered"
        assert kit.count(store, "refused_total", tier="fake", reason="timeout") == 3
        assert kit.count(store, "refused_total", tier="fake", reason="down") == 7
        # Reads do not speak for writes: they have a breaker of their own, and it heard of nothing yet.
        fake.error = None
        kit.put(store, [1, 2, 3])
        assert len(fake.records) == 2


def test_an_unexpected_failure_of_a_tier_ends_nothing(kit: Any, fake: Shelfware, caplog: Any) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        fake.error = ZeroDivisionError("a mistake")  # type: ignore[assignment]
        assert kit.refused(store, "fake", "error")
        store.put_chunk(kit.identity, [1], kit.layers(1))
        store.flush()
        assert kit.count(store, "dropped_total", tier="fake", reason="error") == 1
        fake.error = None
        assert kit.served(kit.open(store))


@pytest.mark.parametrize("codec", ["int8", "k8v4"])
def test_lossy_chunks_are_the_same_fresh_warm_and_cold(kit: Any, fake: Shelfware, codec: str) -> None:
    with kit.store(fake, memory=kit.roomy, chunk_codec=codec) as store:
        fresh = kit.put(store)
        warm = kit.open(store)
        assert fresh.lossy
        assert warm.tier == "memory"
        assert not kit.same(fresh.layers(), kit.layers())
        assert kit.same(warm.layers(), fresh.layers())
    with kit.store(fake, memory=kit.roomy, chunk_codec=codec) as store:
        cold = kit.open(store)
        assert kit.same(cold.layers(), fresh.layers())
        assert cold.lossy
        assert kit.same(kit.open(store).layers(), fresh.layers())


def test_lossy_records_are_never_found_by_whoever_wants_exact_ones(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, chunk_codec="int8") as store:
        kit.put(store)
    (rounded,) = fake.records.values()
    with kit.store(fake) as store:
        found = kit.open(store)
        assert not found.hit()
        assert found.reason == "absent"
        kit.put(store)
        (key,) = [key for key, data in fake.records.items() if data != rounded]
        fake.records[key] = rounded  # even where it lies in the place of an exact one
        assert kit.refused(store, "fake", "codec")


def test_exact_codecs_read_each_other(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, codec="zstd") as store:
        kit.put(store)
    with kit.store(fake, codec="raw") as store:
        assert kit.served(kit.open(store))


def test_int8_kv_is_not_rounded_twice(kit: Any, fake: Shelfware) -> None:
    scales = torch.rand(4, 2)
    layer = LayerKV(*(torch.randint(-127, 127, (4, 2, 8), dtype=torch.int8) for _ in range(2)), scales, scales)
    with kit.store(fake, chunk_codec="k8v4") as store:
        put = store.put_chunk(kit.identity, [1, 2, 3, 4], [layer])
        store.flush()
        found = store.open_chunk(kit.identity, [1, 2, 3, 4], (LayerForm(2, 8, 8, "int8"),))
        assert kit.same(found.layers(), [layer])
        assert (put.lossy, found.lossy) == (False, False)


def test_kv_that_cannot_be_rounded_is_used_once_and_not_kept(kit: Any, fake: Shelfware) -> None:
    layers = kit.layers()
    layers[1].values[0, 0, 0] = float("nan")
    with kit.store(fake, memory=kit.roomy, chunk_codec="int8") as store:
        put = store.put_chunk(kit.identity, kit.tokens, layers)
        assert torch.equal(put.layer(0).keys, layers[0].keys)
        assert kit.count(store, "dropped_total", reason="nonfinite") == 1
        store.flush()
        assert not kit.open(store).hit()


def test_handles_and_prefixes_are_exact(kit: Any) -> None:
    with pytest.raises(ParamError, match="lossy"):
        kit.store(codec="int8")


def test_another_secret_sees_nothing(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, secret=b"0123456789abcdef") as store:
        kit.put(store)
        assert kit.served(kit.open(store))
    for secret in (None, b"fedcba9876543210"):
        with kit.store(fake, secret=secret) as store:
            assert not kit.open(store).hit()
    with pytest.raises(ParamError, match="secret"):
        kit.store(secret=b"short")


def test_retention_reaches_every_tier(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store, retain=True)
    assert [facts.retain for facts in fake.facts.values()] == [True]


def test_retention_can_be_asked_for_later(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        kit.put(store)
        assert kit.count(store, "written_total") == 1  # what is there is not written again
        kit.put(store, retain=True)
    assert [facts.retain for facts in fake.facts.values()] == [True]


def test_a_breaker_waits_twice_as_long_after_each_failed_question() -> None:
    now_s = 0.0
    breaker = CircuitBreaker(lambda: now_s, failures=2, cooldown_s=1, longest_s=3)
    breaker.record_failure()
    assert breaker.closed
    assert not breaker.should_probe()
    breaker.record_failure()
    breaker.record_failure()  # from before it opened: changes nothing
    for wait_s in (1, 2, 3, 3):
        assert not breaker.closed
        now_s += wait_s - 0.01
        assert not breaker.should_probe()
        now_s += 0.02
        assert breaker.should_probe()
        assert not breaker.should_probe()  # one is enough
        breaker.record_failure()
    breaker.record_success()
    assert breaker.closed
    breaker.record_failure()
    assert breaker.closed  # it begins to count anew


def test_what_is_discarded_is_gone_everywhere(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, memory=kit.roomy) as store:
        address = kit.put(store).address
        store.discard(address)
        store.flush()
        assert not kit.open(store).hit()
        assert not fake.records


def test_reach_counts_from_the_first_on(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, memory=kit.roomy) as store:
        addresses = [kit.put(store, [seed]).address for seed in range(3)]
        missing = kit.open(store, [77]).address
        assert store.count_leading(addresses) == 3
        assert store.count_leading([addresses[0], missing, addresses[1]]) == 1
        assert store.count_leading([]) == 0
    with kit.store(fake) as store:
        assert store.count_leading(addresses) == 3
        fake.error = StoreError("down", "ordered")
        assert store.count_leading(addresses) == 0


def test_what_is_stored_can_be_listed_for_an_index(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        for seed in range(3):
            kit.put(store, [seed, 7])
        other = dataclasses.replace(kit.identity, salt="somebody else")
        store.put_chunk(other, [99], kit.layers(1))
        store.flush()
        fake.records[bytes(32)] = b"noise"
        assert sorted(store.stored_tokens(Kind.CHUNK, kit.identity)) == [[0, 7], [1, 7], [2, 7]]
        assert list(store.stored_tokens(Kind.CHUNK, other)) == [[99]]
        assert list(store.stored_tokens(Kind.HANDLE, kit.identity)) == []
        fake.error = StoreError("down", "ordered")
        assert list(store.stored_tokens(Kind.CHUNK, kit.identity)) == []
        assert kit.count(store, "refused_total", tier="fake", reason="down") == 1


def test_a_closed_store_misses(kit: Any, fake: Shelfware) -> None:
    store = kit.store(fake)
    address = kit.put(store).address
    store.close()
    found = store.open(address)
    assert not found.wait()
    assert found.reason == "closed"
    assert store.count_leading([address]) == 0


def test_memory_keeps_its_budget(kit: Any) -> None:
    size = sum(one.nbytes for one in kit.layers(1)) + 8
    with kit.store(memory=Budget(3 * size)) as store:
        for seed in range(5):
            kit.put(store, [seed], seed)
        assert [kit.open(store, [seed]).hit() for seed in range(5)] == [False, False, True, True, True]
        assert kit.count(store, "bytes", tier="memory") == 3 * size
        assert kit.count(store, "evicted_total", tier="memory") == 2
        kit.put(store, list(range(100)))
        assert kit.count(store, "dropped_total", tier="memory", reason="too_large") == 1


def test_a_cancelled_lookup_is_no_miss(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake) as store:
        kit.put(store)
        fake.reads.clear()
        found = kit.open(store)
        found.cancel()
        fake.reads.set()
        assert not found.hit()
        assert found.reason == "cancelled"
        assert kit.count(store, "misses_total") == 0


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [(torch.zeros(4, 2, 8), torch.zeros(4, 2, 8))],
        [(torch.zeros(5, 2, 8), torch.zeros(4, 2, 8))],
        [(torch.zeros(5, 2, 8), torch.zeros(5, 2, 8)), (torch.zeros(6, 2, 8), torch.zeros(6, 2, 8))],
    ],
)
def test_layers_that_do_not_fit_their_tokens_are_refused(kit: Any, layers: list[Any]) -> None:
    with kit.store(memory=kit.roomy) as store, pytest.raises(InputError):
        store.put_chunk(kit.identity, kit.tokens, layers)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(StoreLimits)])
def test_limits_are_numbers_above_zero(field: str) -> None:
    with pytest.raises(ParamError, match=field):
        StoreLimits(**{field: 0})


def test_closing_writes_what_is_queued_and_later_puts_are_dropped(kit: Any, fake: Shelfware, tmp_path: Path) -> None:
    store = kit.store(fake)
    store.put_chunk(kit.identity, kit.tokens, kit.layers())
    store.close()
    store.close()
    assert len(fake.records) == 1
    store.put_chunk(kit.identity, [1], kit.layers(1))
    assert kit.count(store, "dropped_total", tier="fake", reason="closed") == 1


def test_many_records_on_their_way_hold_few_readers(kit: Any, fake: Shelfware) -> None:
    """A file or a connection for each of a thousand documents would be more than a process may have."""
    count, held, most = 200, [0], [0]
    opened = fake.open

    def counting(key: bytes) -> Any:
        reader: Any = opened(key)
        held[0] += 1
        most[0] = max(most[0], held[0])

        def closed() -> None:
            held[0] -= 1

        reader.close = closed
        return reader

    with kit.store(fake, limits=dataclasses.replace(kit.patient, readers=1)) as store:
        for seed in range(count):
            store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
        store.flush()
        fake.open = counting  # type: ignore[method-assign]
        fake.reads.clear()
        found = [kit.open(store, [seed]) for seed in range(count)]
        fake.reads.set()
        assert all(kit.served(one, seed) for seed, one in enumerate(found))
        kit.until(lambda: held[0] == 0)
        assert most[0] <= 40


def test_a_record_that_is_removed_between_two_of_its_layers_is_a_miss(kit: Any, fake: Shelfware) -> None:
    with kit.store(fake, limits=dataclasses.replace(kit.patient, readers=1)) as store:
        for seed in range(100):
            store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
        store.flush()
        fake.reads.clear()
        found = [kit.open(store, [seed]) for seed in range(100)]
        kept = dict(fake.records)

        def remove() -> None:
            if fake.log.count("open") == 100:  # all headers are there, and nobody's layers
                fake.records.clear()

        fake.each_read = remove
        fake.reads.set()
        assert {one.reason for one in found if not one.wait()} == {"absent"}
        fake.records.update(kept)
        fake.each_read = lambda: None
        assert kit.served(kit.open(store, [7]), 7)
