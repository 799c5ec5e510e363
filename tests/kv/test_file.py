"""What a killed writer leaves is swept; what a writer still needs, and what is not ours, is not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvilt.kv import file
from kvilt.kv.file import create_temporary, sweep, write_whole

# The module alone: a child that imports everything takes seconds.
_DYING = """
import importlib.util, os, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("file", sys.argv[1])
file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(file)
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
file.write_whole(Path(sys.argv[2]), b"private" * 1000)
"""


def killed_while_writing(path: Path) -> Path:
    """The temporary file of a child that was killed in the middle of a write."""
    before = set(path.parent.iterdir())
    done = subprocess.run([sys.executable, "-c", _DYING, file.__file__, str(path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (left,) = set(path.parent.iterdir()) - before
    return left


def test_a_killed_writer_leaves_a_private_file_that_the_next_one_sweeps(tmp_path: Path) -> None:
    left = killed_while_writing(tmp_path / "a.kv")
    assert left.stat().st_size == 7000
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    other = killed_while_writing(tmp_path / "b.kv")
    write_whole(tmp_path / "a.kv", b"new")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.kv", other]), "only leftovers of the same file"
    assert stat.S_IMODE((tmp_path / "a.kv").stat().st_mode) == 0o600


def test_only_files_of_dead_writers_are_swept(tmp_path: Path) -> None:
    left = killed_while_writing(tmp_path / "a.kv")
    fd, living = create_temporary(tmp_path, ".a.kv.")
    mine = [
        tmp_path / name for name in ("a.kv", ".a.kv.tmp", f".a.kv.{'0' * 31}.tmp", f".b.kv.{'0' * 32}.tmp", "c.tmp")
    ]
    for path in mine:
        path.write_bytes(b"not a temporary file")
    (tmp_path / f".a.kv.{'1' * 32}.tmp").symlink_to(mine[0])
    os.mkfifo(tmp_path / f".a.kv.{'2' * 32}.tmp")
    try:
        assert sweep(tmp_path, r"\.a\.kv\.") == 2, "the file, and the pipe, which has no writer either"
        assert not left.exists()
        assert living.exists(), "its writer lives"
        assert all(path.exists() for path in mine)
        assert (tmp_path / f".a.kv.{'1' * 32}.tmp").is_symlink()
    finally:
        os.close(fd)
    assert sweep(tmp_path, r"\.a\.kv\.") == 1
    assert not living.exists()


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment between the making of a file and its lock: a sweep in it costs the writer a second attempt."""
    real, swept = os.open, []

    def open_and_be_swept(path: Path, flags: int, *mode: int) -> int:
        fd = real(path, flags, *mode)
        if flags & os.O_CREAT and not swept:
            swept.append(sweep(tmp_path, r"\.a\."))
        return fd

    monkeypatch.setattr(os, "open", open_and_be_swept)
    write_whole(tmp_path / "a", b"whole")
    assert swept == [1]
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_read_is_not_swept(tmp_path: Path) -> None:
    assert sweep(tmp_path / "nowhere") == 0
