"""`kvilt ps` and `kvilt stop`: the running servers of this user."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ..errors import InputError, KviltError
from ..server.running import RunningServer, is_running, running_servers, stop
from .inspect_view import plain, size
from .models import age, plain_table, print_table
from .server_client import ServerClient

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model of a running server, and what it takes."""

    model: str
    pid: int
    url: str
    uptime_s: int
    state: str  # loaded, not loaded, or why nothing is known
    weight_bytes: int | None = None
    kv_used_bytes: int | None = None
    kv_bytes: int | None = None
    requests: int | None = None
    process_bytes: int | None = None  # of the whole server


def list_servers(api_key: str | None, as_json: bool) -> None:
    """Print the running servers of this user, and their models."""
    found = [use for server in running_servers() for use in model_uses(server, api_key)]
    if as_json:
        print(json.dumps([asdict(use) for use in found]))
        return
    table = plain_table("model", "pid", "weights", "KV used", "requests", "process", "up", "address", "state")
    for use in found:
        kv = "" if use.kv_bytes is None else f"{size(use.kv_used_bytes or 0)} of {size(use.kv_bytes)}"
        requests = "" if use.requests is None else str(use.requests)
        table.add_row(
            *(Text(plain(use.model)), str(use.pid), _size(use.weight_bytes), kv, requests),
            *(_size(use.process_bytes), age(use.uptime_s), use.url, Text(plain(use.state))),
        )
    print_table(table)
    if not found:
        print("no server of this user is running; `kvilt serve` starts one", file=sys.stderr)


def model_uses(server: RunningServer, api_key: str | None) -> list[ModelUse]:
    """What the models of a server take, as the server itself says; less where it does not answer."""
    own = (server.pid, server.url, max(0, int(time.time() - server.started_s)))
    process = process_bytes(server.pid)
    try:
        loaded = {card["name"]: card for card in ServerClient(server.url, api_key).json("/api/ps")["models"]}
    except KviltError:
        state = "needs a key: set KVILT_API_KEY" if server.needs_key else "does not answer"
        return [ModelUse(model.names[0], *own, state, process_bytes=process) for model in server.models]
    uses = []
    for model in server.models:
        card = loaded.get(model.names[0])
        if card is None:
            uses.append(ModelUse(model.names[0], *own, "not loaded", process_bytes=process))
        else:
            uses.append(ModelUse(model.names[0], *own, "loaded", **_card_fields(card), process_bytes=process))
    return uses


def _card_fields(card: dict[str, Any]) -> dict[str, Any]:
    own = {name: card.get(name) for name in ("kv_used_bytes", "kv_bytes", "requests")}
    return {"weight_bytes": card.get("size"), **own}


def process_bytes(pid: int) -> int | None:
    """The memory that a process has in use; None where the system does not say."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def stop_servers(which: str | None, everything: bool, timeout_s: float) -> None:
    """End the servers that a pid, a port, an address or a model's name stands for, and wait until they have ended."""
    chosen = _chosen(which, everything)
    for server in chosen:
        stop(server)
    until_s = time.monotonic() + timeout_s
    for server in chosen:
        while is_running(server):
            if time.monotonic() > until_s:
                raise KviltError(
                    f"process {server.pid} still ends requests after {timeout_s:g} s; a second signal ends it at once: "
                    f"kvilt stop {server.pid}"
                )
            time.sleep(_POLL_S)
        print(f"stopped {server.models[0].names[0] if server.models else server.url} (process {server.pid})")


def _chosen(which: str | None, everything: bool) -> list[RunningServer]:
    servers = running_servers()
    if not servers:
        raise InputError("no server of this user is running")
    if everything:
        return servers
    if which is None:
        if len(servers) == 1:
            return servers
        raise InputError(f"{len(servers)} servers are running; name one, or use --all: {_named(servers)}")
    found = [server for server in servers if _is_meant(server, which)]
    if len(found) != 1:
        problem = f"no server is called {which[:200]!r}" if not found else f"{which[:200]!r} names {len(found)} servers"
        raise InputError(f"{problem}; running are: {_named(servers)}")
    return found


def _is_meant(server: RunningServer, which: str) -> bool:
    names = {name for model in server.models for name in (*model.names, model.source)}
    return which in {str(server.pid), server.url, server.url.rpartition(":")[2], *names}


def _named(servers: list[RunningServer]) -> str:
    return ", ".join(f"{server.pid} ({plain(server.models[0].names[0])} at {server.url})" for server in servers)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size(nbytes)
