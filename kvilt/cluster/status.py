"""What a cluster looks like from its door: replicas with their KV and loads, and how busy they are."""

from __future__ import annotations

import os
from typing import Any

from .replica_set import ReplicaSet
from .router import Router


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
