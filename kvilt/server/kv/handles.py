"""KV handles as clients see them, and the folder that their KV is saved in."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...engine.handles.handles import HandleInfo
from ...kv.file import sweep
from ...kv.owner import owner_of
from ...llm import AsyncLLM, Completion
from ..auth import Caller
from ..config import ServeConfig
from ..http.errors import HTTPError


def handle_json(info: HandleInfo) -> dict[str, Any]:
    """A handle as JSON."""
    return dataclasses.asdict(info)


async def keep_kv(llm: AsyncLLM, done: Completion, tenant: str) -> dict[int, dict[str, Any]]:
    """Make a handle for each sample of a completion, as a field of its choice. Takes ownership of the KV."""
    caches = {i: sample.kv for i, sample in enumerate((done, *done.alternatives)) if sample.kv is not None}
    kept = {}
    try:
        for index in list(caches):
            info = await llm.kv.keep(caches.pop(index), tenant=tenant)
            kept[index] = {"kv": handle_json(info)}
    finally:
        for kv in caches.values():
            kv.close()
    return kept


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_ENDING = ".kvilt"
_HASH = "[0-9a-f]{32}"
_SAVED = rf"\.(open|{_HASH})(\.{_HASH})?\.{_NAME.pattern}{re.escape(_ENDING)}\."  # before a temporary file's own name
_log = logging.getLogger(__name__)


def sweep_saved(config: ServeConfig) -> None:
    """Remove unfinished files of a server that was killed while saving; called when a server starts."""
    if config.kv_dir is not None and (count := sweep(config.kv_dir, _SAVED)):
        _log.warning("removed %d unfinished files of a server that was killed from the folder of saved KV", count)


class SavedKVFolder:
    """The saved files of one key and cache salt; the limits are for the whole key.

    Paths are made from checked names only.
    """

    def __init__(self, config: ServeConfig, caller: Caller) -> None:
        if config.kv_dir is None:
            raise HTTPError(
                400, "this server saves no KV; its owner can name a folder with --kv-dir", code="kv_dir_off"
            )
        self._folder = config.kv_dir
        self._most, self._most_bytes = config.max_saved, config.max_saved_bytes
        owner = owner_of(caller.tenant)
        part = caller.tenant[len(owner) + 1 :]
        self._owner = f"{owner or 'open'}."
        self._prefix = f"{self._owner}{part}." if part else self._owner  # names have no dots

    def place(self, name: str) -> Path:
        """The path to write a file to; refused over the limits of the key."""
        path = self._path(name)
        others = self._saved()
        others.pop(path.name, None)
        if len(others) >= self._most:
            raise HTTPError(409, f"{self._most} files are saved and no more are allowed; delete some", code="kv_limit")
        if sum(others.values()) >= self._most_bytes:
            raise HTTPError(409, f"saved files have {self._most_bytes} bytes or more; delete some", code="kv_limit")
        self._folder.mkdir(parents=True, exist_ok=True)
        return path

    def find(self, name: str) -> Path:
        """The path of a saved file; only a regular file is accepted."""
        path = self._path(name)
        if path.is_symlink() or not path.is_file():
            raise HTTPError(404, f"nothing was saved as {name!r}", param="name", code="kv_file_not_found")
        return path

    def files(self) -> dict[str, int]:
        """Every name and its size in bytes."""
        sizes = self._saved()
        names = {file: file[len(self._prefix) : -len(_ENDING)] for file in sizes if file.startswith(self._prefix)}
        return {name: sizes[file] for file, name in sorted(names.items()) if _NAME.fullmatch(name)}

    def delete(self, name: str) -> None:
        """Remove a file."""
        self.find(name).unlink(missing_ok=True)

    def _saved(self) -> dict[str, int]:
        """Every file of the key, of all salts, and its size in bytes."""
        sizes: dict[str, int] = {}
        if self._folder.is_dir():
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.startswith(self._owner) and entry.name.endswith(_ENDING):
                        with suppress(FileNotFoundError):
                            if entry.is_file(follow_symlinks=False):
                                sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise HTTPError(400, "name: use up to 100 letters, digits, - and _", param="name", code="bad_name")
        return self._folder / f"{self._prefix}{name}{_ENDING}"
