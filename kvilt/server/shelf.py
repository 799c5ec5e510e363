"""Saved KV: files of one folder under names that are safe, each key's apart from every other's."""

from __future__ import annotations

import re
from pathlib import Path

from .gate import Caller
from .refusal import Refused
from .settings import ServeConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_ENDING = ".kvilt"


class Shelf:
    """The files of one key. No path is ever made from anything but a checked name."""

    def __init__(self, config: ServeConfig, caller: Caller) -> None:
        if config.kv_dir is None:
            raise Refused(400, "this server saves no KV; its owner can name a folder with --kv-dir", code="kv_dir_off")
        self._folder = config.kv_dir
        self._most = config.max_saved
        self._prefix = f"{caller.tenant or 'open'}."

    def place(self, name: str) -> Path:
        """Where a file is written; refuses one more than a key may have."""
        path = self._path(name)
        if not path.exists() and len(self.files()) >= self._most:
            raise Refused(409, f"{self._most} files are saved and no more are allowed; delete some", code="kv_limit")
        self._folder.mkdir(parents=True, exist_ok=True)
        return path

    def find(self, name: str) -> Path:
        """Where a file is read; only a plain file counts."""
        path = self._path(name)
        if path.is_symlink() or not path.is_file():
            raise Refused(404, f"nothing was saved as {name!r}", param="name", code="kv_file_not_found")
        return path

    def files(self) -> dict[str, int]:
        """Every name and its size in bytes."""
        if not self._folder.is_dir():
            return {}
        mine = sorted(self._folder.glob(f"{self._prefix}*{_ENDING}"))
        return {path.name[len(self._prefix) : -len(_ENDING)]: path.stat().st_size for path in mine if path.is_file()}

    def delete(self, name: str) -> None:
        """Remove a file."""
        self.find(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise Refused(400, "name: use up to 100 letters, digits, - and _", param="name", code="bad_name")
        return self._folder / f"{self._prefix}{name}{_ENDING}"
