"""The shared tier against a real Redis: down, killed, slow, full, talking nonsense, or holding what it should not."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import socket
import threading
from typing import Any

import pytest

from kvilt.errors import StoreError
from kvilt.store.address import Kind
from kvilt.store.record import RecordInfo
from kvilt.store.redis import Redis
from kvilt.store.store import Store
from kvilt.store.tier import Budget, TierUsage

pytestmark = pytest.mark.needs("redis")
redis = pytest.importorskip("redis")

SECRET = b"the secret of the fleet"


def tier(url: str, budget: Budget | None = None, **options: Any) -> Redis:
    """A tier that waits long, unless the test is about waiting."""
    return Redis(url, budget or Budget(1 << 24), **{"read_timeout_s": 60.0, "write_timeout_s": 60.0, **options})


def names(server: Any) -> list[bytes]:
    with redis.Redis(port=server.port) as client:
        return sorted(client.keys("{kvilt}:r:*"))


def change(server: Any, data: bytes | None) -> None:
    """Put other bytes in the place of the one record."""
    (name,) = names(server)
    with redis.Redis(port=server.port) as client:
        client.set(name, data) if data is not None else client.delete(name)


def held(server: Any) -> bytes:
    (name,) = names(server)
    with redis.Redis(port=server.port) as client:
        data: bytes = client.get(name)
        return data


def test_another_process_finds_what_was_put(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
        assert kit.count(store, "written_total", tier="redis") == 1
    with kit.store(tier(redis_server.url)) as store:
        found = kit.open(store)
        assert kit.served(found)
        assert found.tier == "redis"
        assert store.usage()["redis"] == TierUsage(1, len(held(redis_server)))
        assert store.count_leading([found.address]) == 1


def test_a_large_record_is_read_layer_by_layer(kit: Any, redis_server: Any) -> None:
    tokens = list(range(3000))  # its header and tokens do not fit the first read
    with kit.store(tier(redis_server.url), secret=SECRET, codec="zstd") as store:
        kit.put(store, tokens)
        assert kit.served(kit.open(store, tokens))


def test_a_hit_is_promoted_to_the_disk(kit: Any, redis_server: Any, tmp_path: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
    with kit.store(kit.disk(tmp_path), tier(redis_server.url)) as store:
        assert kit.open(store).wait()
        store.flush()
        found = kit.open(store)
        assert kit.served(found)
        assert found.tier == "disk"


# What is there is not what it should be.


@pytest.mark.parametrize(
    ("bend", "reason"),
    [
        (lambda data: b"x", "size"),
        (lambda data: data[:100], "size"),
        (lambda data: data + b"x", "size"),
        (lambda data: b"\0" * len(data), "magic"),
        (lambda data: data[:60] + b"?" + data[61:], "seal"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
    ],
)
def test_a_damaged_record_is_a_miss(kit: Any, redis_server: Any, bend: Any, reason: str) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
        change(redis_server, bend(held(redis_server)))
        assert kit.refused(store, "redis", reason)
        assert names(redis_server) == []
        kit.put(store)
        assert kit.served(kit.open(store))


def test_another_models_record_under_the_same_key_is_a_miss(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        store.put_chunk(dataclasses.replace(kit.identity, model="weights-2"), kit.tokens, kit.layers(seed=7))
        store.flush()
        foreign = held(redis_server)
        with redis.Redis(port=redis_server.port) as client:
            client.flushall()
        kit.put(store)
        change(redis_server, foreign)
        assert kit.refused(store, "redis", "identity.model")


def test_something_that_is_no_record_under_the_key_is_a_miss(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
        (name,) = names(redis_server)
        with redis.Redis(port=redis_server.port) as client:
            client.delete(name)
            client.rpush(name, b"a", b"list")
        assert kit.refused(store, "redis", "type")
        kit.put(store)
        assert kit.served(kit.open(store))


def test_a_record_poisoned_by_somebody_without_the_secret_is_a_miss(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as open_store:
        kit.put(open_store, seed=666)
        poisoned = held(redis_server)
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    with kit.store(tier(redis_server.url), secret=SECRET) as store:
        kit.put(store)
        change(redis_server, poisoned)  # a perfect record of other KV, but for the seal
        assert kit.refused(store, "redis", "seal")


# The server is not what it should be.


def test_a_server_that_is_down_at_the_start_costs_misses_until_it_is_there(kit: Any, redis_server: Any) -> None:
    redis_server.kill()
    limits = dataclasses.replace(kit.patient, cooldown_s=0.01)
    with kit.store(tier(redis_server.url), memory=kit.roomy, limits=limits) as store:
        kit.put(store)
        assert kit.count(store, "dropped_total", tier="redis", reason="down") == 1
        missing = kit.open(store, [1, 2, 3])
        assert not missing.hit()
        assert missing.reason == "down"
        assert kit.served(kit.open(store))  # memory does not mind
        redis_server.start()

        def taken() -> bool:
            kit.put(store, [4, 5, 6])
            return len(names(redis_server)) == 1

        kit.until(taken)
    with kit.store(tier(redis_server.url)) as store:
        assert kit.served(kit.open(store, [4, 5, 6]))


def test_a_server_killed_during_a_request_costs_a_miss(kit: Any, redis_server: Any, proxy: Any) -> None:
    tokens = list(range(3000))
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store, tokens)
    answers = itertools.count()

    def bend(data: bytes) -> bytes | None:
        if next(answers) < 3:
            return data
        if redis_server.process is not None:
            redis_server.kill()
        return None

    proxy.bend = bend
    with kit.store(tier(proxy.url)) as store:
        found = kit.open(store, tokens)
        assert not found.wait()
        assert found.reason == "down"
        assert kit.count(store, "misses_total", reason="down") == 1


def test_a_slow_server_costs_misses_and_then_nothing(kit: Any, redis_server: Any, proxy: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
    slow, heard = threading.Event(), []

    def bend(data: bytes) -> bytes:
        heard.append(data)
        slow.wait(300)  # no answer in time
        return data

    proxy.bend = bend
    limits = dataclasses.replace(kit.patient, cooldown_s=3600)
    with kit.store(tier(proxy.url, read_timeout_s=0.1), limits=limits) as store:
        for _ in range(3):
            assert kit.refused(store, "redis", "timeout")
        asked = len(heard)
        for _ in range(100):
            assert kit.refused(store, "redis", "down")  # left alone: nobody waits for it any more
        assert len(heard) == asked
        assert kit.count(store, "tier_up", tier="redis") == 0
        slow.set()


def test_a_slow_server_comes_back_when_it_is_fast_again(kit: Any, redis_server: Any, proxy: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
    healthy = threading.Event()

    def bend(data: bytes) -> bytes:
        healthy.wait(0.3)
        return data

    proxy.bend = bend
    limits = dataclasses.replace(kit.patient, cooldown_s=0.01)
    with kit.store(tier(proxy.url, read_timeout_s=0.1), limits=limits) as store:
        for _ in range(3):
            assert kit.refused(store, "redis", "timeout")
        healthy.set()
        kit.until(lambda: kit.open(store).wait())
        assert kit.count(store, "tier_up", tier="redis") == 1


GARBAGE = {
    "noise": lambda data: hashlib.shake_128(data).digest(200) + b"\r\n",
    "http": lambda data: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "another type": lambda data: b":7\r\n:8\r\n",
    "another type, of a size": lambda data: b":700\r\n:800\r\n",
    "an error": lambda data: b"-ERR something else\r\n-ERR again\r\n",
    "nothing": lambda data: b"$-1\r\n:5\r\n",
    "a bulk without end": lambda data: b"$99999999999\r\n",
    "a negative length": lambda data: b"$-5\r\nabc\r\n",
    "deep arrays": lambda data: b"*1\r\n" * 5000,
    "not a number": lambda data: b"$abc\r\n",
    "too much": lambda data: b"$70000\r\n" + bytes(70_000) + b"\r\n:70000\r\n",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_server_that_talks_nonsense_costs_a_miss(kit: Any, redis_server: Any, proxy: Any, kind: str) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store)
    proxy.bend = GARBAGE[kind]
    with kit.store(tier(proxy.url, read_timeout_s=0.3, write_timeout_s=0.3), memory=kit.roomy) as store:
        found = kit.open(store)
        assert not found.wait()
        assert found.reason in ("garbage", "timeout", "down", "magic", "size"), found.reason
        assert kit.count(store, "misses_total", reason=found.reason) == 1
        kit.put(store, [1, 2, 3])
        assert kit.count(store, "dropped_total", tier="redis") == 1
        assert kit.served(kit.open(store, [1, 2, 3]))


def test_a_server_that_does_not_even_greet_costs_no_more_than_the_limit() -> None:
    """Its line of callers is full, so that a connection is neither made nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        callers = [socket.socket() for _ in range(4)]
        for one in callers:
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        silent = tier(f"redis://127.0.0.1:{listener.getsockname()[1]}/0", read_timeout_s=0.1)
        with pytest.raises(StoreError) as probed:
            silent.probe()
        with pytest.raises(StoreError) as put:
            silent.put(bytes(32), [b"record"], RecordInfo("tenant", "chunk"))
        assert {probed.value.reason, put.value.reason} <= {"timeout", "down"}
        silent.close()
        for one in callers:
            one.close()


