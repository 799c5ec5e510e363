"""How one tensor is stored: the name of its format and the bytes it takes. What a listing needs, without any data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorStorage:
    """A tensor's storage, as its file's header says."""

    format: str
    nbytes: int
