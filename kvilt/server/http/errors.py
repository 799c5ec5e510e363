"""Errors as clients see them: one function maps any exception to a status and what to say; each API has its own body.

Messages come from kvilt's own errors or from this module, never from a traceback, so they contain no path and no
address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

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
    RankFailed,
    SessionUnknown,
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
    """An error response: its status, and the fields of its body."""

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
        """OpenAI's name for this kind of error."""
        return _TYPES.get(self.status_code, INVALID if self.status_code < 500 else SERVER)

    def body(self) -> dict[str, Any]:
        """The JSON body in the OpenAI format."""
        own = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**own, **self.more}}

    def response(self, scope: Scope | None = None) -> Response:
        """The whole response, in the format of the API that the request of this scope is for."""
        shape: ErrorShape = (scope or {}).get(SHAPE, HTTPError.body)
        return Response(orjson.dumps(shape(self)), self.status_code, self.headers, "application/json")


ErrorShape = Callable[[HTTPError], dict[str, Any]]  # the body of an error in the format of one API
SHAPE = "kvilt.error_shape"  # where the scope of a request has its API's; OpenAI's is the default


def renamed(error: HTTPError, names: Mapping[str, str]) -> tuple[str, str | None]:
    """The message and param of an error, with the name that an API has for a field of the internal request.

    The message names the field: bodies of other APIs have no place for it.
    """
    if error.param is None:
        return error.message, None
    name = names.get(error.param, error.param)
    message = error.message.replace(f"{error.param}:", f"{name}:", 1)
    return message if name in message else f"{name}: {message}", name


class ClientDisconnected(Exception):
    """The client has disconnected, so no answer is needed."""


def http_error_of(error: BaseException) -> HTTPError:
    """The error response for an exception. No other place maps exceptions to statuses."""
    if isinstance(error, BaseExceptionGroup):
        return http_error_of(error.exceptions[0])  # of several tasks: the first one is the cause
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
            code, tokens, limit = "context_length_exceeded", error.tokens, error.limit
            return HTTPError(400, str(error), param="messages", code=code, tokens=tokens, limit=limit)
        case QueueFull():
            return HTTPError(429, str(error), code="queue_full", headers={"retry-after": "1"})
        case WorkTimeout():
            return HTTPError(503, str(error), code="took_too_long", headers={"retry-after": "5", **_NO_RETRY})
        case Draining() | ModelClosed() | Cancelled():
            return draining_error()
        case StepHung() | RankFailed() | CompilerFailed() | PoolExhausted():
            return HTTPError(503, str(error), code=_unavailable(error), headers={"retry-after": "5"})
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
        case SessionUnknown():
            return HTTPError(404, str(error), param="session", code="session_not_found")
        case InputError() | TruncateError() | Unsupported() | KVError():
            return HTTPError(400, str(error), code="invalid_value")
        case _:
            _log.error("a request failed with an unexpected error", exc_info=error)
            return internal_error()


def draining_error() -> HTTPError:
    """The error while the server shuts down."""
    return HTTPError(
        503, "this server is shutting down; try again later", code="draining", headers={"retry-after": "5"}
    )


def internal_error() -> HTTPError:
    """The error for a bug of kvilt: details are in the log only."""
    return HTTPError(500, "internal error; the server's log has it under the request's id", code="internal_error")


def check_finish_reason(reason: str | None) -> str | None:
    """The reason as the OpenAI API knows it; raises for a request that the server itself ended."""
    if reason == "cancelled":
        raise HTTPError(503, "the request was ended by the server", code="cancelled")
    return reason


def _unavailable(error: StepHung | RankFailed | CompilerFailed | PoolExhausted) -> str:
    """The code of an error that may be gone after a while."""
    match error:
        case StepHung():
            return "step_hung"
        case RankFailed():
            return "rank_failed"
        case CompilerFailed():
            return "compiler_unavailable"
        case PoolExhausted():
            return "kv_memory_full"


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
    """Errors that the router raises itself."""
    words = {404: "there is no such route", 405: "this route does not take this method"}
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return HTTPError(error.status_code, words.get(error.status_code, "the request cannot be read"), headers=headers)


def _invalid(error: RequestValidationError) -> HTTPError:
    """The first invalid field, by its name."""
    first = error.errors()[0]
    # The first part of `loc` is body, query or path.
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    if first["type"] == "extra_forbidden":
        return HTTPError(400, f"the field {param} is not supported; leave it out", param=param, code="unknown_field")
    if first["type"] == "missing":
        return HTTPError(400, f"{param or 'the body'} is missing", param=param, code="missing_field")
    return HTTPError(400, f"{param or 'the body'}: {first['msg']}", param=param, code="invalid_value")
