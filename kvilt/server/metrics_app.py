"""The application of a port that serves metrics and nothing else, without a key: whoever reaches it may read them."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .gate import check_host
from .prometheus import CONTENT_TYPE
from .refusal import Refused, refusal_of
from .service import Service


def make_metrics_app(service: Service) -> ASGIApp:
    """/metrics as an ASGI application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = _answer(service, scope)
        except Exception as error:
            answer = refusal_of(error).response()
        answer.headers["connection"] = "close"  # bodies are not read
        await answer(scope, receive, send)

    return app


def _answer(service: Service, scope: Scope) -> Response:
    check_host(Headers(scope=scope), service.config)  # a page could rebind its name to this port, too
    if scope["path"] != "/metrics":
        raise Refused(404, "this port serves /metrics alone", code="not_found")
    if scope["method"] not in ("GET", "HEAD"):
        raise Refused(405, "this route does not take this method")
    return Response(service.exposition(), 200, {"cache-control": "no-store"}, CONTENT_TYPE)
