"""Files that are whole or as they were: what is written appears under its name only when all of it is on the disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, or raise and leave what was there, without a trace."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
        try:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
            Path(out.name).replace(path)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
