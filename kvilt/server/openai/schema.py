"""Requests and answers of `/v1/chat/completions` and `/v1/completions`; routes write the answers by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ...sampling.params import MAX_TOKENS
from ..http.body import validate
from ..http.schema import RequestModel, ResponseModel
from ..kv.schema import KVHandle
from .fields import (
    ChatMessage,
    Content,
    GenerationRequest,
    Ids,
    MaxTokens,
    Messages,
    ReasoningEffort,
    TemplateKwargs,
    Tool,
    ToolName,
    TopLogprobs,
)


class ChosenFunction(RequestModel):
    """A function by name."""

    name: ToolName


class ChosenTool(RequestModel):
    """Forces a call of this tool."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedToolSet(RequestModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=1024, fail_fast=True)]


class AllowedToolsChoice(RequestModel):
    """Only these tools; the prompt lists no other."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolSet


class Prediction(RequestModel):
    """Text that the answer is expected to repeat."""

    type: Literal["content"]
    content: Content


class ChatRequest(GenerationRequest):
    """A conversation to answer."""

    messages: Messages
    max_tokens: MaxTokens | None = Field(None, description="The rest of the context by default.")
    max_completion_tokens: MaxTokens | None = Field(None, description="Another name for max_tokens.")
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="The template's variable of this name; none also sets enable_thinking to false."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the text of the last message, the assistant's; it is not repeated."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False with continue_final_message, else true; it follows from that field."
    )
    prediction: Prediction | None = Field(
        None, description="Text that the answer is expected to repeat; with a drafter, drafts are looked up in it."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Accepted without effect.")
    modalities: list[Literal["text"]] | None = Field(None, description="Accepted without effect: answers are text.")
    functions: None = Field(None, description="Former name of tools; null is accepted.")
    function_call: None = Field(None, description="Former name of tool_choice; null is accepted.")
    audio: None = None
    web_search_options: None = None


_CHAT = TypeAdapter(ChatRequest)


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """The request that other APIs are translated to, from its JSON."""
    made: ChatRequest = validate(fields, _CHAT)
    return made


_MESSAGES = TypeAdapter(list[ChatMessage])


def chat_messages(given: list[dict[str, Any]]) -> list[ChatMessage]:
    """The messages of such a request, from their JSON."""
    made: list[ChatMessage] = validate(given, _MESSAGES)
    return made


# The server's own limit is lower; these stop validation early.
Texts = Annotated[list[str], Field(min_length=1, max_length=10_000, fail_fast=True)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=10_000, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """A prompt to continue, or several."""

    prompt: str | Ids | Texts | IdLists
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="16 by default; 0 is possible with echo only, to score the prompt."
    )
    logprobs: TopLogprobs | None = Field(
        None, description="Logprobs of each token, and of this many most likely tokens."
    )
    echo: bool | None = Field(
        None, description="Start the text with the prompt; with logprobs, also those of the prompt's tokens."
    )
    best_of: Literal[1] | None = Field(None, description="1, which is what it means to leave it out.")
    suffix: None = None


class PromptTokensDetails(ResponseModel):
    """Prompt tokens that were cached, computed and blended."""

    cached_tokens: int
    cache_write_tokens: int
    blended_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Accepted and rejected draft tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(ResponseModel):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    kvilt: dict[str, Any]


class ToolCallFunction(ResponseModel):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: ToolCallFunction


class AnswerMessage(ResponseModel):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TopToken(ResponseModel):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopToken):
    """A sampled token, and the most likely tokens at its position."""

    top_logprobs: list[TopToken]


class ChatLogprobs(ResponseModel):
    """Logprobs of an answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition"]
    kv: KVHandle | None = None


class ChatCompletion(ResponseModel):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    warnings: list[str] | None = None


class TextLogprobs(ResponseModel):
    """Logprobs over the tokens of a text; those of an echoed prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "repetition"]
    kv: KVHandle | None = None


class TextCompletion(ResponseModel):
    """Continuations of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: TokenUsage
    warnings: list[str] | None = None
