"""How many replicas the load needs."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import time
from dataclasses import replace
from typing import Any

import pytest
from absent import skip_without

from kvilt.cli.cluster import checked_size, default_plan
from kvilt.cluster.autoscale import CALM_S, ONGOING, TARGET, decide, wanted_replicas
from kvilt.cluster.cluster_key import ClusterKey
from kvilt.cluster.door import Door
from kvilt.cluster.replica_set import ReplicaInfo
from kvilt.cluster.router import Router
from kvilt.errors import ParamError
from kvilt.server.config import ServeConfig


def test_more_replicas_come_at_once_and_fewer_after_a_calm_time() -> None:
    state: dict[str, Any] = {}
    wanted, state = decide(3.5 * TARGET, 1, state, 0.0)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, 1.0)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, CALM_S)
    assert wanted == 4
    wanted, state = decide(0.0, 4, state, 1.0 + CALM_S)
    assert wanted == 3
    wanted, state = decide(3 * TARGET, 3, state, 2.0 + CALM_S)  # busy again: the calm time begins anew
    wanted, state = decide(0.0, 3, state, 3.0 + CALM_S)
    assert wanted == 3
    wanted, _ = decide(0.0, 1, {}, 1e9)
    assert wanted == 1


@pytest.mark.slow  # the long suite has Ray
def test_ray_does_not_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray wraps a policy with delays of its own, and forgets a decision that was not made again in all that time."""
    if importlib.util.find_spec("ray") is None:
        skip_without("ray")
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingContext

    from kvilt.cluster.ray_serve import autoscaling

    config = autoscaling(replace(default_plan(), replicas=1, least=1, most=2))
    state: dict[str, Any] = {}

    def decided(ongoing: float, replicas: int, now_s: float) -> int:
        given: dict[str, Any] = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
        given |= {"config": config, "policy_state": dict(state), "aggregated_metrics": {ONGOING: {"one": ongoing}}}
        given |= {"current_num_replicas": replicas, "target_num_replicas": replicas}
        given |= {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 2}
        monkeypatch.setattr(time, "time", lambda: now_s)
        policy: Any = _apply_autoscaling_config(wanted_replicas)
        wanted, found = policy(AutoscalingContext(**given))
        state.clear()
        state.update(found)
        return int(wanted)

    assert decided(2 * TARGET, 1, 0.0) == 2
    assert decided(0.0, 2, 1.0) == 2
    assert decided(0.0, 2, 2.0 + CALM_S) == 1


async def _parts(waiting: int) -> float:
    door = Door(ServeConfig(), Router(), None, ClusterKey.new())
    async with door:
        for name in ("a", "b", "p"):
            endpoint = "tcp://127.0.0.1:9"
            door.replicas.announce(ReplicaInfo(name, "http://", endpoint, endpoint, 32, 1, prefill_only=name == "p"))
        for _ in range(1 + waiting):  # one of them begins
            door.queue.enter("key", 1.0, lambda: None)
        return door.unsent()


def test_requests_that_wait_are_those_of_replicas_that_answer() -> None:
    assert asyncio.run(_parts(6)) == 3.0


def test_numbers_of_replicas_fit_each_other() -> None:
    assert checked_size()["replicas"] == 2
    assert checked_size(least=1, most=4) == {
        "replicas": 1,
        "least": 1,
        "most": 4,
        "prefill_replicas": 0,
        "doors": 1,
    }
    for wrong in ({"least": 2}, {"most": 2}, {"least": 3, "most": 2}, {"replicas": 2, "least": 1, "most": 2}):
        with pytest.raises(ParamError):
            checked_size(**wrong)
