"""Requests for /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .fields import MaxTokens, Sampling, Strict, TopLogprobs

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(max_length=256)]


class TextPart(Strict):
    """A piece of a message; other kinds than text are refused."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]


class SystemMessage(Strict):
    """Instructions; `developer` is another name for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What a user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Strict):
    """A call that the model made."""

    name: ToolName
    arguments: str


class MadeCall(Strict):
    """A tool call of an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Accepted without effect: streams have it.")


class AssistantMessage(Strict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=128, fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = Field(None, description="Accepted without effect.")
    annotations: list[Any] | None = Field(None, description="Accepted without effect.")
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: CallId | None = None
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# The server's own limit is lower; this one ends the checking of a flood.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]


class FunctionSpec(Strict):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Accepted without effect: forced calls always follow their schema.")


class Tool(Strict):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Strict):
    """A function by name."""

    name: ToolName


class ChosenTool(Strict):
    """This tool and no other."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """A conversation to answer."""

    messages: Messages
    max_tokens: MaxTokens | None = Field(None, description="By default what is left of the context.")
    max_completion_tokens: MaxTokens | None = Field(None, description="Another name for max_tokens.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
