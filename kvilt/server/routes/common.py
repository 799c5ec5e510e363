"""What every route needs: its service, its caller, and the refusals that the OpenAPI document names."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from ..body import StrictRequest
from ..gate import Caller
from ..refusal import ClientGone, refusal_of
from ..schema.answers import Error
from ..schema.fields import Salt
from ..service import Service, caller_of, service_of

Here = Annotated[Service, Depends(service_of)]
Who = Annotated[Caller, Depends(caller_of)]


def owner_of(caller: Who, cache_salt: Salt | None = None) -> Caller:
    """Whose handles these are: those of a key, or of a salt of a key."""
    return caller.salted(cache_salt)


Owner = Annotated[Caller, Depends(owner_of)]

_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "A key is needed.",
    403: "This Host, this origin or this key may not ask.",
    404: "There is no such model or handle.",
    408: "The body did not come in time.",
    409: "The KV handle holds other tokens, or there are too many handles.",
    410: "The KV handle has expired.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The server is shutting down or stuck.",
}


def refusals(*more: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route: those of every route, and these."""
    always = (401, 403, 500, 503)
    return {status: {"model": Error, "description": _REASONS[status]} for status in sorted({*always, *more})}


ASKING = refusals(400, 404, 408, 409, 410, 413, 415, 429)
BODY = refusals(400, 404, 408, 413, 415)


class StrictRoute(APIRoute):
    """A route that reads JSON strictly, and whose errors become refusals here and nowhere else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            try:
                return await handle(StrictRequest(request.scope, request.receive))
            except ClientGone:
                raise
            except Exception as error:
                return refusal_of(error).response()

        return strictly
