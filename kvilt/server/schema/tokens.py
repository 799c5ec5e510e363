"""Requests and answers of the tokenizer's routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .chat import Messages, Tool
from .fields import Shown, Strict, TokenId


class TokenizeRequest(Strict):
    """A prompt, or messages, to cut into tokens."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    add_special_tokens: bool = Field(True, description="Whether a prompt begins a text.")
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    add_generation_prompt: bool = Field(True, description="Whether messages are followed by the begin of an answer.")
    return_token_strs: bool | None = None


class Tokens(Shown):
    """Tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """Tokens to put together."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(Shown):
    """The text of tokens, special ones written out."""

    prompt: str


class TokenizerInfo(Shown):
    """What there is to know of the tokenizer."""

    vocab_size: int
    max_model_len: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    special_tokens: dict[str, int]
    named_tokens: dict[str, str]
    chat_template: str | None
    tool_parser: str
    reasoning: list[str] | None
