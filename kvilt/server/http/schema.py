"""The two kinds of pydantic models, and the shape of every error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """What a client sends: no field that is not named here, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ResponseModel(BaseModel):
    """What a client gets."""

    model_config = ConfigDict(frozen=True)


class ErrorBody(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    index: int | None = None  # kv_mismatch: the first token that differs
    tokens: int | None = None  # context_length_exceeded: how many are needed
    limit: int | None = None  # and how many there is room for


class Error(ResponseModel):
    """Every answer that is no success."""

    error: ErrorBody
