"""A cluster on Ray: engine replicas as a Ray Serve deployment, and the door as an actor that listens itself.

Ray Serve starts replicas, checks their health and replaces those that die. Requests do not pass through it: the door
has the server's own limits on connections, and streams from replicas over HTTP on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from ..config import without_ray_telemetry
from ..errors import KviltError
from ..executor.load import PAGE_TOKENS
from ..llm.build import load_tokenizer
from ..server.config import ServeConfig
from .autoscale import ONGOING, wanted_replicas
from .cluster_key import ClusterKey
from .door import Door
from .listener import DoorServer
from .replica import OnReady, ReplicaThread
from .replica_set import ANNOUNCE_S, ReplicaInfo
from .router import Router, RouterConfig
from .status import cluster_status

_log = logging.getLogger(__name__)
NAMESPACE, DOOR, APPLICATION, PREFILL = "kvilt", "kvilt-door", "kvilt", "kvilt-prefill"
_OBJECT_STORE_BYTES = 100 << 20  # nothing large goes through it
_START_S = 600.0
_SPREAD_CPUS = 0.01  # of each replica: Ray spreads actors over nodes only if they need something


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What `kvilt cluster up` starts."""

    model: str
    config: ServeConfig  # of the door
    start: Callable[[str, OnReady], None]  # serves a replica at this host, in the thread that calls it
    replicas: int = 2  # at the start
    least: int | None = None  # with `most`: the number of replicas follows the load
    most: int | None = None
    prefill_replicas: int = 0  # besides them: they compute prompts for the others
    doors: int = 1  # at ports one after the other
    weights: Mapping[str, float] = field(default_factory=dict)  # of API keys, by tenant
    gpus: float = 0.0  # of each replica
    local: bool = True  # all of it is on this machine, and listens on loopback
    key: ClusterKey = field(default_factory=ClusterKey.new)


@dataclass(frozen=True, slots=True)
class DoorPlan:
    """What one door of a cluster needs."""

    config: ServeConfig
    model: str
    key: ClusterKey
    doors: int = 1
    weights: Mapping[str, float] = field(default_factory=dict)


class EngineReplica:
    """One replica, as Ray Serve runs it."""

    def __init__(self, plan: ClusterPlan, prefill_only: bool = False) -> None:
        self._plan = plan
        self._waiting = 0.0  # this replica's part of the requests that wait at doors
        here: Any = ray.util  # its functions have no types
        host = "127.0.0.1" if plan.local else here.get_node_ip_address()
        key: ClusterKey = ray.get(find_door(plan).cluster_key.remote())  # a door that was there before has another one
        self._replica = ReplicaThread(partial(plan.start, host), key, prefill_only)
        self._replica.wait()
        self._ending = threading.Event()
        self._announcing = threading.Thread(target=self._announce, name="kvilt-announce", daemon=True)
        self._announcing.start()

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose server ended or whose steps hang."""
        if not self._replica.healthy:
            raise KviltError("the engine of this replica does not make progress")

    def __del__(self) -> None:
        """Ray Serve stops this replica: the door sends nothing more, and requests in progress end."""
        if not hasattr(self, "_ending"):
            return
        self._ending.set()
        self._announcing.join()
        self._tell(self._replica.leave())
        self._replica.stop()

    def _announce(self) -> None:
        while not self._ending.wait(ANNOUNCE_S):
            self._tell(self._replica.info())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Requests of this replica, and its part of those that wait at doors; Ray Serve asks for them."""
        return {ONGOING: self._replica.info().running + self._waiting}

    def _tell(self, info: ReplicaInfo) -> None:
        """Tell all doors; one that does not answer hears of it a quarter of a second later again."""
        asked = []
        for number in range(self._plan.doors):
            try:
                asked.append(find_door(self._plan, number).announce.remote(info))
            except (ValueError, ray.exceptions.RayError):  # the door is about to come back
                _log.warning("door %d is not there to announce this replica to", number)
        done = ray.wait(asked, num_returns=len(asked), timeout=ANNOUNCE_S)[0] if asked else []
        try:
            self._waiting = float(sum(ray.get(done)))
        except ray.exceptions.RayError:
            _log.warning("a door has died")


