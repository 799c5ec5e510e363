"""Requests of `/v1/messages` and `/v1/messages/count_tokens`; every field that is not named here is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...sampling.params import MAX_STOPS, MAX_TEMPERATURE
from ..http.schema import RequestModel
from ..openai.fields import CallId, MaxTokens, Stop, ToolName
from ..sessions.fields import SessionField

IGNORED = "Accepted without effect."


class CacheControl(RequestModel):
    """The KV of the prompt up to this block is pinned for so long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="5m by default.")
    scope: Annotated[str, Field(max_length=64)] | None = Field(None, description=IGNORED)


class TextBlock(RequestModel):
    """Some text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, description=IGNORED)


class PlainTextSource(RequestModel):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class DocumentBlock(RequestModel):
    """A document that is plain text; its title and context stand before it."""

    type: Literal["document"]
    source: PlainTextSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None
    citations: dict[str, Any] | None = Field(None, description=IGNORED)


class ToolReferenceBlock(RequestModel):
    """The definition of a tool, which the prompt has here."""

    type: Literal["tool_reference"]
    tool_name: ToolName
    cache_control: CacheControl | None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=1024, fail_fast=True)]
ResultBlocks = Annotated[
    list[Annotated[TextBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")]],
    Field(max_length=1024, fail_fast=True),
]


class ToolResultBlock(RequestModel):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | ResultBlocks | None = None
    is_error: bool | None = Field(None, description="Accepted without effect: the content says what went wrong.")
    cache_control: CacheControl | None = None
    toolset_name: str | None = Field(None, description=IGNORED)


class ToolUseBlock(RequestModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = Field(None, description=IGNORED)
    toolset_name: str | None = Field(None, description=IGNORED)


class ThinkingBlock(RequestModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description=IGNORED)


class RedactedThinkingBlock(RequestModel):
    """Reasoning that this server cannot read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


UserBlocks = Annotated[
    list[Annotated[TextBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]],
    Field(min_length=1, max_length=1024, fail_fast=True),
]
AssistantBlocks = Annotated[
    list[
        Annotated[
            TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
            Field(discriminator="type"),
        ]
    ],
    Field(max_length=1024, fail_fast=True),
]


class UserTurn(RequestModel):
    """What a user says, and what tools answered."""

    role: Literal["user"]
    content: str | UserBlocks


class AssistantTurn(RequestModel):
    """An earlier answer."""

    role: Literal["assistant"]
    content: str | AssistantBlocks


class SystemTurn(RequestModel):
    """Instructions between other messages."""

    role: Literal["system"]
    content: str | TextBlocks


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class CustomTool(RequestModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=65536)] | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool | None = Field(None, description="Accepted without effect: forced calls always follow their schema.")
    defer_loading: bool | None = Field(None, description="true: in the prompt where a tool_reference names it.")
    eager_input_streaming: bool | None = Field(None, description="Accepted without effect: arguments always stream.")
    input_examples: list[dict[str, Any]] | None = Field(None, description=IGNORED)
    allowed_callers: list[str] | None = Field(None, description=IGNORED)


class AutoChoice(RequestModel):
    """The model decides; `none` and `any` are never and always."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    """A call of this tool is forced."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


def _choice_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "tool" if kind == "tool" else "auto"


ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("auto")] | Annotated[NamedChoice, Tag("tool")], Discriminator(_choice_tag)
]


class ThinkingConfig(RequestModel):
    """Whether the model reasons first: the variable enable_thinking of its chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(None, description=IGNORED)
    display: Literal["summarized", "omitted"] | None = Field(None, description="omitted: reasoning is left out.")


class JsonOutputFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestModel):
    """The effort of reasoning, and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class RequestMetadata(RequestModel):
    """Who asks."""

    user_id: Annotated[str, Field(max_length=4096)] | None = Field(None, description=IGNORED)


class DiagnosticsParam(RequestModel):
    """Which earlier answer a request is compared with."""

    previous_message_id: Annotated[str, Field(max_length=256)] | None = None


class CountTokensRequest(RequestModel):
    """A conversation whose tokens are counted."""

    model: Annotated[str, Field(max_length=512)]
    # The server's own limit is lower; this one stops validation early.
    messages: Annotated[list[Turn], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[CustomTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="A breakpoint after the last block.")
    context_management: dict[str, Any] | None = Field(None, description=IGNORED)
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Refused unless empty.")
    speed: Literal["standard", "fast"] | None = Field(None, description=IGNORED)
    user_profile_id: str | None = Field(None, description=IGNORED)
    workspace_id: str | None = Field(None, description=IGNORED)


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = Field(None, description="1 by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description=IGNORED)
    inference_geo: Annotated[str, Field(max_length=64)] | None = Field(None, description=IGNORED)
    diagnostics: DiagnosticsParam | None = Field(None, description="Say which part of the prompt changed.")
    container: None = None
    session: SessionField | None = Field(None, description="The session whose KV is used, and which gets a turn.")
