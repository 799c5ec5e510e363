"""Commands that serve a model (serve, mcp), and those on running servers (ps, stop, session)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import options as opt
from .errors import exit_on_error
from .imports import uncollected


@opt.with_options(options=opt.SERVER, engine=opt.ENGINE, store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def serve(
    model: opt.Models = [opt.DEFAULT_MODEL],  # noqa: B006 (typer takes no tuple)
    models_memory: Annotated[
        str | None,
        typer.Option(help="Memory for weights and KV of several models, like 16G; default: what is free at the start."),
    ] = None,
    *,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Serve one or several models over HTTP with an OpenAI-compatible API."""
    with exit_on_error():
        if len(model) > 1:
            from .serve_models import serve_models

            serve_models(model, models_memory, options, engine, store, {**config, **drafts})
            return
        with uncollected():
            from .serve import serve as listen
        listen(model[0], options, engine, store, {**config, **drafts})


@opt.with_options(store=opt.STORE, drafts=opt.DRAFTS, config=opt.RUNTIME)
def mcp(
    model: opt.Model = opt.DEFAULT_MODEL,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve HTTP on this machine; default: stdin and stdout.")
    ] = None,
    kv_dir: Annotated[str | None, typer.Option(metavar="PATH", help="The folder that KV is saved in.")] = None,
    *,
    store: dict[str, Any],
    drafts: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Offer a model and its KV to agents as tools of the Model Context Protocol."""
    with exit_on_error():
        from .mcp import mcp as offer

        offer(model, port, kv_dir, store, {**config, **drafts})


def ps(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    api_key: opt.ClientKey = None,
    api_key_file: opt.ClientKeyFile = None,
) -> None:
    """List this user's running servers: their models, memory, KV and requests."""
    with exit_on_error():
        from .keys import client_key
        from .servers import list_servers

        list_servers(client_key(api_key, api_key_file), json)


def stop(
    which: Annotated[
        str | None, typer.Argument(help="A process id, a port, an address or a model's name; default: the only one.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all of this user's servers.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until they have ended.")] = 60.0,
) -> None:
    """Stop a running server of this user: requests in progress end first."""
    with exit_on_error():
        from .servers import stop_servers

        stop_servers(which, everything, timeout_s)


def top(
    url: Annotated[
        str | None, typer.Option(help="The server's address; default: this user's only running one.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and leave.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each second.")] = False,
    api_key: opt.ClientKey = None,
    api_key_file: opt.ClientKeyFile = None,
) -> None:
    """Watch a running server: requests, KV, tiers of the store, tokens per second."""
    with exit_on_error():
        from .keys import client_key
        from .top import watch

        watch(url, client_key(api_key, api_key_file), once, json)


def session(
    action: Annotated[str, typer.Argument(help="list, show, export, import, fork or delete.")],
    name: Annotated[str, typer.Argument(help="The session's name or id; for import, the file.")] = "",
    target: Annotated[str, typer.Argument(help="The file of an export, or the name of a new session.")] = "",
    kv: Annotated[bool, typer.Option("--kv/--no-kv", help="Whether the file has the KV too.")] = True,
    turn: Annotated[str | None, typer.Option(help="Fork only the turns that lead to this one.")] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: opt.ClientKey = None,
    api_key_file: opt.ClientKeyFile = None,
) -> None:
    """Sessions of a running server: list, show NAME, export NAME FILE, import FILE, fork NAME NEW, delete NAME."""
    with exit_on_error():
        from .keys import client_key
        from .session import SessionClient, act

        act(SessionClient(url, client_key(api_key, api_key_file)), action, name, target, kv, turn)
