"""The commands of `kvilt cluster` and their options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import env_admin_key
from . import options as opt
from .errors import exit_on_error

clusters = typer.Typer(help="Several replicas of a model behind one address, on Ray.")
_RayAddress = Annotated[
    str | None, typer.Option("--ray", metavar="ADDRESS", help="A Ray cluster that runs already, or auto.")
]

_Replicas = Annotated[int | None, typer.Option(min=1, max=4096, help="Number of engine replicas; 2 by default.")]
_Least = Annotated[int | None, typer.Option("--min", min=1, max=4096, help="With --max: as many as the load needs.")]
_Most = Annotated[int | None, typer.Option("--max", min=1, max=4096, help="The most replicas under load.")]
_PrefillReplicas = Annotated[
    int, typer.Option(min=0, max=4096, help="Replicas besides these that compute long prompts for them.")
]


@clusters.command("up")
@opt.with_options(
    options=opt.SERVER.without("kv_events", "kv_events_replay", "kv_events_topic", "metrics_port", "metrics_host"),
    engine=opt.ENGINE,
    store=opt.STORE,
    drafts=opt.DRAFTS,
    config=opt.RUNTIME,
)
def cluster_up(
    model: opt.Model = opt.DEFAULT_MODEL,
    replicas: _Replicas = None,
    least: _Least = None,
    most: _Most = None,
    prefill_replicas: _PrefillReplicas = 0,
    doors: Annotated[int, typer.Option(min=1, max=16, help="Doors, at ports one after the other.")] = 1,
    ray: _RayAddress = None,
    *,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Serve a model with several replicas; requests go where their KV is."""
    with exit_on_error():
        from .cluster import up

        size = {
            "replicas": replicas,
            "least": least,
            "most": most,
            "prefill_replicas": prefill_replicas,
            "doors": doors,
        }
        up(model, size, ray, options, engine, store, {**config, **drafts})


@clusters.command("status")
def cluster_status(
    url: Annotated[str, typer.Option(help="Address of the cluster.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the replicas, their KV and their loads; where keys are set, KVILT_ADMIN_KEY has the admin key."""
    with exit_on_error():
        from .cluster import status

        status(url, env_admin_key(), as_json)


@clusters.command("down")
def cluster_down(ray: _RayAddress = None) -> None:
    """Stop the cluster: requests in progress end first."""
    with exit_on_error():
        from .cluster import down

        down(ray)
