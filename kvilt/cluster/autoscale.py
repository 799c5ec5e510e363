"""How many replicas a cluster should have, from the requests that they have and that wait for them at doors."""

from __future__ import annotations

import math
import time
from typing import Any

ONGOING = "ongoing"  # the metric of a replica
TARGET = 8.0  # requests of one replica at once; with more there should be another replica
CALM_S = 60.0  # fewer replicas are wanted for so long before one is stopped


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray Serve's policy: the number of replicas, and what it should be given the next time."""
    found = (context.aggregated_metrics or {}).get(ONGOING, {})
    return decide(sum(found.values()), context.target_num_replicas, dict(context.policy_state or {}), time.time())


def decide(ongoing: float, replicas: int, state: dict[str, Any], now_s: float) -> tuple[int, dict[str, Any]]:
    """As many replicas as there are requests for; fewer than now only after a calm time, and one at a time."""
    wanted = max(1, math.ceil(ongoing / TARGET))
    if wanted >= replicas:
        return wanted, {**state, "calm_since_s": None}
    since_s = state.get("calm_since_s")
    if since_s is None:
        return replicas, {**state, "calm_since_s": now_s}
    if now_s - since_s < CALM_S:
        return replicas, state
    return replicas - 1, {**state, "calm_since_s": now_s}
