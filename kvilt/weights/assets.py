"""The files of an adapter, wherever they are: a path, an open file, or bytes in memory.

Refuses to know what is in them beyond the mark that tells a GGUF file from others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any

from ..errors import InputError, ParamError
from .gguf_lora import GGUFAdapter, is_gguf, open_gguf_lora, open_gguf_lora_bytes
from .peft import CONFIG, WEIGHTS, PeftFolder, open_peft, open_peft_files

FileLike = str | os.PathLike[str] | bytes | IO[bytes]
_GGUF = b"GGUF"
_SINGLE = ""  # the name of a file that is not one of a folder's


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """Where an adapter is read from, as often as it has to be: a path, or bytes that are kept in memory."""

    path: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    name: str | None = None  # what the files call themselves

    @classmethod
    def of(cls, assets: AssetsLike, limit_bytes: int) -> ModelAssets:
        """Assets from what a caller has. An open file is read to its end now, so it may be closed afterwards."""
        if isinstance(assets, ModelAssets):
            return assets
        if isinstance(assets, str | os.PathLike):
            path = Path(assets).absolute()
            return cls(path, name=path.stem if is_gguf(path) else path.name)
        if isinstance(assets, Mapping):
            return cls(files={str(name): _bytes_of(file, limit_bytes) for name, file in assets.items()})
        data = _bytes_of(assets, limit_bytes)
        if data[: len(_GGUF)] != _GGUF:
            raise InputError(
                f"one file is no adapter unless it is a GGUF file; give {{{CONFIG!r}: ..., {WEIGHTS!r}: ...}} or a path"
            )
        said = getattr(assets, "name", None)
        return cls(files={_SINGLE: data}, name=PurePath(said).stem if isinstance(said, str) else None)

    def open(self, inside: Path | None = None) -> PeftFolder | GGUFAdapter:
        """Open the adapter. With `inside`, all of it must really lie there, whatever links say."""
        if self.path is not None:
            return open_gguf_lora(self.path, inside) if is_gguf(self.path) else open_peft(self.path, inside)
        if _SINGLE in self.files:
            return open_gguf_lora_bytes(self.files[_SINGLE])
        return open_peft_files(self.files)


# What a caller may give: a folder or a file, or the files of a folder by their names.
AssetsLike = ModelAssets | FileLike | Mapping[str, FileLike]


def _bytes_of(file: Any, limit_bytes: int) -> bytes:
    """All bytes of a file, unless they are more than an adapter may have."""
    if isinstance(file, str | os.PathLike):
        with Path(file).open("rb") as opened:
            return _bytes_of(opened, limit_bytes)
    if isinstance(file, bytes | bytearray | memoryview):
        data = bytes(file)
    elif callable(getattr(file, "read", None)):
        data = file.read(limit_bytes + 1)
        if not isinstance(data, bytes):
            raise InputError("an adapter's file must be opened for bytes: open(path, 'rb')")
    else:
        raise InputError(
            f"an adapter is a path, an open file, bytes or a mapping of its files, not a {type(file).__name__}"
        )
    if len(data) > limit_bytes:
        raise ParamError("lora_memory", f"a file of the adapter has more than the {limit_bytes} bytes that are allowed")
    return data
