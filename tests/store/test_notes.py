"""Notes of handles: whole or not there, read by whom they are for, and nobody who changes a handle waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvilt.errors import BlobError
from kvilt.store.counters import new_metrics
from kvilt.store.disk import Disk
from kvilt.store.files import FileSystem
from kvilt.store.note import HandleNote, pack_note, read_note
from kvilt.store.notes import HandleNotes
from kvilt.store.tier import Budget

NOW = 1_000.0
FIRST, SECOND = "0" * 32, "f" * 32
SECRET = b"sixteen bytes or more"


def note(name: str = FIRST, tokens: int = 5, expires_s: float = NOW + 60, used_s: float = NOW) -> HandleNote:
    return HandleNote(name, "owner", array("q", range(tokens)), "base", expires_s, None, used_s)


class Book:
    """What is known of handles, and the notes of it in a folder."""

    def __init__(self, folder: Path, model: str = "weights-1", **options: Any) -> None:
        self.metrics = new_metrics()
        (folder / "tmp").mkdir(exist_ok=True)
        given = {"most_bytes": 1 << 20, "rest_s": 0.01, "close_s": 300.0, "clock": lambda: NOW, **options}
        self.notes = HandleNotes(folder, model, self.metrics, **given)
        self.known = {one.name: one for one in self.notes.read()}
        self.notes.attach(self.known.get)

    def put(self, *notes: HandleNote) -> None:
        for one in notes:
            self.known[one.name] = one
            self.notes.mark(one.name)

    def forget(self, name: str) -> None:
        del self.known[name]
        self.notes.mark(name)

    def count(self, name: str, **labels: str) -> float:
        series = self.metrics.snapshot()[f"kvilt_store_{name}_total"]["series"]
        return sum(one["value"] for one in series if {"tier": "notes", **labels}.items() <= one["labels"].items())


def files(folder: Path) -> list[Path]:
    return sorted((folder / "notes").iterdir())


def written(folder: Path, *notes: HandleNote, **options: Any) -> list[Path]:
    """Notes that a process before left behind."""
    book = Book(folder, **options)
    book.put(*notes)
    book.notes.close()
    return files(folder)


# Bytes.

times = st.floats(-1e300, 1e300)
texts = st.text(max_size=20)


@given(
    texts,
    st.lists(st.integers(0, 2**62), max_size=40),
    texts,
    times,
    st.none() | times,
    st.none() | st.binary(min_size=16, max_size=20),
)
def test_a_note_comes_back_as_it_was(
    owner: str, tokens: list[int], maker: str, expires_s: float, pinned_s: float | None, secret: bytes | None
) -> None:
    made = HandleNote(FIRST, owner, array("q", tokens), maker, expires_s, pinned_s, NOW)
    assert read_note(b"".join(pack_note(made, "m", secret)), FIRST, "m", secret) == made


@pytest.mark.parametrize("secret", [None, SECRET])
def test_no_byte_can_change_be_missing_or_be_added(secret: bytes | None) -> None:
    data = b"".join(pack_note(note(), "m", secret))
    for at in range(len(data)):
        bent = bytearray(data)
        bent[at] ^= 1 << at % 8
        for wrong in (bytes(bent), data[:at]):
            with pytest.raises(BlobError):
                read_note(wrong, FIRST, "m", secret)
    with pytest.raises(BlobError, match="seal"):
        read_note(data + bytes(8), FIRST, "m", secret)


def test_a_note_is_of_one_handle_of_one_model_and_sealed_with_one_secret() -> None:
    data = b"".join(pack_note(note(), "m", SECRET))
    for name, model, secret, field in (
        (SECOND, "m", SECRET, "name"),
        (FIRST, "other", SECRET, "model"),
        (FIRST, "m", None, "seal"),
        (FIRST, "m", SECRET + b"!", "seal"),
    ):
        with pytest.raises(BlobError, match=field):
            read_note(data, name, model, secret)


# A folder.


def test_the_next_process_reads_what_was_known_at_the_end(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.put(note(FIRST, used_s=2), note(SECOND, used_s=1))
    assert book.notes.flush()
    book.put(note(FIRST, tokens=3, used_s=3))
    book.notes.close()
    again = Book(tmp_path)
    assert list(again.known.values()) == [note(SECOND, used_s=1), note(FIRST, tokens=3, used_s=3)]
    again.forget(SECOND)
    again.notes.close()
    assert list(Book(tmp_path).known) == [FIRST]
    assert book.count("written") == 3
    assert [path.stat().st_mode & 0o777 for path in files(tmp_path)] == [0o600]
    assert (tmp_path / "notes").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nothing_that_happens_after_the_end_is_written(tmp_path: Path) -> None:
    """Whoever closes forgets all handles, and they are to be known again."""
    book = Book(tmp_path)
    book.put(note())
    book.notes.close()
    book.forget(FIRST)
    book.notes.close()
    assert list(Book(tmp_path).known) == [FIRST]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "size"),
        (lambda data: data[:-1], "seal"),
        (lambda data: data[:40], "size"),
        (lambda data: data[:60], "header"),
        (lambda data: b"x" + data[1:], "magic"),
        (lambda data: data[:8] + b"\x02" + data[9:], "version"),
        (lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:], "header"),
        (lambda data: data[:-40] + bytes(8) + data[-32:], "seal"),
    ],
)
def test_damage_is_counted_and_costs_that_handle_alone(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    broken, _ = written(tmp_path, note(FIRST), note(SECOND))
    broken.write_bytes(change(broken.read_bytes()))
    book = Book(tmp_path)
    assert list(book.known) == [SECOND]
    assert book.count("refused") == book.count("refused", reason=reason) == 1
    assert Book(tmp_path).count("refused") == 0, "it was removed"


def test_a_note_under_another_name_is_refused(tmp_path: Path) -> None:
    (path,) = written(tmp_path, note())
    path.rename(path.with_name(path.name.replace(FIRST, SECOND)))
    book = Book(tmp_path)
    assert book.known == {}
    assert book.count("refused", reason="name") == 1


def test_links_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (path,) = written(tmp_path, note())
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    for name in ("README", "x.note", f"{path.name[:16]}.short.note"):
        (tmp_path / "notes" / name).write_text("mine")
    (tmp_path / "notes" / f"{path.name[:16]}.{SECOND}.note").mkdir()
    book = Book(tmp_path)
    assert book.known == {}
    assert book.count("refused", reason="symlink") == 2
    assert len(files(tmp_path)) == 5
    assert moved.exists()


def test_other_models_and_secrets_do_not_see_notes_and_sweep_only_those_whose_time_is_over(tmp_path: Path) -> None:
    written(tmp_path, note(FIRST), note(SECOND, expires_s=NOW - 1))
    for options in ({"model": "weights-2"}, {"secret": SECRET}):
        book = Book(tmp_path, **options)
        assert book.known == {}
        assert book.count("refused") == 0
    assert list(Book(tmp_path).known) == [FIRST]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_store_notes_beside_its_disk_and_under_its_secret(kit: Any, tmp_path: Path, secret: bytes | None) -> None:
    with kit.store(kit.disk(tmp_path), secret=secret) as store:
        notes = store.notes("weights-1")
        assert notes is not None
        notes.attach(lambda _: note())
        notes.mark(FIRST)
        notes.close()
        assert kit.count(store, "written_total", tier="notes") == 1
    assert list(Book(tmp_path, secret=secret).known) == [FIRST]
    assert Book(tmp_path, secret=b"another" + SECRET).known == {}
    with kit.store(memory=Budget(1 << 20)) as store:
        assert store.notes("weights-1") is None


# Disks that fail, or are slow.


class Failing(FileSystem):
    """Fails with a number, until it is None."""

    def __init__(self, number: int | None, verb: str) -> None:
        self.number, self.verb = number, verb

    def _fail(self, verb: str) -> None:
        if self.number is not None and verb == self.verb:
            raise OSError(self.number, os.strerror(self.number))

    def sync(self, fd: int) -> None:
        self._fail("sync")
        super().sync(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytearray:
        self._fail("pread")
        return super().pread(fd, size, offset)


@pytest.mark.parametrize(("number", "reason"), [(28, "disk_full"), (30, "read_only"), (5, "io")])
def test_a_disk_that_fails_is_tried_again_and_leaves_nothing_that_is_no_longer_so(
    kit: Any, tmp_path: Path, number: int, reason: str
) -> None:
    disk = Failing(None, "sync")
    book = Book(tmp_path, files=disk)
    book.put(note(tokens=9))
    assert book.notes.flush()
    disk.number = number
    book.put(note(tokens=4))
    assert not book.notes.flush()
    kit.until(lambda: book.count("dropped", reason=reason) > 1)
    assert files(tmp_path) == [], "a longer text than the handle names would be worse than none"
    disk.number = None
    kit.until(book.notes.flush)
    assert list(Book(tmp_path).known.values()) == [note(tokens=4)]
    book.notes.close()


def test_a_disk_that_cannot_be_read_costs_the_notes_and_keeps_them(tmp_path: Path) -> None:
    written(tmp_path, note())
    book = Book(tmp_path, files=Failing(5, "pread"))
    assert book.known == {}
    assert book.count("refused", reason="io") == 1
    assert list(Book(tmp_path).known) == [FIRST]


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_cannot_be_costs_the_notes_alone(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "notes").write_text("a file")
    book = Book(tmp_path)
    (tmp_path / "tmp").rmdir()
    book.put(note())
    book.notes.close()
    assert book.count("dropped", reason="io") >= 1
    assert book.count("refused") == there


def test_notes_have_a_budget_that_other_models_share(tmp_path: Path) -> None:
    (path,) = written(tmp_path, note(), model="weights-2")
    book = Book(tmp_path, most_bytes=2 * path.stat().st_size + 10)
    book.put(note())
    assert book.notes.flush()
    book.put(note(SECOND), note(FIRST, tokens=20))
    assert book.notes.flush()
    assert book.count("dropped", reason="too_large") == 2
    assert len(files(tmp_path)) == 1
    book.put(note(SECOND))
    book.notes.close()
    assert list(Book(tmp_path).known) == [SECOND]


class Slow(FileSystem):
    """Waits at a gate before each write."""

    def __init__(self) -> None:
        self.gate, self.waits = threading.Event(), threading.Event()

    def sync(self, fd: int) -> None:
        self.waits.set()
        self.gate.wait()
        super().sync(fd)


def test_marks_wait_for_nothing_and_only_the_last_word_is_written(tmp_path: Path) -> None:
    disk = Slow()
    book = Book(tmp_path, files=disk)
    book.put(note(SECOND))
    disk.waits.wait()
    for tokens in range(1, 100):
        book.put(note(tokens=tokens))
    assert not book.notes.flush(0.001)
    disk.gate.set()
    assert book.notes.flush()
    assert book.count("written") == 2
    assert Book(tmp_path).known[FIRST] == note(tokens=99)


def test_a_disk_that_is_too_slow_at_the_end_takes_no_forgetting_for_a_delete(tmp_path: Path) -> None:
    written(tmp_path, note(FIRST), note(SECOND))
    disk = Slow()
    book = Book(tmp_path, files=disk, close_s=0.01)
    book.put(note(FIRST), note(SECOND))
    disk.waits.wait()
    book.notes.close()  # the first write still waits, the second is not begun
    book.known.clear()
    disk.gate.set()
    assert book.notes._thread is not None
    book.notes._thread.join()
    assert sorted(Book(tmp_path).known) == [FIRST, SECOND]


DYING = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_notes import Book, note
from kvilt.store.files import FileSystem

class Dying(FileSystem):
    def write(self, fd, data):
        if {stage!r} == "write":
            super().write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(fd, data)
    def sync_folder(self, folder):
        os.kill(os.getpid(), signal.SIGKILL)

book = Book(Path({folder!r}), files=Dying())
book.put(note(tokens=7))
book.notes.flush()
"""


@pytest.mark.parametrize(("stage", "tokens"), [("write", 5), ("named", 7)])
def test_a_kill_in_the_middle_of_a_write_leaves_the_note_before_it_or_the_new_one(
    tmp_path: Path, stage: str, tokens: int
) -> None:
    written(tmp_path, note(tokens=5))
    script = DYING.format(path=[str(Path(__file__).parent), *sys.path], stage=stage, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert list(Book(tmp_path).known.values()) == [note(tokens=tokens)]
    Disk(tmp_path, Budget(1 << 20)).close()
    assert list((tmp_path / "tmp").iterdir()) == [], "the disk sweeps what is left of a write"
