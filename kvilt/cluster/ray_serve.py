"""A cluster on Ray: engine replicas as a Ray Serve deployment, and the door as an actor that listens itself.

Ray Serve starts replicas, checks their health and replaces those that die. Requests do not pass through it: the door
has the server's own limits on connections, and streams from replicas over HTTP on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray import serve

from ..config import without_ray_telemetry
from ..errors import KviltError
from ..executor.load import PAGE_TOKENS
from ..llm.build import load_tokenizer
from ..server.config import ServeConfig
from .cluster_key import ClusterKey
from .door import Door
from .listener import DoorServer
from .replica import OnReady, ReplicaThread
from .replica_set import ANNOUNCE_S, ReplicaInfo
from .router import Router, RouterConfig
from .status import cluster_status

_log = logging.getLogger(__name__)
NAMESPACE, DOOR, APPLICATION = "kvilt", "kvilt-door", "kvilt"
_OBJECT_STORE_BYTES = 100 << 20  # nothing large goes through it
_START_S = 600.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What `kvilt cluster up` starts."""

    model: str
    config: ServeConfig  # of the door
    start: Callable[[str, OnReady], None]  # serves a replica at this host, in the thread that calls it
    replicas: int = 2
    gpus: float = 0.0  # of each replica
    local: bool = True  # all of it is on this machine, and listens on loopback
    key: ClusterKey = field(default_factory=ClusterKey.new)


class EngineReplica:
    """One replica, as Ray Serve runs it."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        here: Any = ray.util  # its functions have no types
        host = "127.0.0.1" if plan.local else here.get_node_ip_address()
        self._replica = ReplicaThread(partial(plan.start, host), plan.key)
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

    def _tell(self, info: ReplicaInfo) -> None:
        try:
            find_door(self._plan).announce.remote(info)
        except (ValueError, ray.exceptions.RayError):  # the door is about to come back
            _log.warning("there is no door to announce this replica to")


class DoorActor:
    """The door, as Ray runs it. A door that was started again listens as soon as a replica announces itself."""

    def __init__(self, config: ServeConfig, model: str, key: ClusterKey) -> None:
        router = Router(RouterConfig(block_tokens=PAGE_TOKENS))
        self._door = Door(config, router, load_tokenizer(model), key)
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

    async def announce(self, info: ReplicaInfo) -> None:
        """A replica is alive."""
        await self.start()
        self._door.replicas.announce(info)

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


def find_door(plan: ClusterPlan) -> Any:
    """The door of this Ray cluster, on its head; the first that asks starts it."""
    actor: Any = ray.remote(DoorActor)
    return actor.options(
        name=DOOR,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=10_000,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
    ).remote(plan.config, plan.model, plan.key)


def application(plan: ClusterPlan) -> Any:
    """The replicas as a Ray Serve application, for `serve.run` and `serve run`."""
    deployment: Any = serve.deployment(
        EngineReplica,
        name="engine",
        num_replicas=plan.replicas,
        ray_actor_options={"num_cpus": 0, "num_gpus": plan.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=plan.config.grace_s + 10,
    )
    return deployment.bind(plan)


def up(plan: ClusterPlan) -> int:
    """Start a door and its replicas, and return the door's port once all of them are there."""
    serve.start(proxy_location="Disabled")
    door = find_door(plan)
    port: int = ray.get(door.start.remote())
    serve.run(application(plan), name=APPLICATION, route_prefix=None)
    _wait_for(door, plan.replicas)
    return port


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
    """Drain the door, then stop all replicas."""
    try:
        door: Any = ray.get_actor(DOOR, NAMESPACE)
    except ValueError:
        raise KviltError("no cluster of kvilt runs on this Ray cluster") from None
    ray.get(door.stop.remote())
    serve.delete(APPLICATION)
    ray.kill(door)  # at last: its absence tells the process that started a Ray cluster to end it
