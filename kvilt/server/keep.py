"""KV of finished answers, kept as handles of whoever asked."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..engine.handles import HandleInfo
from ..llm import Completion
from .service import Service


def handle_of(info: HandleInfo) -> dict[str, Any]:
    """A handle as clients see it."""
    return dataclasses.asdict(info)


async def keep(service: Service, done: Completion, tenant: str) -> dict[int, dict[str, Any]]:
    """A handle for each sample of a completion, as a field of its choice; takes the KV over."""
    caches = {i: sample.kv for i, sample in enumerate((done, *done.alternatives)) if sample.kv is not None}
    kept = {}
    try:
        for index in list(caches):
            info = await service.llm.kv.keep(caches.pop(index), tenant=tenant)
            kept[index] = {"kv": handle_of(info)}
    finally:
        for kv in caches.values():
            kv.close()
    return kept
