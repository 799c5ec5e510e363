"""What a store keeps when a program ends, and what it leaves alone: folders that vanish, files that are not its own."""

from __future__ import annotations

import dataclasses
import gc
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from stores import Shelfware

from kvilt.errors import StoreError
from kvilt.store.address import chunk_address
from kvilt.store.files import FileSystem
from kvilt.store.loading import LookupContext
from kvilt.store.tier import Budget, TierUsage

_LEAVES = """
import atexit, os, sys, threading
from pathlib import Path
sys.path[:0] = [{here!r}, str(Path({here!r}).parent)]
from conftest import Kit
from kvilt.store.files import FileSystem

gate = threading.Event()

class Held(FileSystem):
    def write(self, fd, data):
        gate.wait()
        super().write(fd, data)

kit = Kit()
store = kit.store(kit.disk(Path({folder!r}), files=Held()))
for seed in range(8):
    store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
if os.fork() == 0:
    sys.exit()  # a child has none of the threads, and does not wait for them
os.wait()
atexit.register(gate.set)  # the program has ended before anything is written
"""


def test_a_program_that_ends_without_closing_loses_nothing(kit: Any, tmp_path: Path) -> None:
    code = _LEAVES.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr.decode()
    with kit.store(kit.disk(tmp_path)) as store:
        assert [kit.served(kit.open(store, [seed]), seed) for seed in range(8)] == [True] * 8


def test_what_is_not_written_when_a_store_closes_is_counted(kit: Any) -> None:
    fake = Shelfware()
    store = kit.store(fake, limits=dataclasses.replace(kit.patient, close_s=0.05))
    fake.writes.clear()
    for seed in range(4):
        store.put_chunk(kit.identity, [seed], kit.layers(1, seed=seed))
    kit.until(lambda: "put" in fake.log)  # the first is in the writer's hands
    store.close()
    assert kit.count(store, "dropped_total", tier="fake", reason="closed") == 3
    fake.writes.set()


def test_idle_readers_keep_no_record_in_memory(kit: Any) -> None:
    fake = Shelfware()
    with kit.store(fake) as store:
        kit.put(store)
        found = kit.open(store)
        assert kit.served(found)
        gone = weakref.ref(found)
        del found

        def forgotten() -> bool:
            gc.collect()
            return gone() is None

        kit.until(forgotten)  # nobody asks for anything more, and still it goes


def test_a_record_larger_than_the_queue_is_written(kit: Any) -> None:
    fake = Shelfware()
    with kit.store(fake, limits=dataclasses.replace(kit.patient, queue_bytes=10)) as store:
        kit.put(store)
        kit.put(store, [1])
        assert len(fake.records) == 2
        assert kit.count(store, "dropped_total") == 0


def test_looking_whether_something_is_there_is_no_use_of_it(kit: Any) -> None:
    """Tiers below hear of a use once a minute: whoever only looks must not take that from whoever uses it."""
    fake, now_s = Shelfware(), [0.0]
    with kit.store(fake, memory=kit.roomy) as store:
        store._memory._clock = lambda: now_s[0]
        address = kit.put(store).address
        now_s[0] = 61.0
        assert store.count_leading([address]) == 1
        store.flush()
        assert [one for one in fake.log if one[0] == "touch"] == []
        assert kit.open(store).hit()
        assert kit.open(store).hit()
        store.flush()
        assert [one for one in fake.log if one[0] == "touch"] == [("touch", address.key)]


def test_a_folder_that_was_there_before_keeps_what_it_holds(kit: Any, tmp_path: Path) -> None:
    """Somebody names a folder that has a `tmp` of its own."""
    theirs = [tmp_path / "tmp" / "thesis.txt", tmp_path / "tmp" / "notes.tmp", tmp_path / "records" / "aa" / "song.kv"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    dead = tmp_path / "tmp" / f"{'0' * 32}.tmp"
    dead.write_bytes(b"half of a record")
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store)
        assert kit.served(kit.open(store))
    assert [path.read_text() for path in theirs] == ["years of work"] * 3
    assert not dead.exists()


def test_a_folder_that_is_removed_while_it_is_in_use_is_made_again(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    disk = kit.disk(folder)
    with kit.store(disk) as store:
        kit.put(store)
        shutil.rmtree(folder)
        assert not kit.open(store).hit()
        kit.put(store, [1], 1)
        assert kit.served(kit.open(store, [1]), 1)
        disk.settle()
        assert store.usage()["disk"].records == 1


class Clinging(FileSystem):
    """Files that cannot be removed."""

    def unlink(self, path: Path) -> None:
        raise StoreError("read_only", "ordered")


def test_a_record_that_makes_no_room_is_not_counted(kit: Any, tmp_path: Path) -> None:
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store, [1])
        size = store.usage()["disk"].nbytes
    with kit.store(kit.disk(tmp_path, Budget(size), files=Clinging())) as store:
        kit.put(store, [2])
        assert kit.count(store, "dropped_total", tier="disk", reason="read_only") == 1
        assert store.usage()["disk"] == TierUsage(0, 0)  # neither the new one, nor the one that was to leave


@pytest.mark.parametrize("field", ["tokens", "model", "numerics", "adapter", "origin", "salt"])
def test_what_is_in_memory_is_compared_and_not_only_hashed(
    kit: Any, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """All records have one key: the worst that a hash can do."""
    monkeypatch.setattr(LookupContext, "key", lambda *_: bytes(32))
    tokens, identity = kit.tokens, kit.identity
    if field == "tokens":
        tokens = [*kit.tokens[:-1], 1]
    else:
        identity = dataclasses.replace(identity, **{field: "another"})
    with kit.store(memory=kit.roomy) as store:
        kit.put(store)
        found = kit.open(store, tokens, identity)
        assert not found.hit()
        assert kit.count(store, "refused_total", tier="memory") == 1
        assert not kit.open(store).hit()  # it made room for whoever owns that place now


def test_a_bias_that_is_asked_for_while_a_record_waits_is_kept(kit: Any) -> None:
    fake = Shelfware()
    with kit.store(fake) as store:
        fake.writes.clear()
        store.put_chunk(kit.identity, [0], kit.layers(1))  # the writer stands before this one
        kit.until(lambda: "put" in fake.log)
        for retain in (False, True, False):
            address = store.put_chunk(kit.identity, kit.tokens, kit.layers(), retain=retain).address
        fake.writes.set()
        store.flush()
        assert fake.facts[address.key].retain
        assert len(fake.records) == 2


def test_holders_of_different_secrets_do_not_push_each_other_out(kit: Any, tmp_path: Path) -> None:
    secrets = [b"one secret of the fleet", b"another of the fleets", None]
    for round_ in range(2):
        for secret in secrets:
            with kit.store(kit.disk(tmp_path), secret=secret) as store:
                assert kit.open(store).wait() == bool(round_)
                kit.put(store)
    assert len(list(tmp_path.rglob("*.kv"))) == 3


def test_a_record_that_lacks_the_beginning_is_a_miss_for_who_needs_it(kit: Any) -> None:
    fake = Shelfware()
    with kit.store(fake) as store:
        address = chunk_address(kit.identity, kit.tokens, kit.form())
        late = (2,) * len(address.form)
        store.put(address.with_firsts(late), kit.layers(len(kit.tokens) - 2))
        store.flush()
        assert store.open(address.with_firsts(late)).wait()
        assert kit.refused(store, "fake", "span")
