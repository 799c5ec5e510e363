"""From a Responses request to the internal chat request: tools, choices, formats, and messages that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import ContextOverflow, ParamError
from ..openai.fields import JsonObjectFormat
from ..openai.schema import ChatRequest, chat_request
from .items import INPUT, Message
from .schema import (
    AllowedTools,
    CustomToolSpec,
    FunctionTool,
    GrammarInput,
    NamedToolChoice,
    ResponsePrompt,
    ResponseRequest,
    SchemaFormat,
)

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class TranslatedResponse:
    """A Responses request as the internal request."""

    body: ChatRequest
    custom: tuple[str, ...]  # the names of custom tools
    forced: str | None  # the custom tool whose input is the whole answer
    warnings: tuple[str, ...]  # what was skipped


def translate(body: ResponsePrompt, messages: list[Message]) -> TranslatedResponse:
    """The internal request for these messages, those of the conversation before included."""
    told = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if not messages:
        raise ParamError("input", "is empty; there is nothing to answer")
    allowed, choice = _choice(body)
    tools = [tool for tool in body.tools or () if isinstance(tool, FunctionTool | CustomToolSpec)]
    tools = [tool for tool in tools if allowed is None or tool.name in allowed]
    custom = {tool.name: tool for tool in tools if isinstance(tool, CustomToolSpec)}
    made: dict[str, Any] = {"model": body.model, "messages": [*told, *messages], **_format(body)}
    made["tools"] = [_tool(tool) for tool in tools] or None
    made |= {"tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}
    if body.reasoning is not None:
        made["reasoning_effort"] = body.reasoning.effort
    forced = _forced(body, custom)
    if forced is not None:
        made |= {"tool_choice": "none", "response_format": _grammar(custom[forced])}
    if isinstance(body, ResponseRequest):
        made |= _generation(body)
    return TranslatedResponse(chat_request(made), tuple(custom), forced, _warnings(body))


def _generation(body: ResponseRequest) -> dict[str, Any]:
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "cache_salt": body.cache_salt,
        "kv_out": (body.store is not False or body.prompt_cache_key is not None) or None,
    }


def _choice(body: ResponsePrompt) -> tuple[set[str] | None, Any]:
    """The names of the tools that may be called (None: all), and the choice in the internal request."""
    match body.tool_choice:
        case AllowedTools(mode=mode, tools=tools):
            return {tool.name for tool in tools}, mode
        case NamedToolChoice(name=name):
            return None, {"type": "function", "function": {"name": name}}
        case word:
            return None, word


def _forced(body: ResponsePrompt, custom: dict[str, CustomToolSpec]) -> str | None:
    """The custom tool with a grammar that must be called."""
    match body.tool_choice:
        case NamedToolChoice(type="custom", name=name):
            if name not in custom:
                raise ParamError("tool_choice", f"there is no custom tool called {name!r}")
            return name if isinstance(custom[name].format, GrammarInput) else None
        case _:
            return None


def _grammar(tool: CustomToolSpec) -> dict[str, Any]:
    assert isinstance(tool.format, GrammarInput)
    return {"type": tool.format.syntax, tool.format.syntax: tool.format.definition}


def _tool(tool: FunctionTool | CustomToolSpec) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}
    told = [tool.description or ""]
    if isinstance(tool.format, GrammarInput):
        told.append(f"The input must match this grammar ({tool.format.syntax}):\n{tool.format.definition}")
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    shown = "\n\n".join(filter(None, told)) or None
    return {"type": "function", "function": {"name": tool.name, "description": shown, "parameters": parameters}}


def _format(body: ResponsePrompt) -> dict[str, Any]:
    match None if body.text is None else body.text.format:
        case JsonObjectFormat():
            return {"response_format": {"type": "json_object"}}
        case SchemaFormat(json_schema=schema):
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        case _:
            return {}


def _warnings(body: ResponsePrompt) -> tuple[str, ...]:
    skipped = [
        (index, tool.type)
        for index, tool in enumerate(body.tools or ())
        if not isinstance(tool, FunctionTool | CustomToolSpec)
    ]
    return tuple(f"tools.{index}: {kind[:64]} is not run by this server and was left out" for index, kind in skipped)


def shortened(messages: list[Message], count: Callable[[list[Message]], int], most: int) -> list[Message]:
    """The messages without the oldest turns, so that they are at most `most` tokens; as many turns stay as fit.

    System messages at the beginning stay, and a conversation begins with a user's message.
    """
    head = next((i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), len(messages))
    starts = [i for i, one in enumerate(messages) if i >= head and one["role"] == "user"] or [head]

    def fits(start: int) -> bool:
        try:
            return count([*messages[:head], *messages[start:]]) <= most
        except ContextOverflow:
            return False

    if fits(head):
        return messages
    low, high = 0, len(starts) - 1  # the last turn stays in any case; what is too long then is refused later
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(starts[middle]) else (middle + 1, high)
    return [*messages[:head], *messages[starts[low] :]]
