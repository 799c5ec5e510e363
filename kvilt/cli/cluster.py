"""`kvilt cluster`: several replicas of a model behind one address, on Ray."""

from __future__ import annotations

import json
import signal
import sys
import threading
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ..config import DEFAULT_MODEL
from ..errors import InputError, KviltError, ParamError, Unsupported
from .options import ENGINE, RUNTIME, SERVER, STORE
from .serve import check_port, owner_weights, serve, serve_config

if TYPE_CHECKING:
    from types import ModuleType

    from ..cluster.ray_serve import ClusterPlan
    from ..cluster.replica import OnReady

_WATCH_S = 1.0
# Options of one server that a cluster does not offer: the door has the metrics of all replicas.
_NOT_OFFERED = {
    "metrics_port": None,
    "metrics_host": "127.0.0.1",
    "kv_events": "tcp://127.0.0.1:*",
    "kv_events_replay": None,
    "kv_events_topic": "kv-events",
}


def up(
    model: str,
    size: dict[str, Any],
    address: str | None,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Start a cluster. On a Ray cluster of its own it runs until a signal or `down`; elsewhere it stays.

    `size` has the fields of a plan about its numbers of replicas and doors.
    """
    cluster = _ray()
    plan = plan_of(model, size, options, engine, store, config, local=address is None)
    settings = plan.config
    if address is None:  # elsewhere a cluster may run already, whose replicas are replaced
        for number in range(plan.doors):
            check_port("port", settings.host, settings.port + number if settings.port else 0)
    cluster.join_ray(address)
    ports = cluster.up(plan)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    where = " and ".join(f"http://{host}:{port}" for port in ports)
    print(f"{plan.replicas} replicas of {settings.names[0]} are served at {where}", file=sys.stderr, flush=True)
    if address is None:
        _until_signal(cluster)


def plan_of(
    model: str,
    size: dict[str, Any],
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    config: dict[str, Any],
    local: bool,
) -> ClusterPlan:
    """What to start, from the options of `kvilt serve`."""
    options = {**options, **_NOT_OFFERED}
    on_gpu = str(config.get("device") or "").startswith("cuda")
    start = partial(serve_replica, model, options, engine, store, config)
    settings = serve_config(model, options, store["store"])
    weights = owner_weights(options["api_key_file"])
    gpus = 1.0 if on_gpu else 0.0
    made: ClusterPlan = _ray().ClusterPlan(
        model, settings, start, **checked_size(**size), weights=weights, gpus=gpus, local=local
    )
    return made


def checked_size(
    replicas: int | None = None,
    least: int | None = None,
    most: int | None = None,
    prefill_replicas: int = 0,
    doors: int = 1,
) -> dict[str, Any]:
    """Numbers of replicas and doors that fit each other."""
    if (least is None) != (most is None):
        raise ParamError("min", "stands beside --max: give both, or --replicas")
    if least is not None and most is not None:
        if replicas is not None:
            raise ParamError("replicas", "is fixed; give it, or --min and --max")
        if least > most:
            raise ParamError("min", f"must not be above --max, which is {most}")
    start = replicas or least or 2
    return {"replicas": start, "least": least, "most": most, "prefill_replicas": prefill_replicas, "doors": doors}


def default_plan(model: str = DEFAULT_MODEL, replicas: int = 2, local: bool = False, **given: Any) -> ClusterPlan:
    """A plan with the default options, for a Python file that `serve run` starts; `given` changes some of them."""
    every = (SERVER, ENGINE, STORE, RUNTIME)
    groups = [{name: option.default for name, option in group.options.items()} for group in every]
    known = {name for group in groups for name in group}
    if wrong := sorted(given.keys() - known):
        raise InputError(f"{wrong[0]!r} is no option of kvilt serve")
    options, engine, store, config = ({name: given.get(name, group[name]) for name in group} for group in groups)
    return plan_of(model, {"replicas": replicas}, options, engine, store, config, local)


def serve_replica(
    model: str,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    config: dict[str, Any],
    host: str,
    on_ready: OnReady,
) -> None:
    """One replica: the server of `kvilt serve` with the same options, at this host and any port."""
    own = {"host": host, "port": 0, "kv_events": f"tcp://{host}:*"}
    serve(model, {**options, **own}, {**engine, "shared_notes": True}, store, config, on_ready)


def down(address: str | None) -> None:
    """Stop the cluster."""
    cluster = _ray()
    cluster.join_ray(address or "auto")
    cluster.down()


def status(url: str, key: str | None, as_json: bool) -> None:
    """Print the replicas behind a door, what they hold, and how busy they are."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/v1/cluster", headers=headers), timeout=30) as answer:
            found = json.loads(answer.read())
    except HTTPError as error:
        raise InputError(f"the server at {url} refuses: {error.reason}") from None
    except URLError as error:
        raise KviltError(f"the server at {url} does not answer: {error.reason}") from None
    if as_json:
        print(json.dumps(found))
        return
    print(f"{len(found['replicas'])} replicas, {found['retries']} requests were sent again")
    for one in found["replicas"]:
        print(
            f"{one['name']}  process {one['pid']}  {one['prefix_blocks']:,} blocks of {found['block_tokens']} tokens  "
            f"pages used {one['kv_used']:.0%}  hits {one['hit_rate']:.0%}  "
            f"backlog {one['backlog_tokens']:,} tokens  {one['prefill_tokens_per_s']:,} tokens/s"
        )


def _ray() -> ModuleType:
    try:
        from ..cluster import ray_serve
    except ImportError as error:
        raise Unsupported(f"a cluster needs {error.name}; install it with: pip install 'kvilt[cluster]'") from None
    return ray_serve


def _until_signal(cluster: ModuleType) -> None:
    """Wait for SIGINT or SIGTERM, or until `kvilt cluster down` took the door away."""
    ending = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while not ending.wait(_WATCH_S):
        if not cluster.running():
            return
    cluster.down()
