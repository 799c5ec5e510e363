"""Errors as clients see them: one function from any exception to a status and the OpenAI shape.

What a client reads comes from kvilt's own errors or from here, never from a traceback, so no path and no address is in
it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...errors import (
    BlobError,
    Cancelled,
    CompilerFailed,
    ContextOverflow,
    Draining,
    GrammarError,
    GrammarFailed,
    HandleError,
    HandleExpired,
    HandleLimit,
    HandleMismatch,
    HandleUnknown,
    InputError,
    KVError,
    ModelClosed,
    NumericsError,
    ParamError,
    PoolExhausted,
    QueueFull,
    StepHung,
    TemplateError,
    TruncateError,
    Unsupported,
    WorkTimeout,
)

_log = logging.getLogger(__name__)
INVALID = "invalid_request_error"
SERVER = "server_error"
_NO_RETRY = {"x-should-retry": "false"}  # the openai client repeats a 409 unless told not to
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class HTTPError(HTTPException):
    """A request that is not served, as it is told to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code
        self.more = more

    @property
    def type(self) -> str:
        """The kind of error, in OpenAI's words."""
        return _TYPES.get(self.status_code, INVALID if self.status_code < 500 else SERVER)

    def body(self) -> dict[str, Any]:
        """The OpenAI shape."""
        own = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**own, **self.more}}

    def response(self) -> Response:
        """The whole answer."""
        return Response(orjson.dumps(self.body()), self.status_code, self.headers, "application/json")


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


def http_error_of(error: BaseException) -> HTTPError:
    """What a client is told of an error. The only place where errors become statuses."""
    if isinstance(error, BaseExceptionGroup):
        return http_error_of(error.exceptions[0])  # of several tasks: they say the same, or the first says why
    match error:
        case HTTPError():
            return error
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            return _http(error)
        case HandleError():
            return _handle(error)
        case HandleLimit():
            return HTTPError(409, str(error), code="kv_limit", headers=_NO_RETRY)
        case ContextOverflow():
            return HTTPError(400, str(error), param="messages", code="context_length_exceeded")
        case QueueFull():
            return HTTPError(429, str(error), code="queue_full", headers={"retry-after": "1"})
        case WorkTimeout():
            return HTTPError(503, str(error), code="took_too_long", headers={"retry-after": "5", **_NO_RETRY})
        case Draining() | ModelClosed() | Cancelled():
            return draining_error()
        case StepHung():
            return HTTPError(503, str(error), code="step_hung", headers={"retry-after": "5"})
        case CompilerFailed():
            return HTTPError(503, str(error), code="compiler_unavailable", headers={"retry-after": "5"})
        case PoolExhausted():
            return HTTPError(503, str(error), code="kv_memory_full", headers={"retry-after": "5"})
        case NumericsError():
            return HTTPError(500, "the model computed no usable logits for this request", code="bad_logits")
        case GrammarError() | GrammarFailed():
            return HTTPError(400, str(error), param="response_format", code="invalid_grammar")
        case TemplateError():
            return HTTPError(400, str(error), param="messages", code="invalid_messages")
        case ParamError():
            return HTTPError(400, str(error), param=error.field, code="invalid_value")
        case BlobError():
            return HTTPError(400, f"the saved KV cannot be used here: {error}", param="name", code="kv_file")
        case InputError() | TruncateError() | Unsupported() | KVError():
            return HTTPError(400, str(error), code="invalid_value")
        case _:
            _log.error("a request failed in a way it should not", exc_info=error)
            return internal_error()


def draining_error() -> HTTPError:
    """The server is about to end."""
    return HTTPError(503, "this server is shutting down; ask again", code="draining", headers={"retry-after": "5"})


def internal_error() -> HTTPError:
    """All that a client learns of a mistake of ours."""
    return HTTPError(500, "something went wrong inside the server; its log has the request's id", code="internal_error")


def _handle(error: HandleError) -> HTTPError:
    match error:
        case HandleUnknown():
            return HTTPError(404, str(error), param="kv", code="kv_not_found")
        case HandleExpired():
            return HTTPError(410, str(error), param="kv", code="kv_expired")
        case HandleMismatch():
            return HTTPError(409, str(error), param="kv", code="kv_mismatch", headers=_NO_RETRY, index=error.index)
        case _:
            return HTTPError(400, str(error), param="kv", code="invalid_value")


def _http(error: HTTPException) -> HTTPError:
    """What the router says by itself."""
    words = {404: "there is no such route", 405: "this route does not take this method"}
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return HTTPError(error.status_code, words.get(error.status_code, "the request cannot be read"), headers=headers)


def _invalid(error: RequestValidationError) -> HTTPError:
    """The first field that is wrong, by its name."""
    first = error.errors()[0]
    # The first part of the place says body, query or path; tags of unions say which kind was meant, and help too.
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "extra_forbidden":
        return HTTPError(400, f"the field {param} is not supported; leave it out", param=param, code="unknown_field")
    if first["type"] == "missing":
        return HTTPError(400, f"{param or 'the body'} is missing", param=param, code="missing_field")
    return HTTPError(400, f"{param or 'the body'}: {first['msg']}", param=param, code="invalid_value")