def test_a_server_that_drips_is_cut_at_the_deadline(kit: Any, redis_server: Any) -> None:
    """Each byte comes in time, the whole never would."""
    listener, stop = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip() -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(b"$65536\r\n")
            while not stop.wait(0.01):
                try:
                    client.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    limits = dataclasses.replace(kit.patient, lookup_s=0.3, readers=1)
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    with kit.store(tier(url), limits=limits) as store:
        found = kit.open(store)
        assert not found.hit()
        assert found.reason == "deadline"
        thread.join()  # the connection was cut, so that the reader is free again
    stop.set()
    listener.close()


# Budgets, time to live and the index.


def test_records_expire_and_the_index_forgets_them(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url, ttl_s=0.05)) as store:
        kit.put(store, [1])
        kit.until(lambda: names(redis_server) == [])
        assert not kit.open(store, [1]).hit()
        kit.put(store, [2])
        assert store.usage()["redis"].records == 1


def test_use_keeps_a_record_alive(kit: Any, redis_server: Any) -> None:
    one = tier(redis_server.url, ttl_s=1000)
    one.put(bytes(32), [b"x" * 50], RecordInfo("t", "chunk"))
    (name,) = names(redis_server)
    with redis.Redis(port=redis_server.port) as client:
        client.pexpire(name, 60_000)
        one.touch([bytes(32)])
        assert client.pttl(name) > 100_000
    one.close()


