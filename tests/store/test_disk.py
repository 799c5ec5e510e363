"""The disk tier on a real file system: crashes, damage, a full disk, a read-only one, a lost index, two processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import some

from kvilt.errors import StoreError
from kvilt.store.address import Kind
from kvilt.store.files import FileSystem
from kvilt.store.record import RecordInfo
from kvilt.store.tier import Budget, TierUsage

FACTS = RecordInfo("a" * 32, "chunk")


def files(folder: Path) -> list[Path]:
    return sorted((folder / "records").rglob("*.kv"))


def scratch(folder: Path) -> list[Path]:
    return sorted((folder / "tmp").iterdir())


def survives(kit: Any, folder: Path) -> None:
    """After whatever happened, a new store takes and gives records."""
    with kit.store(kit.disk(folder)) as store:
        kit.put(store)
        assert kit.served(kit.open(store))
        assert kit.count(store, "dropped_total") == 0


def test_a_restart_finds_what_was_put(kit: Any, tmp_path: Path) -> None:
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store)
        assert kit.count(store, "written_total", tier="disk") == 1
    with kit.store(kit.disk(tmp_path)) as store:
        found = kit.open(store)
        assert kit.served(found)
        assert found.tier == "disk"
        assert store.usage()["disk"].records == 1


def test_the_tokens_of_all_records_can_be_listed_after_a_restart(kit: Any, tmp_path: Path, three: TierUsage) -> None:
    with kit.store(kit.disk(tmp_path)) as store:
        assert sorted(store.stored_tokens(Kind.CHUNK, kit.identity)) == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]


def test_only_the_owner_may_read(kit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with kit.store(kit.disk(folder)) as store:
        kit.put(store)
    (record,) = files(folder)
    assert record.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    assert record.name == record.stem + ".kv"
    assert len(bytes.fromhex(record.stem)) == 32


# Crashes.

_DIE = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{here!r}, str(Path({here!r}).parent)]
from conftest import Kit
from kvilt.store.address import Kind
from kvilt.store.files import FileSystem

class Dying(FileSystem):
    stage = {stage!r}
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def write(self, fd, data):
        if self.stage == "write" and len(data) > 100:
            super().write(fd, data[: len(data) // 2])
            self.die()
        super().write(fd, data)
    def sync(self, fd):
        if self.stage == "sync":
            self.die()
        super().sync(fd)
    def sync_folder(self, folder):
        if self.stage == "named" and folder.name != "records":
            self.die()
        super().sync_folder(folder)

kit = Kit()
store = kit.store(kit.disk(Path({folder!r}), files=Dying()))
kit.put(store)
"""


@pytest.mark.parametrize("stage", some(["write", "sync", "named"]))
def test_a_kill_in_the_middle_of_a_write_leaves_all_or_nothing(kit: Any, tmp_path: Path, stage: str) -> None:
    code = _DIE.format(here=str(Path(__file__).parent), stage=stage, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    named = stage == "named"
    assert (len(files(tmp_path)), len(scratch(tmp_path))) == ((1, 0) if named else (0, 1))
    with kit.store(kit.disk(tmp_path)) as store:
        assert scratch(tmp_path) == []  # what the dead left is swept
        found = kit.open(store)
        assert kit.served(found) if named else (not found.wait() and found.reason == "absent")
        assert store.usage()["disk"].records == int(named)  # the row that was counted before the file is gone
    survives(kit, tmp_path)


def test_a_writer_that_lives_is_not_swept(kit: Any, tmp_path: Path) -> None:
    inside: list[list[Path]] = []

    class Watching(FileSystem):
        def sync(self, fd: int) -> None:
            kit.disk(tmp_path).close()  # another process starts, and sweeps
            inside.append(scratch(tmp_path))
            super().sync(fd)

    with kit.store(kit.disk(tmp_path, files=Watching())) as store:
        kit.put(store)
        assert kit.served(kit.open(store))
    assert [len(one) for one in inside] == [1]


# Damage.


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "size"),
        (lambda data: data[:40], "size"),
        (lambda data: data[:-1], "size"),
        (lambda data: data + b"x", "size"),
        (lambda data: b"x" + data[1:], "magic"),
        (lambda data: data[:8] + b"\2" + data[9:], "version"),
        (lambda data: data[:60] + b"?" + data[61:], "seal"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 128]), "checksum"),
        (lambda data: bytes(len(data)), "magic"),
    ],
)
def test_a_damaged_record_is_a_miss_and_makes_room_for_a_good_one(
    kit: Any, tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store)
        (path,) = files(tmp_path)
        damage(path, change)
        assert kit.refused(store, "disk", reason)
        assert files(tmp_path) == []
        kit.put(store)
        assert kit.served(kit.open(store))


