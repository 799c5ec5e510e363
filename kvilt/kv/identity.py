"""What made KV: everything besides the exact tokens that decides its bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """KV may stand in for a computation only where all of this agrees, and the tokens do."""

    model: str  # fingerprint of weights and rope
    numerics: str  # backend, instruction set, kernel revision
    adapter: str = "base"  # content hash and scale, or base
    origin: str = "exact"  # exact, or the recipe of a blend
    salt: str = ""  # tenant
