"""Requests of `/v1/responses`; every field that is not named here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...sampling.params import MAX_TEMPERATURE
from ..http.schema import RequestModel
from ..openai.fields import (
    JsonObjectFormat,
    MaxTokens,
    ReasoningEffort,
    Salt,
    TextFormat,
    ToolName,
    TopLogprobs,
)
from ..sessions.fields import SessionField
from .items import InputItem
from .tools import IGNORED, ResponseTools

ResponseId = Annotated[str, Field(pattern=r"^resp_[0-9a-f]{32}$", description="The id of a stored response.")]


class SchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted without effect: a schema is always enforced.")


class TextConfig(RequestModel):
    """The format of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=IGNORED)


class ReasoningConfig(RequestModel):
    """How much the model reasons."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = Field(None, description=IGNORED)
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=IGNORED)
    context: Annotated[str, Field(max_length=64)] | None = Field(None, description=IGNORED)


class NamedToolChoice(RequestModel):
    """Forces a call of this tool."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedTools(RequestModel):
    """The tools that may be called; the others are left out of the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=1024, fail_fast=True)]


def _choice_tag(value: Any) -> str:
    if isinstance(value, str):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else "named"


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedToolChoice, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice_tag),
]


class ResponsePrompt(RequestModel):
    """What a prompt is made of."""

    model: Annotated[str, Field(max_length=512)] | None = None
    # The server's own limit is lower; this one stops validation early.
    input: str | Annotated[list[InputItem], Field(max_length=10_000, fail_fast=True)] | None = None
    instructions: str | None = Field(None, description="A system message; not kept for the next response.")
    previous_response_id: ResponseId | None = Field(None, description="The stored response that the input continues.")
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest messages of a conversation that does not fit."
    )
    conversation: None = None
    personality: Annotated[str, Field(max_length=64)] | None = Field(None, description=IGNORED)


class ResponseStreamOptions(RequestModel):
    """How events look."""

    include_obfuscation: bool | None = Field(None, description=IGNORED)


class ResponseRequest(ResponsePrompt):
    """A request for a response."""

    max_output_tokens: MaxTokens | None = Field(None, description="The rest of the context by default.")
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = Field(None, description="1 by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64)] | None = Field(
        None, description="reasoning.encrypted_content, message.output_text.logprobs; others have no effect."
    )
    store: bool | None = Field(None, description="Keep the response and its KV, for the next one; true by default.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="A name under which the KV of the latest response is kept from being evicted."
    )
    prompt_cache_retention: Annotated[str, Field(max_length=32)] | None = Field(None, description=IGNORED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=IGNORED)
    cache_salt: Salt | None = None
    session: SessionField | None = Field(None, description="The session whose KV is used, and which gets a turn.")
    max_tool_calls: Annotated[int, Field(ge=1)] | None = Field(None, description=IGNORED)
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, description=IGNORED)
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(None, description=IGNORED)
    client_metadata: dict[str, Any] | None = Field(None, description=IGNORED)
    context_management: list[Any] | None = Field(None, description=IGNORED)
    background: Literal[False] | None = Field(None, description="Refused unless false.")
    prompt: None = None
    moderation: None = None
