"""From a Responses request to the internal chat request: tools, choices, formats, and messages that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ContextOverflow, ParamError
from ..openai.fields import JsonObjectFormat
from ..openai.schema import ChatRequest, chat_request
from ..sessions.fields import session_json
from .items import AdditionalToolsItem, Message, SearchOutputItem
from .schema import AllowedTools, NamedToolChoice, ResponsePrompt, ResponseRequest, SchemaFormat
from .tools import CallableTool, CustomToolSpec, GrammarInput, OtherTool, callable_tools

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class TranslatedResponse:
    """A Responses request as the internal request."""

    body: ChatRequest
    tools: Mapping[str, CallableTool]  # that may be called, by their names in the prompt
    deferred: tuple[dict[str, Any], ...]  # those of them that a search found: the prompt does not list them
    forced: str | None  # the custom tool whose input is the whole answer
    warnings: tuple[str, ...]  # what was skipped


def translate(body: ResponsePrompt, messages: list[Message]) -> TranslatedResponse:
    """The internal request for these messages, those of the conversation before included."""
    told = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if not messages:
        raise ParamError("input", "is empty; there is nothing to answer")
    allowed, choice = _choice(body)
    listed = [tool for tool in callable_tools(_listed(body)) if allowed is None or tool.name in allowed]
    tools = {tool.name: tool for tool in listed}
    found = {tool.name: tool for tool in callable_tools(_found(body)) if tool.name not in tools}
    custom = {name: tool.spec for name, tool in tools.items() if isinstance(tool.spec, CustomToolSpec)}
    made: dict[str, Any] = {"model": body.model, "messages": [*told, *messages], **_format(body)}
    made["tools"] = [tool.function() for tool in listed] or None
    made |= {"tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}
    if body.reasoning is not None:
        made["reasoning_effort"] = body.reasoning.effort
    forced = _forced(body, custom)
    if forced is not None:
        made |= {"tool_choice": "none", "response_format": _grammar(custom[forced])}
    if isinstance(body, ResponseRequest):
        made |= _generation(body)
    deferred = tuple(tool.function() for tool in found.values())
    return TranslatedResponse(chat_request(made), {**tools, **found}, deferred, forced, _warnings(body))


def _listed(body: ResponsePrompt) -> list[Any]:
    """The tools that the prompt lists."""
    return [*(body.tools or ()), *(tool for _, item in _items(body, AdditionalToolsItem) for tool in item.tools)]


def _found(body: ResponsePrompt) -> list[Any]:
    """The tools that searches have found."""
    return [tool for _, item in _items(body, SearchOutputItem) for tool in item.tools]


def _items(body: ResponsePrompt, kind: type[Any]) -> list[tuple[int, Any]]:
    items = () if body.input is None or isinstance(body.input, str) else body.input
    return [(index, item) for index, item in enumerate(items) if isinstance(item, kind)]


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
        "session": session_json(body.session),
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


def _format(body: ResponsePrompt) -> dict[str, Any]:
    match None if body.text is None else body.text.format:
        case JsonObjectFormat():
            return {"response_format": {"type": "json_object"}}
        case SchemaFormat(json_schema=schema):
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        case _:
            return {}


def _warnings(body: ResponsePrompt) -> tuple[str, ...]:
    places: list[tuple[str, Sequence[Any]]] = [("tools", body.tools or ())]
    for kind in (AdditionalToolsItem, SearchOutputItem):
        places += [(f"input.{index}.tools", item.tools) for index, item in _items(body, kind)]
    return tuple(
        f"{place}.{index}: {tool.type[:64]} is not run by this server and was left out"
        for place, tools in places
        for index, tool in enumerate(tools)
        if isinstance(tool, OtherTool)
    )


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
