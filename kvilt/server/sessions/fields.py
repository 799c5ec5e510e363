"""The field `session` of a request, in every API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...engine.sessions.session import MAX_NAME, SessionOptions
from ..http.schema import RequestModel

IMPORT_PATH = "/v1/sessions/import"  # takes the bytes of a session's file
SessionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Lifetime = Annotated[float, Field(gt=0, le=1e9)]


class SessionParam(RequestModel):
    """The session of a request, and what the client hints at."""

    name: SessionName
    ttl_s: Lifetime | None = Field(None, description="How long it is kept after this request.")
    hint: Literal["will_return", "done"] | None = Field(
        None, description="will_return: its KV is evicted after that of others. done: it is given back."
    )
    exact: bool | None = Field(None, description="False: KV behind text that was cut out may be moved and repaired.")


SessionField = SessionName | SessionParam


def session_options(given: SessionField | None) -> SessionOptions | None:
    """What the engine is told of a session."""
    if given is None or isinstance(given, str):
        return None if given is None else SessionOptions(given)
    return SessionOptions(
        given.name, given.ttl_s, will_return=given.hint == "will_return", done=given.hint == "done", exact=given.exact
    )


def session_json(given: SessionField | None) -> str | dict[str, Any] | None:
    """The field as the internal request has it."""
    return given if given is None or isinstance(given, str) else given.model_dump(exclude_none=True)
