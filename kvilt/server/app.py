"""The application: routes, errors, the OpenAPI document and the static page, behind the edge."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from .edge import Edge
from .page import Page
from .refusal import refusal_of
from .routes import admin, certificates, chat, chunks, completions, health, kv, lora, models, tokens
from .service import Service

_ROUTERS = tuple(
    one.router for one in (chat, completions, models, tokens, chunks, certificates, kv, admin, lora, health)
)


def make_app(service: Service) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(title="kvilt", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for router in _ROUTERS:
        app.include_router(router)
    page = Page()
    for path in page.paths:
        app.add_api_route(path, _served(page, path), include_in_schema=False, methods=["GET", "HEAD"])
    app.add_exception_handler(HTTPException, _refuse)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    return Edge(app, service, page.__contains__)


def _served(page: Page, path: str) -> Any:
    async def file() -> Response:
        return page.response(path)

    return file


async def _refuse(_request: Request, error: Exception) -> Response:
    """Where no route was found: errors inside routes are theirs."""
    return refusal_of(error).response()


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, which FastAPI writes but for the keys and its own kind of validation error."""
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
