"""What a cluster looks like from its door: replicas with their KV and loads, and their metrics under one roof."""

from __future__ import annotations

import os
import re
from typing import Any

from .replica_set import ReplicaSet
from .router import Router

_SERIES = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def cluster_status(router: Router, replicas: ReplicaSet, retries: int) -> dict[str, Any]:
    """Replicas, what they hold, and how busy they are."""
    load = router.load()
    shown = []
    for info in replicas.all():
        backlog, speed = load.get(info.name, (0.0, 0.0))
        shown.append(
            {
                "name": info.name,
                "pid": info.pid,
                "url": info.url,
                "prefix_blocks": router.known(info.name),
                "kv_used": round(info.kv_used, 4),
                "hit_rate": round(info.hit_rate, 4),
                "backlog_tokens": round(backlog),
                "prefill_tokens_per_s": round(speed),
                "adapters": sorted(info.adapters),
                "version": info.version,
                "prefill_only": info.prefill_only,
            }
        )
    transfers = router.transfers
    return {
        "object": "cluster",
        "replicas": shown,
        "block_tokens": router.config.block_tokens,
        "retries": retries,
        "transfers": {"count": transfers.count, "failed": transfers.failed, "bytes": transfers.moved_bytes},
        "door_pid": os.getpid(),
    }


def labelled(text: str, replica: str) -> str:
    """Metrics in the Prometheus format, each with the label `replica`; without their comments, which would repeat."""
    lines = []
    for line in text.splitlines():
        found = None if line.startswith("#") else _SERIES.fullmatch(line)
        if found is not None:
            labels = ",".join(filter(None, (found["labels"], f'replica="{replica}"')))
            lines.append(f"{found['name']}{{{labels}}} {found['value']}\n")
    return "".join(lines)
