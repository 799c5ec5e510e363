"""Documents and prefixes on a disk that fails, through the engine: the answer is that of a healthy run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from effort import some
from faulty import PATIENT, QUILT, answer, count, healthy
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.store.disk import Disk
from kvilt.store.files import FileSystem
from kvilt.store.store import Store
from kvilt.store.tier import Budget

CONFIG = RunConfig(kv_memory=1 << 22, backend="native", threads=1)
PAGES = 64  # tokens before the first document that are whole pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return load_executor(folder, CONFIG)


@pytest.fixture(scope="module")
def expected(executor: Executor) -> list[int]:
    return healthy(executor)


def on_disk(folder: Path, files: FileSystem | None = None) -> Store:
    disk = Disk(folder, Budget(1 << 28), files=files)
    disk.settle()
    return Store(None, [disk], limits=PATIENT)


def fill(executor: Executor, folder: Path) -> list[Path]:
    """A folder that holds the documents and the pages before them: its records."""
    with on_disk(folder) as store:
        assert answer(executor, store).made == QUILT.reused
    return sorted((folder / "records").rglob("*.kv"))


def recovers(executor: Executor, folder: Path, expected: list[int]) -> None:
    """Whatever was there: one more run repairs it, and the next finds everything."""
    with on_disk(folder) as store:
        assert answer(executor, store).tokens == expected
    with on_disk(folder) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, 0, PAGES)


def test_a_healthy_disk(executor: Executor, expected: list[int], tmp_path: Path) -> None:
    fill(executor, tmp_path)
    recovers(executor, tmp_path, expected)


_DIE = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from faulty import answer
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.store.disk import Disk
from kvilt.store.files import FileSystem
from kvilt.store.store import Store
from kvilt.store.tier import Budget

class Dying(FileSystem):
    left = {number}  # records, until one is its last
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def write(self, fd, data):
        if {stage!r} == "write" and not self.left:
            super().write(fd, data[: len(data) // 2])
            self.die()
        super().write(fd, data)
    def sync(self, fd):
        if {stage!r} == "sync" and not self.left:
            self.die()
        super().sync(fd)
    def sync_folder(self, folder):
        if folder.parent.name == "records":
            if not self.left:
                self.die()
            self.left -= 1
        super().sync_folder(folder)

executor = load_executor(Path({model!r}), RunConfig(kv_memory=1 << 22, backend="native", threads=1))
store = Store(None, [Disk({folder!r}, Budget(1 << 28), files=Dying())])
answer(executor, store)
store.close()
"""


@pytest.mark.parametrize(("stage", "number"), some([("write", 1), ("write", 0), ("sync", 1), ("named", 2)]))
def test_killed_in_the_middle_of_a_write(
    executor: Executor, folder: Path, expected: list[int], tmp_path: Path, stage: str, number: int
) -> None:
    tests = Path(__file__).parent.parent
    paths = [str(one) for one in (tests, tests / "blend", tests / "engine")]
    code = _DIE.format(paths=paths, stage=stage, number=number, model=str(folder), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    left = set((tmp_path / "tmp").iterdir())
    assert bool(left) == (stage != "named")
    with on_disk(tmp_path) as store:
        said = answer(executor, store)
        assert said.tokens == expected
        assert count(store, "misses_total", reason="absent") > 0
        assert not left & set((tmp_path / "tmp").iterdir())  # what the dead left is swept
    recovers(executor, tmp_path, expected)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_payload(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def flip_header(data: bytes) -> bytes:
    return data[:30] + bytes([data[30] ^ 1]) + data[31:]


@pytest.mark.parametrize("damage", [cut, flip_payload, flip_header, lambda _data: b""])
def test_every_record_is_damaged(
    executor: Executor, expected: list[int], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    for path in fill(executor, tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    with on_disk(tmp_path) as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total") >= 3  # two documents, and the first page of the prefix
        assert count(store, "refused_total", tier="disk") >= 3
    recovers(executor, tmp_path, expected)


def test_another_models_records_under_the_same_names(executor: Executor, expected: list[int], tmp_path: Path) -> None:
    other = load_executor(write_tiny(tmp_path / "other", rope_theta=500.0), CONFIG)
    foreign, own = fill(other, tmp_path / "foreign"), fill(executor, tmp_path / "own")
    assert len(foreign) == len(own)
    by_size = {path.stat().st_size: path for path in foreign}  # each kind and length has a size of its own
    for path in own:
        path.write_bytes(by_size[path.stat().st_size].read_bytes())
    with on_disk(tmp_path / "own") as store:
        said = answer(executor, store)
        assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
        assert count(store, "misses_total", reason="identity.model") >= 3
    recovers(executor, tmp_path / "own", expected)


class Failing(FileSystem):
    """A file layer whose writes fail."""

    def __init__(self, number: int) -> None:
        self.number = number

    def write(self, fd: int, data: object) -> None:  # type: ignore[override]
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EROFS, "read_only"), (errno.EIO, "io")]
)
def test_writes_that_fail(executor: Executor, expected: list[int], tmp_path: Path, number: int, reason: str) -> None:
    with on_disk(tmp_path, Failing(number)) as store:
        for _ in range(2):  # nothing was kept, so the second run computes everything again
            said = answer(executor, store)
            assert (said.tokens, said.made, said.found) == (expected, QUILT.reused, 0)
            assert store.flush(300)
        assert count(store, "dropped_total", tier="disk", reason=reason) > 0
        assert count(store, "misses_total", reason="absent") > 0
    recovers(executor, tmp_path, expected)


@pytest.mark.privileged
def test_a_full_file_system(executor: Executor, expected: list[int], small_disk: Path) -> None:
    with on_disk(small_disk) as store:
        free = os.statvfs(small_disk)
        (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - (32 << 10)))
        said = answer(executor, store)
        assert (said.tokens, said.made) == (expected, QUILT.reused)
        assert store.flush(300)
        assert count(store, "dropped_total", tier="disk", reason="disk_full") > 0
    (small_disk / "filler").unlink()
    recovers(executor, small_disk, expected)


@pytest.mark.privileged
def test_a_read_only_file_system_with_half_of_the_records(
    executor: Executor, expected: list[int], small_disk: Path
) -> None:
    for path in fill(executor, small_disk)[::2]:
        path.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with on_disk(small_disk) as store:
        said = answer(executor, store)
        assert said.tokens == expected
        assert store.flush(300)
        assert count(store, "dropped_total", tier="disk", reason="read_only") > 0
        assert count(store, "misses_total") > 0
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    recovers(executor, small_disk, expected)
