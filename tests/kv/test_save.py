"""A saved cache is a complete file or none: nothing half written, nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvilt.errors import CacheClosed
from kvilt.kv.cache import KVCache


@pytest.fixture
def cache(scribe: Any) -> Iterator[KVCache]:
    kv, _ = scribe.grown(scribe.pool(), range(9))
    with kv:
        yield kv


def test_a_saved_cache_is_its_bytes_and_nothing_else_is_left(cache: KVCache, tmp_path: Path) -> None:
    cache.save(tmp_path / "a.kv")
    assert (tmp_path / "a.kv").read_bytes() == cache.serialize()
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]


def test_saving_again_replaces_the_file(cache: KVCache, tmp_path: Path) -> None:
    path = str(tmp_path / "a.kv")
    cache.save(path)
    cache.truncate(3)
    cache.save(path)
    assert Path(path).read_bytes() == cache.serialize()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("place", ["os.fsync", "os.replace", "kvilt.kv.cache.pack"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
@pytest.mark.parametrize("old", [b"what was there", None], ids=["over a file", "new"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, old: bytes | None
) -> None:
    path = tmp_path / "a.kv"
    if old is not None:
        path.write_bytes(old)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(place, fail)
    with pytest.raises(type(error)):
        cache.save(path)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else ["a.kv"])
    assert old is None or path.read_bytes() == old


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_os_error_and_leaves_nothing(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file is real, but its bytes go to a device without room, so the error comes from the system."""
    monkeypatch.setattr(os, "open", _open_full(os.open))
    with pytest.raises(OSError, match="space"):
        cache.save(tmp_path / "a.kv")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def _open_full(really: Any) -> Any:
    def opened(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        os.close(really(path, flags, mode, **more))
        return really("/dev/full", os.O_RDWR)

    return opened


def test_a_missing_folder_is_an_os_error(cache: KVCache, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "nowhere" / "a.kv")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_file_is_an_os_error(cache: KVCache, tmp_path: Path) -> None:
    (tmp_path / "a.kv").mkdir()
    with pytest.raises(OSError):
        cache.save(tmp_path / "a.kv")
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]


def test_a_folder_without_write_permission_is_an_os_error(
    cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By permission bits, and, because root may write anywhere, by an open that is refused as on a read-only disk."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:

        def refuse(path: Any, *_: Any, **__: Any) -> int:
            raise OSError(errno.EROFS, "read-only file system", str(path))

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError):
        cache.save(folder / "a.kv")
    monkeypatch.undo()
    folder.chmod(0o700)
    assert list(folder.iterdir()) == []


def test_a_closed_cache_saves_nothing(cache: KVCache, tmp_path: Path) -> None:
    cache.close()
    with pytest.raises(CacheClosed):
        cache.save(tmp_path / "a.kv")
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_leave_one_whole_cache(scribe: Any, tmp_path: Path) -> None:
    pool = scribe.pool()
    caches = [scribe.grown(pool, range(length))[0] for length in (5, 50)]
    blobs = [cache.serialize() for cache in caches]
    path, seen = tmp_path / "a.kv", []
    caches[0].save(path)

    def write(cache: KVCache) -> None:
        for _ in range(20):
            cache.save(path)

    writers = [threading.Thread(target=write, args=(cache,)) for cache in caches]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.append(path.read_bytes())
    assert all(data in blobs for data in seen)
    assert path.read_bytes() in blobs
    assert [p.name for p in tmp_path.iterdir()] == ["a.kv"]
    for cache in caches:
        cache.close()
