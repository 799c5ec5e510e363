"""The ASGI applications: the API with its OpenAPI document and static page, and `/metrics` on a port of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from . import admin
from .anthropic import routes as anthropic
from .anthropic.errors import anthropic_error
from .auth import check_host
from .batches import routes as batches
from .batches.queue import BatchQueue
from .chats import routes as chats
from .config import ServeConfig
from .documents import routes as documents
from .files import routes as files
from .http.errors import ErrorShape, HTTPError, http_error_of
from .http.middleware import RequestMiddleware
from .kv import routes as kv
from .metrics import CONTENT_TYPE
from .ollama import routes as ollama
from .ollama.errors import ollama_error
from .openai import chat, completions, embeddings, models, tokenizer
from .responses import routes as responses
from .responses.writer import responses_error
from .service import Service
from .sessions import routes as sessions

# Also the order in which paths are matched.
_ROUTERS = (
    chat.router,
    completions.router,
    embeddings.router,
    responses.router,
    files.uploads,
    files.router,
    batches.router,
    anthropic.router,
    ollama.router,
    models.router,
    tokenizer.router,
    kv.router,
    sessions.router,
    chats.router,
    documents.router,
    admin.router,
    admin.health_router,
)


def make_app(service: Service, queue: BatchQueue) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(title="kvilt", version=__version__, docs_url=None, redoc_url=None)
    app.state.service, app.state.batches = service, queue
    for router in _ROUTERS:
        app.include_router(router)
    page = StaticFiles()
    for path in page.paths:
        app.add_api_route(path, _served(page, path), include_in_schema=False, methods=["GET", "HEAD"])
    app.add_exception_handler(HTTPException, _refuse)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return RequestMiddleware(app, service, page.__contains__, error_shape, {files.UPLOAD_PATH})


def error_shape(path: str, headers: Mapping[str, str]) -> ErrorShape:
    """How errors look on a path, for requests that reach no route as well."""
    if path.startswith("/v1/messages") or (path.startswith("/v1/models") and "anthropic-version" in headers):
        return anthropic_error
    if path.startswith("/api/"):
        return ollama_error
    if path.startswith("/v1/responses"):
        return responses_error
    return HTTPError.body


def _served(page: StaticFiles, path: str) -> Any:
    async def file() -> Response:
        return page.response(path)

    return file


async def _refuse(request: Request, error: Exception) -> Response:
    """Errors of the router; a route maps its own errors."""
    return http_error_of(error).response(request.scope)


def _document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document with our API keys, and without FastAPI's own validation errors."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, routes=app.routes, description="An OpenAI-compatible API."
        )
        keyed = bool(app.state.service.config.api_keys)
        if keyed:
            made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in made["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if keyed and path not in ("/health", "/ready"):
                    operation["security"] = [{"key": []}]
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema


def make_metrics_app(config: ServeConfig, exposition: Callable[[], Awaitable[str]]) -> ASGIApp:
    """/metrics as an ASGI application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await _answer(config, exposition, scope)
        except Exception as error:
            answer = http_error_of(error).response()
        answer.headers["connection"] = "close"  # request bodies are not read
        await answer(scope, receive, send)

    return app


async def _answer(config: ServeConfig, exposition: Callable[[], Awaitable[str]], scope: Scope) -> Response:
    check_host(Headers(scope=scope), config)  # DNS rebinding is possible on this port, too
    if scope["path"] != "/metrics":
        raise HTTPError(404, "this port serves only /metrics", code="not_found")
    if scope["method"] not in ("GET", "HEAD"):
        raise HTTPError(405, "this route does not take this method")
    return Response(await exposition(), 200, {"cache-control": "no-store"}, CONTENT_TYPE)


WEB = Path(__file__).parent / "web"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}


class StaticFiles:
    """The static files of one folder, by URL path. They are listed when the server starts, so a request never resolves
    a path."""

    def __init__(self, folder: Path = WEB) -> None:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix in _KINDS]
        self._files = {f"/{file.relative_to(folder).as_posix()}": file for file in files}
        if "/index.html" in self._files:
            self._files["/"] = self._files["/index.html"]

    @property
    def paths(self) -> list[str]:
        """All URL paths."""
        return list(self._files)

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def response(self, path: str) -> Response:
        """One file."""
        file = self._files[path]
        return Response(file.read_bytes(), 200, {"cache-control": "no-cache"}, _KINDS[file.suffix])