def test_a_good_record_that_replaced_a_damaged_one_stays(kit: Any, tmp_path: Path) -> None:
    """The index looks at a damaged file while a lookup refuses it and a good record is written in its place."""
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store)
    (path,) = files(tmp_path)
    good = path.read_bytes()

    class ReplacedWhileRead(FileSystem):
        def pread(self, fd: int, size: int, offset: int) -> bytearray:
            data = super().pread(fd, size, offset)
            self.write_whole(path, [good], tmp_path / "tmp")
            return data

    damage(path, lambda data: b"x" + data[1:])
    (tmp_path / "index.sqlite3").unlink()
    kit.disk(tmp_path, files=ReplacedWhileRead()).close()
    assert path.read_bytes() == good


def test_another_models_record_under_the_same_key_is_a_miss(kit: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    with kit.store(kit.disk(tmp_path)) as store:
        store.put_chunk(replace(kit.identity, model="weights-2"), kit.tokens, kit.layers(seed=7))
        store.flush()
        (foreign,) = files(tmp_path)
        kit.put(store)
        (own,) = set(files(tmp_path)) - {foreign}
        own.write_bytes(foreign.read_bytes())
        assert kit.refused(store, "disk", "identity.model")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_regular_files_are_records(kit: Any, tmp_path: Path, kind: str) -> None:
    with kit.store(kit.disk(tmp_path)) as store:
        kit.put(store)
        (path,) = files(tmp_path)
        outside = tmp_path / "outside"
        path.rename(outside)
        match kind:
            case "link":
                path.symlink_to(outside)
            case "folder":
                path.mkdir()
            case _:
                os.mkfifo(path)
        assert kit.refused(store, "disk", "symlink")
        before = outside.read_bytes()
        kit.put(store)
        assert kit.served(kit.open(store)) == (kind != "folder")  # a link is replaced, not followed
        assert outside.read_bytes() == before


# Disks that are full, read-only or broken.


class Failing(FileSystem):
    """Fails the way a disk does."""

    def __init__(self, number: int, verb: str, after: int = 0) -> None:
        self.number, self.verb, self.after = number, verb, after

    def _fail(self, verb: str) -> None:
        if verb == self.verb:
            self.after -= 1
            if self.after < 0:
                raise OSError(self.number, os.strerror(self.number))

    def write(self, fd: int, data: bytes) -> None:
        self._fail("write")
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytearray:
        self._fail("pread")
        return super().pread(fd, size, offset)


@pytest.mark.parametrize(
    ("number", "verb", "reason"),
    [
        (28, "write", "disk_full"),
        (28, "sync", "disk_full"),
        (122, "write", "disk_full"),
        (30, "write", "read_only"),
        (5, "write", "io"),
        (5, "sync", "io"),
        (24, "write", "descriptors"),
    ],
)
def test_a_write_that_fails_is_dropped_without_a_trace(
    kit: Any, tmp_path: Path, number: int, verb: str, reason: str
) -> None:
    failing = Failing(number, verb, after=2 if verb == "write" else 0)
    with kit.store(kit.disk(tmp_path, files=failing), memory=kit.roomy) as store:
        kit.put(store)
        assert kit.count(store, "dropped_total", tier="disk", reason=reason) == 1
        assert (files(tmp_path), scratch(tmp_path)) == ([], [])
        assert store.usage()["disk"] == TierUsage(0, 0)
        assert kit.served(kit.open(store))  # from memory: the process goes on
        failing.verb = "none"
        kit.put(store, [1, 2, 3])
        assert len(files(tmp_path)) == 1


def test_a_disk_that_cannot_be_read_costs_a_miss(kit: Any, tmp_path: Path) -> None:
    failing = Failing(5, "none")
    with kit.store(kit.disk(tmp_path, files=failing)) as store:
        kit.put(store)
        failing.verb = "pread"
        assert kit.refused(store, "disk", "io")
        failing.verb = "none"
        assert kit.served(kit.open(store))  # it was the disk's fault, not the record's: the record is still there


@pytest.mark.privileged
def test_a_full_file_system_drops_what_does_not_fit(kit: Any, small_disk: Path) -> None:
    """A megabyte, most of which somebody else takes; the budget promised more."""
    with kit.store(kit.disk(small_disk), memory=kit.roomy) as store:
        kit.put(store, [1])
        (small_disk / "filler").write_bytes(bytes(850_000))
        for seed in range(20):
            store.put_chunk(kit.identity, list(range(seed, seed + 400)), kit.layers(400, seed=seed))
        store.flush()
        assert kit.count(store, "dropped_total", tier="disk", reason="disk_full") > 0
        assert scratch(small_disk) == []
        assert kit.served(kit.open(store, list(range(19, 419))), 19)
    (small_disk / "filler").unlink()
    with kit.store(kit.disk(small_disk)) as store:
        assert kit.served(kit.open(store, [1]))
        kit.put(store)
        assert kit.served(kit.open(store))


@pytest.mark.privileged
def test_a_read_only_file_system_still_serves(kit: Any, small_disk: Path) -> None:
    with kit.store(kit.disk(small_disk)) as store:
        kit.put(store)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with kit.store(kit.disk(small_disk)) as store:
        assert kit.served(kit.open(store))
        kit.put(store, [1, 2, 3])
        assert kit.count(store, "dropped_total", tier="disk", reason="read_only") == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    survives(kit, small_disk)


@pytest.mark.privileged
def test_a_read_only_empty_disk_costs_misses(kit: Any, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with kit.store(kit.disk(small_disk / "new")) as store:
        kit.put(store)
        assert kit.count(store, "dropped_total", tier="disk", reason="read_only") == 1
        assert not kit.open(store).hit()


# The index.


def indexed(kit: Any, folder: Path) -> TierUsage:
    disk = kit.disk(folder)
    try:
        return disk.usage()
    finally:
        disk.close()


@pytest.fixture
def three(kit: Any, tmp_path: Path) -> TierUsage:
    """A folder with three records."""
    with kit.store(kit.disk(tmp_path)) as store:
        for seed in range(3):
            kit.put(store, [seed, 1, 2], seed)
    return TierUsage(3, sum(path.stat().st_size for path in files(tmp_path)))


def forge(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite3") as sql:
        sql.execute("PRAGMA user_version=99")
    sql.close()


def scribble(folder: Path) -> None:
    """Pages in the middle of the file are noise; its first one is well."""
    path = folder / "index.sqlite3"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


INDEX_FAULTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: [path.unlink() for path in folder.glob("index*")],
    "empty": lambda folder: (folder / "index.sqlite3").write_bytes(b""),
    "noise": lambda folder: (folder / "index.sqlite3").write_bytes(b"noise" * 1000),
    "scribbled": scribble,
    "cut": lambda folder: (folder / "index.sqlite3").write_bytes((folder / "index.sqlite3").read_bytes()[:5000]),
    "another version": forge,
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_lost_index_is_rebuilt_from_the_records(kit: Any, tmp_path: Path, three: TierUsage, fault: str) -> None:
    INDEX_FAULTS[fault](tmp_path)
    with kit.store(kit.disk(tmp_path)) as store:
        assert kit.served(kit.open(store, [0, 1, 2]), 0)
        assert kit.served(kit.open(store, [2, 1, 2]), 2)
    assert indexed(kit, tmp_path) == three


@pytest.mark.parametrize("fault", ["missing", "noise"])
def test_an_index_lost_while_it_is_in_use_is_rebuilt(kit: Any, tmp_path: Path, fault: str) -> None:
    disk = kit.disk(tmp_path)
    with kit.store(disk) as store:
        kit.put(store, [0, 1, 2])
        for path in tmp_path.glob("index*"):
            path.unlink()
        if fault == "noise":
            INDEX_FAULTS[fault](tmp_path)
        kit.put(store, [1, 1, 2], 1)
        disk.settle()
        assert disk.usage().records == 2
        assert kit.served(kit.open(store, [0, 1, 2]), 0)


def test_an_index_that_is_out_of_step_catches_up(kit: Any, tmp_path: Path, three: TierUsage) -> None:
    gone, kept, _ = files(tmp_path)
    gone.unlink()
    (kept.parent / f"{'0' * 64}.kv").write_bytes(b"not where it belongs")
    (kept.parent / "note.txt").write_text("not a record")
    broken = kept.with_name(kept.stem[:2] + "0" * 62 + ".kv")
    broken.write_bytes(b"not a record, but named like one")
    usage = indexed(kit, tmp_path)
    assert usage.records == 2
    assert not broken.exists()
    assert (kept.parent / "note.txt").exists()


def test_records_of_another_format_are_counted_and_leave_first(kit: Any, tmp_path: Path, three: TierUsage) -> None:
    old = files(tmp_path)[0]
    damage(old, lambda data: data[:8] + b"\7\0\0\0" + data[12:])
    for path in tmp_path.glob("index*"):
        path.unlink()
    assert indexed(kit, tmp_path) == three
    with kit.store(kit.disk(tmp_path, Budget(three.nbytes))) as store:
        kit.put(store, [9, 1, 2])
        assert not old.exists()
        assert len(files(tmp_path)) == 3


def test_the_budget_is_kept_and_the_oldest_files_leave(kit: Any, tmp_path: Path, three: TierUsage) -> None:
    with kit.store(kit.disk(tmp_path, Budget(three.nbytes))) as store:
        assert kit.served(kit.open(store, [0, 1, 2]), 0)  # used now
        store.flush()
        kit.put(store, [9, 1, 2], 9)
        assert kit.count(store, "evicted_total", tier="disk") == 1
        served = [kit.open(store, [seed, 1, 2]).wait() for seed in (0, 1, 2, 9)]
        assert served == [True, False, True, True]
        assert sum(path.stat().st_size for path in files(tmp_path)) <= three.nbytes
        kit.put(store, list(range(1000)))
        assert kit.count(store, "dropped_total", tier="disk", reason="too_large") == 1


def test_two_stores_share_a_folder(kit: Any, tmp_path: Path) -> None:
    one, other = kit.store(kit.disk(tmp_path)), kit.store(kit.disk(tmp_path))
    with one, other:
        for seed in range(6):
            kit.put((one, other)[seed % 2], [seed, 1], seed)
        for seed in range(6):
            assert kit.served(kit.open((one, other)[(seed + 1) % 2], [seed, 1]), seed)
        assert one.usage()["disk"] == other.usage()["disk"]
        assert one.usage()["disk"].records == 6


_WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [{here!r}, str(Path({here!r}).parent)]
from conftest import Kit
from kvilt.store.tier import Budget

kit = Kit()
with kit.store(kit.disk(Path({folder!r}), Budget(60_000))) as store:
    for seed in range({first}, {first} + 60):
        kit.put(store, [seed, 1, 2], seed)
    print(int(kit.count(store, "written_total")), int(kit.count(store, "dropped_total")))
"""


def test_two_processes_write_to_one_folder(kit: Any, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER.format(here=str(Path(__file__).parent), folder=str(tmp_path), first=first)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for first in (0, 40)
    ]
    for process in started:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert int(out.split()[1]) == 0
    held = files(tmp_path)
    sizes = sum(path.stat().st_size for path in held)
    assert 0 < sizes <= 60_000
    assert indexed(kit, tmp_path) == TierUsage(len(held), sizes)
    with kit.store(kit.disk(tmp_path)) as store:
        found = [seed for seed in range(100) if (one := kit.open(store, [seed, 1, 2])).wait() and kit.served(one, seed)]
        assert len(found) == len(held)


def test_a_closed_tier_says_so(kit: Any, tmp_path: Path) -> None:
    disk = kit.disk(tmp_path)
    disk.close()
    with pytest.raises(StoreError) as error:
        disk.put(bytes(32), [b"x"], FACTS)
    assert error.value.reason == "closed"