def test_a_record_that_the_server_evicted_is_absent_and_forgotten(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        address = kit.put(store).address
        change(redis_server, None)
        assert not kit.open(store).hit()
        one = tier(redis_server.url)
        one.touch([address.key])
        assert one.usage() == TierUsage(0, 0)
        one.close()
        kit.put(store)
        assert kit.served(kit.open(store))


def test_a_lost_index_is_rebuilt_from_the_records(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        for seed in range(5):
            kit.put(store, [seed], seed)
        with redis.Redis(port=redis_server.port) as client:
            index = [name for name in client.keys("*") if b":r:" not in name]
            client.delete(*index)
            client.set("{kvilt}:r:" + "0" * 64, b"not a record")
            client.set("somebody else's", b"value")
        kit.put(store, [5], 5)  # the index knows one record, which is suspicious
        assert store.usage()["redis"].records == 6
        assert len(names(redis_server)) == 6
        with redis.Redis(port=redis_server.port) as client:
            assert client.get("somebody else's") == b"value"


def test_a_used_record_that_the_index_does_not_know_is_added(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        for seed in range(3):
            kit.put(store, [seed], seed)
        with redis.Redis(port=redis_server.port) as client:
            client.delete(*[name for name in client.keys("*") if b":r:" not in name])
        assert kit.served(kit.open(store, [1]), 1)
        store.flush()
        assert store.usage()["redis"].records == 1


def test_budgets_hold_on_the_server(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        kit.put(store, [0])
        size = len(held(redis_server))
    budget = Budget(3 * size, tenant_bytes=2 * size, record_bytes=2 * size)
    with kit.store(tier(redis_server.url, budget)) as store:
        for seed in range(1, 5):
            kit.put(store, [seed], seed)
        assert [kit.open(store, [seed]).wait() for seed in range(5)] == [False, False, False, True, True]
        assert kit.count(store, "evicted_total", tier="redis") == 3
        kit.put(store, list(range(200)))
        assert kit.count(store, "dropped_total", tier="redis", reason="too_large") == 1


def test_a_full_server_drops_what_comes(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url), memory=kit.roomy) as store:
        kit.put(store, [1])
        with redis.Redis(port=redis_server.port) as client:
            client.config_set("maxmemory", 1)
            client.config_set("maxmemory-policy", "noeviction")
        kit.put(store, [2])
        assert kit.count(store, "dropped_total", tier="redis", reason="disk_full") == 1
        assert kit.served(kit.open(store, [2]))


def test_the_tokens_of_all_records_can_be_listed(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as store:
        for seed in range(3):
            kit.put(store, [seed], seed)
        assert sorted(store.stored_tokens(Kind.CHUNK, kit.identity)) == [[0], [1], [2]]


def test_a_namespace_is_a_world_of_its_own(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url, namespace="one")) as store:
        kit.put(store)
    with kit.store(tier(redis_server.url, namespace="two*")) as store:
        assert not kit.open(store).hit()
        kit.put(store)
        assert kit.served(kit.open(store))
        assert store.usage()["redis"].records == 1


def test_two_processes_share_a_server(kit: Any, redis_server: Any) -> None:
    with kit.store(tier(redis_server.url)) as one, kit.store(tier(redis_server.url)) as other:
        for seed in range(6):
            kit.put((one, other)[seed % 2], [seed], seed)
        for seed in range(6):
            assert kit.served(kit.open((one, other)[(seed + 1) % 2], [seed]), seed)
        assert one.usage() == other.usage()


def test_an_address_that_leads_nowhere_is_a_miss(kit: Any) -> None:
    with Store(None, [tier("redis://127.0.0.1:1/0", read_timeout_s=1.0)], limits=kit.patient) as store:
        assert kit.refused(store, "redis", "down")
        assert store.usage() == {"memory": TierUsage(0, 0)}


def test_a_wrong_password_is_a_tier_that_is_down(kit: Any, redis_server: Any) -> None:
    url = f"redis://:wrong@127.0.0.1:{redis_server.port}/0"
    one = tier(url)
    with pytest.raises(StoreError) as error:
        one.probe()
    assert error.value.reason == "down"
    assert "wrong" not in str(error.value)
    one.close()


def test_a_reader_that_is_aborted_before_it_asks_does_not_wait(kit: Any, redis_server: Any, proxy: Any) -> None:
    """There is no connection yet that could be cut, and a new one would wait as long as a read may take."""
    proxy.bend = lambda _data: pytest.fail("nobody asks")
    made = tier(proxy.url, read_timeout_s=60.0)
    reader = made.open(b"k" * 32)
    reader.abort()
    with pytest.raises(StoreError) as error:
        _ = reader.nbytes
    assert error.value.reason == "cancelled"
    made.close()
