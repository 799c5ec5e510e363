"""Out of memory on a device as an error of ours, which says what was asked and what is free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import DeviceMemoryError

_ASKED = re.compile(r"allocate (?P<count>[\d.]+) (?P<unit>[KMG]?i?B|bytes)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@contextmanager
def device_memory(what: str, device: torch.device) -> Iterator[None]:
    """While `what` is done: torch's error becomes a `DeviceMemoryError`, and what torch holds unused is given back."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = asked_bytes(str(error))
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceMemoryError(what, asked, free, total) from None


def asked_bytes(message: str) -> int | None:
    """How much torch tried to allocate, by its own words; None where they changed."""
    found = _ASKED.search(message)
    unit = _UNITS.get(found["unit"]) if found else None
    return None if found is None or unit is None else int(float(found["count"]) * unit)
