"""Requests and answers of the routes of sessions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..http.schema import RequestModel, ResponseModel
from .fields import Lifetime, SessionName


class ForkSessionRequest(RequestModel):
    """A second session with the same turns."""

    name: SessionName
    turn: Annotated[str, Field(max_length=64)] | None = Field(None, description="Only the turns that lead to this one.")
    ttl_s: Lifetime | None = None


class ExportHandlesRequest(RequestModel):
    """A session's file from KV handles."""

    name: SessionName
    kv: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=128)] = Field(description="Handles.")
    conversation: str = Field("", description="A text that the import of the file gives back.")


class SessionTurn(ResponseModel):
    """A prompt and its answer."""

    id: str
    parent: str | None
    shared_tokens: int  # with its parent
    tokens: int
    resident: bool
    origin: str
    maker: str


class SessionObject(ResponseModel):
    """A session with its tree of turns."""

    id: str
    object: Literal["session"]
    name: str
    turns: list[SessionTurn]
    tokens: int
    exact: bool
    expires_in_s: float
    volatile_lines: list[str] | None = None  # of its system prompt, that change from request to request
    kv: Literal["used", "recomputed", "none"] | None = None  # of an import: what became of the KV in the file
    why: str | None = None
    conversation: str | None = None  # of an import: the text that the file was exported with


class SessionSummary(ResponseModel):
    """A session without its tree."""

    id: str
    object: Literal["session"]
    name: str
    turns: int
    resident_turns: int
    tokens: int
    exact: bool
    expires_in_s: float


class SessionList(ResponseModel):
    """All sessions of a caller."""

    object: Literal["list"]
    data: list[SessionSummary]
