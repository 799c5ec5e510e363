"""What every route needs: its service, its caller, strict JSON, and the errors that the OpenAPI document lists."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..auth import Caller
from ..openai.fields import Salt
from ..service import Service, caller_of, service_of
from .body import StrictRequest
from .errors import ClientDisconnected, http_error_of
from .responses import cancel_on_disconnect
from .schema import Error, ResponseModel


# These are async because FastAPI runs every other dependency in a thread of its own.
async def _service(request: Request) -> Service:
    return service_of(request)


async def _caller(request: Request) -> Caller:
    return caller_of(request)


ServiceDep = Annotated[Service, Depends(_service)]
CallerDep = Annotated[Caller, Depends(_caller)]


async def salted_caller(caller: CallerDep, cache_salt: Salt | None = None) -> Caller:
    """The owner of handles: the key, or the key with a cache salt."""
    return caller.salted(cache_salt)


SaltedCallerDep = Annotated[Caller, Depends(salted_caller)]
_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "A key is needed.",
    403: "This Host, this origin or this key may not ask.",
    404: "There is no such model, handle, file or batch.",
    408: "The body did not come in time.",
    409: "The KV handle holds other tokens, there are too many handles, files or batches, or a file is in use.",
    410: "The KV handle has expired.",
    413: "The body is too large.",
    415: "The body is not JSON, or no form where a file is sent.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The server is shutting down or stuck.",
}


def error_responses(*more: int, model: type[ResponseModel] = Error) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for the OpenAPI document: those of every route, and `more`; `model` is their body."""
    always = (401, 403, 500, 503)
    return {status: {"model": model, "description": _REASONS[status]} for status in sorted({*always, *more})}


_GENERATION = (400, 404, 408, 409, 410, 413, 415, 429)
GENERATION_ERRORS = error_responses(*_GENERATION)
BODY_ERRORS = error_responses(400, 404, 408, 413, 415, 429)


def generation_responses(
    model: type[ResponseModel], error: type[ResponseModel] = Error, stream: str = "text/event-stream"
) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that generates, for the OpenAPI document: one object, or a stream of events."""
    streamed: dict[str, Any] = {stream: {}}  # a text of events, which no schema of one value describes
    return {200: {"model": model, "content": streamed}, **error_responses(*_GENERATION, model=error)}


class NoResponse(Response):
    """The response to a client that has disconnected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


class StrictRoute(APIRoute):
    """A route that parses JSON strictly, stops when its client disconnects, and maps exceptions to error responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation
        shape = None if kind is None else TypeAdapter(kind)

        async def strictly(request: Request) -> Response:
            service = service_of(request)
            own = StrictRequest(request.scope, request.receive)
            caller: Caller | None = request.scope.get("kvilt.caller")

            async def work() -> Response:
                await own.check(shape, service.llm.offload, "" if caller is None else caller.tenant)
                return await handle(own)

            try:
                await own.read()
                return await cancel_on_disconnect(request.receive, work())
            except ClientDisconnected:
                return NoResponse()
            except Exception as error:
                return http_error_of(error).response(request.scope)
            finally:
                service.memory_trimmer.ended(own.body_bytes)

        return strictly


class StreamingRoute(APIRoute):
    """A route that reads its body itself, piece by piece, and maps exceptions to error responses."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def mapped(request: Request) -> Response:
            try:
                return await handle(request)
            except (ClientDisconnect, ClientDisconnected):
                return NoResponse()
            except Exception as error:
                return http_error_of(error).response(request.scope)

        return mapped
