"""Answers of the Messages API as the OpenAPI document lists them; routes write them by hand."""

from __future__ import annotations

from typing import Any, Literal

from ..http.schema import ResponseModel


class CacheCreation(ResponseModel):
    """Tokens that were pinned by this request, by how long."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(ResponseModel):
    """Counts of tokens; the prompt has the sum of the three counts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    kvilt: dict[str, Any]


class AnthropicMessage(ResponseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: dict[str, Any] | None = None


class TokenCount(ResponseModel):
    """The tokens of a prompt."""

    input_tokens: int


class AnthropicModel(ResponseModel):
    """A model."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(ResponseModel):
    """All models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnthropicErrorBody(ResponseModel):
    """What went wrong."""

    type: str
    message: str
    param: str | None
    code: str | None


class AnthropicError(ResponseModel):
    """Every answer that is no success."""

    type: Literal["error"]
    error: AnthropicErrorBody