class DoorActor:
    """The door, as Ray runs it. A door that was started again listens as soon as a replica announces itself."""

    def __init__(self, plan: DoorPlan) -> None:
        router = Router(RouterConfig(block_tokens=PAGE_TOKENS, doors=plan.doors))
        self._door = Door(plan.config, router, load_tokenizer(plan.model), plan.key, plan.weights)
        self._key = plan.key
        self._server: DoorServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen, and say at which port."""
        if self._server is None:
            self._server = DoorServer(self._door)
            self._task = asyncio.ensure_future(self._server.run_door())
        while not self._server.started:
            if self._task is not None and self._task.done():
                raise KviltError("the door cannot listen at its address")
            await asyncio.sleep(0.01)
        return self._server.port

    async def announce(self, info: ReplicaInfo) -> float:
        """A replica is alive; its part of the requests that no replica has yet."""
        await self.start()
        self._door.replicas.announce(info)
        return self._door.unsent()

    async def cluster_key(self) -> ClusterKey:
        """The key of this cluster, for replicas that join it."""
        return self._key

    async def serve_model(self, model: str) -> None:
        """Requests are for another model from now on: what they begin with is read with its tokenizer."""
        self._door.change_model(await asyncio.to_thread(load_tokenizer, model))

    async def status(self) -> dict[str, Any]:
        """What is behind the door."""
        return cluster_status(self._door.router, self._door.replicas, self._door.retries)

    async def stop(self) -> None:
        """Refuse new requests, and wait for those in progress."""
        if self._server is not None and self._task is not None:
            await self._server.end()
            await self._task


def join_ray(address: str | None) -> None:
    """Join the Ray cluster at an address, or start one that ends with this process and listens on loopback only."""
    without_ray_telemetry()
    if address is not None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        return
    ray.init(
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )


def find_door(plan: ClusterPlan, number: int = 0) -> Any:
    """A door of this Ray cluster, on its head; the first that asks starts it."""
    actor: Any = ray.remote(DoorActor)
    config = plan.config
    if number:
        config = replace(config, port=config.port + number if config.port else 0)
    return actor.options(
        name=_door_name(number),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=10_000,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
    ).remote(DoorPlan(config, plan.model, plan.key, plan.doors, plan.weights))


def _door_name(number: int) -> str:
    return DOOR if not number else f"{DOOR}-{number}"


def application(plan: ClusterPlan, prefill_only: bool = False) -> Any:
    """The replicas as a Ray Serve application, for `serve.run` and `serve run`."""
    scaled = plan.most is not None and not prefill_only
    count = {"num_replicas": plan.prefill_replicas if prefill_only else plan.replicas}
    deployment: Any = serve.deployment(
        EngineReplica,
        name="prefill" if prefill_only else "engine",
        ray_actor_options={"num_cpus": 0 if plan.local else _SPREAD_CPUS, "num_gpus": plan.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=plan.config.grace_s + 10,
        **({"autoscaling_config": autoscaling(plan)} if scaled else count),
    )
    return deployment.bind(plan, prefill_only)


def autoscaling(plan: ClusterPlan) -> Any:
    """Ray Serve's configuration for a number of replicas that follows their requests."""
    assert plan.most is not None
    policy: Any = AutoscalingPolicy  # it has no types
    return AutoscalingConfig(
        min_replicas=plan.least or 1,
        max_replicas=plan.most,
        initial_replicas=plan.replicas,
        metrics_interval_s=1.0,
        look_back_period_s=5.0,
        # The policy waits itself. Ray would wait again: 30 s before it starts a replica, and 600 s before it stops one.
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=policy(policy_function=wanted_replicas),
    )


def up(plan: ClusterPlan) -> list[int]:
    """Start doors and replicas, and return the doors' ports once all of them are there.

    On a cluster that runs already, replicas are replaced one after the other by those of the new plan.
    """
    serve.start(proxy_location="Disabled")
    there = running()
    doors = [find_door(plan, number) for number in range(plan.doors)]
    ports: list[int] = ray.get([door.start.remote() for door in doors])
    if there:
        ray.get([door.serve_model.remote(plan.model) for door in doors])
    if plan.prefill_replicas:
        serve.run(application(plan, prefill_only=True), name=PREFILL, route_prefix=None)
    serve.run(application(plan), name=APPLICATION, route_prefix=None)
    for door in doors:
        _wait_for(door, plan.replicas + plan.prefill_replicas)
    return ports


def _wait_for(door: Any, replicas: int) -> None:
    until_s = time.monotonic() + _START_S
    while len(ray.get(door.status.remote())["replicas"]) < replicas:
        if time.monotonic() > until_s:
            raise KviltError("not all replicas came up in time; see the logs in Ray's session folder")
        time.sleep(0.1)


def running() -> bool:
    """Whether there is a door."""
    try:
        ray.get_actor(DOOR, NAMESPACE)
    except ValueError:
        return False
    return True


def down() -> None:
    """Drain the doors, then stop all replicas."""
    doors: list[Any] = []
    with suppress(ValueError):
        while True:
            doors.append(ray.get_actor(_door_name(len(doors)), NAMESPACE))
    if not doors:
        raise KviltError("no cluster of kvilt runs on this Ray cluster")
    ray.get([door.stop.remote() for door in doors])
    for name in (APPLICATION, PREFILL):
        if name in serve.status().applications:
            serve.delete(name)
    for door in reversed(doors):  # at last: their absence tells the process that started a Ray cluster to end it
        ray.kill(door)
