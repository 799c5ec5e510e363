"""Whether two paths lead to the same model files, told without reading the weights. Knows no format."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_READ = (".gguf", ".safetensors", ".json", ".jinja", ".model")  # what a model is loaded from


def file_identity(path: str | os.PathLike[str]) -> str:
    """The identity of a model's file or folder: its real path, and the name, size and time of each of its files.

    Two processes get the same identity exactly if they would read the same unchanged files.
    """
    real = Path(path).resolve(strict=True)
    files = [real] if real.is_file() else sorted(one for one in real.iterdir() if one.suffix in _READ)
    digest = hashlib.sha256(os.fsencode(real))
    for file in files:
        stat = file.stat()
        digest.update(b"\0" + os.fsencode(file.name) + f"\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()
