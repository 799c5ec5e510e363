"""What the server answers, for the OpenAPI document and for tests; routes write these shapes by hand."""

from __future__ import annotations

from typing import Any, Literal

from .fields import Shown


class ErrorBody(Shown):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    index: int | None = None  # kv_mismatch: the first token that differs


class Error(Shown):
    """Every answer that is no success."""

    error: ErrorBody


class CachedTokens(Shown):
    """How much of a prompt was not computed."""

    cached_tokens: int
    cache_write_tokens: int
    blended_tokens: int


class DraftedTokens(Shown):
    """What became of drafts."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shown):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: DraftedTokens
    kvilt: dict[str, Any]


class Kept(Shown):
    """The handle that `kv_out` asked for."""

    id: str
    tokens: int
    resident: bool
    pinned: bool
    expires_in_s: float
    kv_bytes: int
    maker: str  # base, or an adapter by content and scale


class CallFunction(Shown):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class Call(Shown):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CallFunction


class AnswerMessage(Shown):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class TopToken(Shown):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopToken):
    """A drawn token, and likely ones in its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(Shown):
    """Logprobs of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(Shown):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    kv: Kept | None = None


class ChatCompletion(Shown):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(Shown):
    """Logprobs over the tokens of a text; those of an echoed prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shown):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    kv: Kept | None = None


class TextCompletion(Shown):
    """Continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(Shown):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None  # an adapter's base model
    max_model_len: int


class ModelList(Shown):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(Shown):
    """How the server is."""

    status: Literal["ok", "draining", "hung"]


class Version(Shown):
    """Which kvilt this is."""

    version: str


class Cleared(Shown):
    """Something was forgotten."""

    cleared: bool
