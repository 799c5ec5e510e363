"""The outermost ASGI layer: request ids, Host, Origin, keys, limits on bodies and slow clients, the access log.

It is plain ASGI, so that nothing is parsed or allocated for a request before it is admitted. It knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...metrics import Metrics
from ..auth import APIKeys, check_host, check_origin
from ..config import ServeConfig
from ..metrics import HTTP_REQUESTS, HTTP_SECONDS
from ..sessions.fields import IMPORT_PATH
from ..tracing import end_span, request_span
from .access_log import log_access
from .body import LimitedBody, body_too_large
from .errors import SHAPE, ClientDisconnected, ErrorShape, HTTPError, draining_error, internal_error

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Served without a key: liveness and readiness. Static files need no key either.
_KEYLESS_PATHS = frozenset({"/health", "/ready"})
_FORM_BYTES = 1 << 16  # of a form, beside its file
HEAD_ONLY = "kvilt.head_only"  # in the scope of a request whose body is not sent
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", _CSP.encode()),
]


@dataclass(slots=True)
class RequestContext:
    """One request while it is handled."""

    scope: Scope
    headers: Headers
    id: str
    began_s: float = field(default_factory=time.perf_counter)
    origin: str | None = None
    status: int = 0  # 0: no response was started
    first_s: float | None = None  # from the request to the start of the response
    body: LimitedBody | None = None  # None: the request was not admitted
    span: Any = None

    @property
    def sends_body(self) -> bool:
        """Whether a body comes with the request."""
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"


class AdmittingService(Protocol):
    """What the middleware asks of a service."""

    draining: bool

    @property
    def config(self) -> ServeConfig: ...

    @property
    def metrics(self) -> Metrics: ...

    def in_progress(self) -> AbstractContextManager[None]:
        """Count a request as in progress."""


class RequestMiddleware:
    """Admits requests to an ASGI application, adds headers, and logs them."""

    def __init__(
        self,
        app: ASGIApp,
        service: AdmittingService,
        is_file: Callable[[str], bool],
        error_shape: Callable[[str, Mapping[str, str]], ErrorShape],
        uploads: Container[str] = (),
    ) -> None:
        """`is_file` says which paths are static files, which need no key; `error_shape` how errors of a path look.

        Paths in `uploads` take a form with a file, which may be larger and slower than JSON.
        """
        self._app = app
        self._service = service
        self._config = service.config
        self._keys = APIKeys(service.config)
        self._metrics = service.metrics
        self._is_file = is_file
        self._error_shape = error_shape
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # lifespan
            return
        headers = Headers(scope=scope)
        context = RequestContext(scope, headers, _request_id(headers))
        scope[SHAPE] = self._error_shape(scope["path"], headers)
        with request_span(scope, headers, context.id) as context.span:
            await self._handle_request(context, receive, self._wrap_send(context, send))

    async def _handle_request(self, context: RequestContext, receive: Receive, send_out: Send) -> None:
        try:
            await self._serve(context, receive, send_out)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("request %s failed outside its route", context.id)
            if not context.status:
                await internal_error().response(context.scope)(context.scope, receive, send_out)
        finally:
            self._record(context)

    async def _serve(self, context: RequestContext, receive: Receive, send: Send) -> None:
        try:
            response = self._check_admission(context)
        except HTTPError as error:
            response = error.response(context.scope)
        if response is not None:
            await response(context.scope, receive, send)
            return
        slow = self._takes_upload(context.scope)
        timeout_s = self._config.upload_timeout_s if slow else self._config.body_timeout_s
        context.body = LimitedBody(receive, self._max_bytes(context.scope), timeout_s)
        with self._service.in_progress():
            await self._run(context, context.body, send)

    async def _run(self, context: RequestContext, receive: Receive, send: Send) -> None:
        """A route with GET answers HEAD as well: the server below sends no body for it."""
        if context.scope["method"] != "HEAD":
            await self._app(context.scope, receive, send)
            return
        asked = {**context.scope, "method": "GET", HEAD_ONLY: True}
        try:
            await self._app(asked, receive, send)
        finally:
            context.scope["route"] = asked.get("route")  # for the log and the metrics

    def _check_admission(self, context: RequestContext) -> Response | None:
        """None admits the request; a response answers it here; an HTTPError refuses it."""
        scope, headers = context.scope, context.headers
        check_host(headers, self._config)
        context.origin = check_origin(headers, self._config)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return Response(status_code=204, headers=_PREFLIGHT)
        if scope["path"] in _KEYLESS_PATHS or (scope["method"] in ("GET", "HEAD") and self._is_file(scope["path"])):
            return None
        scope["kvilt.caller"] = self._keys.caller(headers)
        if scope["method"] not in ("GET", "HEAD"):
            self._check_body(context)
            if self._service.draining:
                raise draining_error()
        return None

    def _check_body(self, context: RequestContext) -> None:
        headers, most = context.headers, self._max_bytes(context.scope)
        length = headers.get("content-length")
        if length is not None and length.isdecimal() and int(length[:20]) > most:
            raise body_too_large(most)
        if not context.sends_body:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/octet-stream" and context.scope["path"] == IMPORT_PATH:
            return
        if self._takes_upload(context.scope):
            if kind != "multipart/form-data":
                raise HTTPError(415, "a file is sent as multipart/form-data", code="unsupported_media_type")
            return  # a page of another origin can send it too, and was refused by its Origin
        # Browsers let a page send text/plain to any server without a preflight request, but not JSON.
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise HTTPError(415, "the body must be JSON, sent as application/json", code="unsupported_media_type")

    def _takes_upload(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["path"] in self._uploads

    def _max_bytes(self, scope: Scope) -> int:
        """Of a body; the fields and boundaries of a form come on top of its file."""
        if scope["path"] == IMPORT_PATH:  # the file of a session holds KV
            return self._config.max_session_bytes
        upload = self._takes_upload(scope)
        return self._config.max_file_bytes + _FORM_BYTES if upload else self._config.max_body_bytes

    def _wrap_send(self, context: RequestContext, send: Send) -> Send:
        """`send` with our headers and a deadline for the client to read."""

        async def send_out(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status, context.first_s = message["status"], time.perf_counter() - context.began_s
                message["headers"] = [*message.get("headers", ()), *self._headers(context)]
            try:
                async with asyncio.timeout(self._config.write_timeout_s):
                    await send(message)
            except TimeoutError:
                _log.warning("request %s was ended: its client does not read the response", context.id)
                context.scope.get("kvilt.abort", _nothing)()
                raise ClientDisconnected() from None

        return send_out

    def _headers(self, context: RequestContext) -> list[tuple[bytes, bytes]]:
        own = context.id.encode()
        more = [(b"x-request-id", own), (b"request-id", own), *_SECURITY_HEADERS]  # OpenAI's name and Anthropic's
        if context.origin is not None:
            more += [(b"access-control-allow-origin", context.origin.encode()), (b"vary", b"Origin")]
            more.append((b"access-control-expose-headers", b"x-request-id, retry-after"))
        if self._service.draining or (context.sends_body and not (context.body and context.body.whole)):
            more.append((b"connection", b"close"))  # the rest of the body will not be read
        return more

    def _record(self, context: RequestContext) -> None:
        """Write the access log and the metrics of a request."""
        took_s = time.perf_counter() - context.began_s
        route = getattr(context.scope.get("route"), "path", "other")
        method = context.scope["method"] if context.scope["method"] in _METHODS else "other"
        self._metrics.add(HTTP_REQUESTS, route=route, method=method, status=str(context.status or 499))
        self._metrics.observe(HTTP_SECONDS, took_s, route=route)
        end_span(context.span, route, context.status or 499)
        client = (context.scope.get("client") or ("-",))[0]
        log_access(context.scope, context.id, client, method, route, context.status or 499, took_s, context.first_s)


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": (
        "authorization, x-api-key, anthropic-version, anthropic-beta, content-type, x-request-id"
    ),
    "access-control-max-age": "600",
}


def _request_id(headers: Headers) -> str:
    """The client's own id if it has safe characters only, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _nothing() -> None:
    """In place of `kvilt.abort` where the server offers none."""
