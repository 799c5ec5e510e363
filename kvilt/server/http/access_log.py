"""The access log: one record for each request, with what it cost. Knows no routes."""

from __future__ import annotations

import logging

from starlette.types import Scope

from ..logs import FIELDS, usage_fields
from ..tracing import USAGE

_access = logging.getLogger("kvilt.access")
LOGGED_ELSEWHERE = "kvilt.logged_elsewhere"  # in the scope of a request that another process answers, and logs


def log_access(
    scope: Scope,
    request_id: str,
    client: str,
    method: str,
    route: str,
    status: int,
    took_s: float,
    first_s: float | None,
) -> None:
    """Write one request that has ended: who asked for what, the status, durations, and the tokens of its answer."""
    if scope.get(LOGGED_ELSEWHERE):
        return
    path = scope.get("raw_path", b"")[:256].decode("ascii", "backslashreplace")
    counts = usage_fields(scope.get(USAGE))
    fields = {
        "request_id": request_id,
        "client": client,
        "method": method,
        "route": route,
        "path": path,
        "status": status,
        "duration_s": round(took_s, 6),
        **({} if first_s is None else {"response_start_s": round(first_s, 6)}),
        **counts,
    }
    tokens = "".join(f", {count} {name.replace('_', ' ')}" for name, count in counts.items())
    # %r, so that a path cannot start a line of the log.
    _access.info(
        "%s %s %r %d %.3f s, request %s%s",
        *(client, method, path, status, took_s, request_id, tokens),
        extra={"request_id": request_id, "status": status, FIELDS: fields},
    )
