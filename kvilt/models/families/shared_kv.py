"""Layers at the end of a model that read the keys and values of earlier ones (Gemma 3n, Gemma 4 E2B and E4B)."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import WeightError


def shared_layers(kinds: Sequence[str], shared: int, name: str) -> list[int | None]:
    """For each layer, the one whose KV it reads: the last of its kind before the `shared` last layers; None: its own.

    `name` is the field that says how many they are.
    """
    first = len(kinds) - shared
    if shared and first <= 0:
        raise WeightError(name, f"must leave layers with KV of their own; there are {len(kinds)} layers")
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := [kind for kind in kinds[first:] if kind not in last]:
        raise WeightError(name, f"{missing[0]} layers have none of their kind before them whose KV they could read")
    return [None] * first + [last[kind] for kind in kinds[first:]]
