"""Answers of the Responses API as the OpenAPI document lists them; routes write them by hand."""

from __future__ import annotations

from typing import Any, Literal

from ..http.schema import ResponseModel


class InputTokensDetails(ResponseModel):
    """Tokens of the prompt that were cached, and computed."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    """Tokens of the answer that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    kvilt: dict[str, Any]


class ResponseObject(ResponseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "cancelled", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    warnings: list[str] | None = None


class DeletedResponse(ResponseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputTokens(ResponseModel):
    """The tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int
