"""Requests for /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...sampling.params import MAX_TOKENS
from .fields import Sampling, TokenId, TopLogprobs

Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


# The server's own limit is lower; these end the checking of a flood.
Texts = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
Many = Annotated[list[Ids], Field(min_length=1, max_length=10_000, fail_fast=True)]


class CompletionRequest(Sampling):
    """A prompt to continue, or several."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=10_000, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="16 by default; 0 only beside echo, to score the prompt."
    )
    logprobs: TopLogprobs | None = Field(None, description="Those of each token and of so many likelier ones.")
    echo: bool | None = Field(None, description="Begin the text with the prompt; with logprobs, those of its tokens.")
