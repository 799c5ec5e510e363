"""`kvilt top`: a running server, once a second, from the stream of its KV state."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import InputError, KviltError
from ..server.running import running_servers
from .inspect_view import size
from .models import plain_table

_MOST_SAMPLES = 12
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second between two states; None where the server does not show totals to this key."""

    generated: float | None
    computed: float | None
    prefix_hit_share: float | None


def watch(url: str | None, api_key: str | None, once: bool, as_json: bool) -> None:
    """Draw states until the user or the server ends it."""
    address = url or _only_server()
    before: dict[str, Any] | None = None
    before_s = time.monotonic()
    console = Console()
    with Live(console=console, auto_refresh=False, screen=not once and not as_json and console.is_terminal) as live:
        for number, state in enumerate(states(address, api_key)):
            now_s = time.monotonic()
            rates = rates_between(before, state, now_s - before_s)
            before, before_s = state, now_s
            if as_json:
                print(json.dumps({**_summary(state), **asdict(rates)}), flush=True)
            elif not once or number == 1:
                live.update(picture(address, state, rates), refresh=True)
            if once and number == 1:
                return
    raise KviltError(f"the server at {address} has ended")


def states(url: str, api_key: str | None) -> Iterator[dict[str, Any]]:
    """The states that a server sends, one a second."""
    headers = {"Accept": "text/event-stream"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    asked = Request(f"{url.rstrip('/').removesuffix('/v1')}/v1/kv/state", headers=headers)
    try:
        with urlopen(asked, timeout=_TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except HTTPError as error:
        raise InputError(f"the server at {url} refuses: {error.reason}; a key is given with KVILT_API_KEY") from None
    except (URLError, OSError) as error:
        raise KviltError(f"the server at {url} does not answer: {getattr(error, 'reason', error)}") from None


def rates_between(before: dict[str, Any] | None, now: dict[str, Any], seconds: float) -> Rates:
    """What a server did between two states."""
    old, new = (before or {}).get("totals"), now.get("totals")
    if old is None or new is None or seconds <= 0:
        return Rates(None, None, None)
    asked = new["prefix_queries"]
    return Rates(
        (new["generated_tokens"] - old["generated_tokens"]) / seconds,
        (new["computed_tokens"] - old["computed_tokens"]) / seconds,
        new["prefix_hits"] / asked if asked else None,
    )


def _summary(state: dict[str, Any]) -> dict[str, Any]:
    samples = state["samples"]
    counts = {kind: sum(one["state"] == kind for one in samples) for kind in ("running", "waiting", "held")}
    own = {"prefixes": len(state["prefixes"]), "handles": len(state["handles"])}
    return {**counts, **own, "pages": state["pages"], "totals": state.get("totals")}


def picture(url: str, state: dict[str, Any], rates: Rates) -> RenderableType:
    """One state as a screen."""
    pages, totals = state["pages"], state.get("totals")
    lines: list[RenderableType] = [Text(f"kvilt at {url}", style="bold"), _numbers(state, rates)]
    held = f"KV  {pages['used']:,} of {pages['total']:,} pages in use ({size(pages['used_bytes'])}), "
    lines.append(Text(f"{held}{pages['shared']:,} shared, {pages['kept']:,} kept for prefixes"))
    lines.append(ProgressBar(max(1, pages["total"]), pages["used"], width=60))
    if totals is None:
        lines.append(Text("totals are for the admin key on a server with keys", style="dim"))
    elif totals["tiers"]:
        lines.append(_tiers(totals["tiers"]))
    if state["samples"]:
        lines.append(_samples(state["samples"]))
    return Group(*lines)


def _numbers(state: dict[str, Any], rates: Rates) -> Text:
    counts, totals = _summary(state), state.get("totals")
    running, waiting = (
        (counts if totals is None else totals)["running"],
        (counts if totals is None else totals)["waiting"],
    )
    parts = [f"{running:.0f} running", f"{waiting:.0f} waiting", f"{counts['handles']} handles"]
    if rates.generated is not None and rates.computed is not None:
        parts += [f"{rates.generated:,.0f} tokens/s generated", f"{rates.computed:,.0f} tokens/s computed"]
    if rates.prefix_hit_share is not None:
        parts.append(f"{rates.prefix_hit_share:.0%} of prompts reused")
    return Text("   ".join(parts))


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    table = plain_table("tier", "size", "records", "hits", "state")
    for tier in tiers:
        numbers = (f"{tier.get('records', 0):,.0f}", f"{tier.get('hits', 0):,.0f}")
        table.add_row(tier["tier"], size(int(tier.get("bytes", 0))), *numbers, "up" if tier.get("up", 1) else "down")
    return table


def _samples(samples: list[dict[str, Any]]) -> Table:
    table = plain_table("request", "state", "prompt", "cached", "tokens", "pages", "shared")
    for one in samples[:_MOST_SAMPLES]:
        counts = (one["prompt_tokens"], one["cached"], one["tokens"], one["pages"], one["shared_pages"])
        table.add_row(Text(f"{one['request'][:24]}/{one['index']}"), one["state"], *(f"{count:,}" for count in counts))
    if len(samples) > _MOST_SAMPLES:
        table.add_row(f"and {len(samples) - _MOST_SAMPLES} more", *[""] * 6)
    return table


def _only_server() -> str:
    servers = running_servers()
    if not servers:
        raise InputError("no server of this user is running; start one with `kvilt serve`, or give --url")
    if len(servers) > 1:
        print(f"watching {servers[-1].url}, the newest of {len(servers)} servers", file=sys.stderr)
    return servers[-1].url
