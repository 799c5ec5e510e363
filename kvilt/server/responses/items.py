"""Items of a request's input, and what they are as messages of the internal request."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...errors import ParamError
from ..http.schema import RequestModel
from ..openai.fields import CallId, ToolName
from .tools import INPUT, SEARCH, ResponseTools, callable_tools, qualified

Message = dict[str, Any]  # of the internal request
_SEALED = "kvilt:"  # before reasoning that clients keep for the server


class _Item(RequestModel):
    """What every item may have; clients replay items with or without it."""

    id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Accepted without effect.")
    status: Annotated[str, Field(max_length=32)] | None = Field(None, description="Accepted without effect.")


class ItemText(RequestModel):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, description="Accepted without effect.")
    logprobs: list[Any] | None = Field(None, description="Accepted without effect.")
    prompt_cache_breakpoint: Any = Field(None, description="Accepted without effect.")


class ItemRefusal(RequestModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


ItemContent = (
    str
    | Annotated[
        list[Annotated[ItemText | ItemRefusal, Field(discriminator="type")]], Field(max_length=1024, fail_fast=True)
    ]
)


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    phase: str | None = Field(None, description="Accepted without effect.")
    end_turn: bool | None = Field(None, description="Accepted without effect.")


class FunctionCallItem(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: str
    namespace: ToolName | None = None
    caller: dict[str, Any] | None = Field(None, description="Accepted without effect.")


class CustomCallItem(_Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: ToolName
    input: str
    namespace: ToolName | None = None
    caller: dict[str, Any] | None = Field(None, description="Accepted without effect.")


class CallOutputItem(_Item):
    """What a tool answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: ItemContent
    name: ToolName | None = None
    namespace: str | None = Field(None, description="Accepted without effect.")
    caller: dict[str, Any] | None = Field(None, description="Accepted without effect.")


class SearchCallItem(_Item):
    """A search for more tools."""

    type: Literal["tool_search_call"]
    call_id: CallId
    arguments: dict[str, Any]
    execution: Literal["client"] | None = None


class SearchOutputItem(_Item):
    """The tools that a search found; the model may call them from here on."""

    type: Literal["tool_search_output"]
    call_id: CallId
    tools: ResponseTools
    execution: Literal["client"] | None = None


class AdditionalToolsItem(_Item):
    """More tools; the prompt lists them as it lists those of the request."""

    type: Literal["additional_tools"]
    role: Literal["developer", "system"] | None = None
    tools: ResponseTools


class ReasoningText(RequestModel):
    """Some reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(max_length=1024, fail_fast=True)]


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = Field(None, description="Used where the content is missing.")
    content: ReasoningTexts | None = None
    encrypted_content: str | None = Field(None, description="Used where the content is missing.")


class ReferenceItem(_Item):
    """An item by its id; refused, because items are stored only as parts of responses."""

    type: Literal["item_reference"]


_KINDS = {"custom_tool_call_output": "function_call_output"}


def _tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _KINDS.get(str(kind), str(kind)) if kind is not None else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[SearchCallItem, Tag("tool_search_call")]
    | Annotated[SearchOutputItem, Tag("tool_search_output")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_tag),
]


def messages_of(items: str | Sequence[Any] | None) -> list[Message]:
    """The messages that items are. Reasoning, text and calls of one answer become one message."""
    if items is None or isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    made: list[Message] = []
    for index, item in enumerate(items):
        _add(made, item, index)
    return made


def _add(made: list[Message], item: Any, index: int) -> None:
    match item:
        case MessageItem(role="assistant"):
            _answer(made, "content")["content"] = _text(item.content)
        case MessageItem():
            made.append({"role": item.role, "content": _text(item.content)})
        case FunctionCallItem():
            _add_call(made, item.call_id, qualified(item.name, item.namespace), item.arguments)
        case CustomCallItem():
            _add_call(made, item.call_id, qualified(item.name, item.namespace), json.dumps({INPUT: item.input}))
        case SearchCallItem():
            _add_call(made, item.call_id, SEARCH, json.dumps(item.arguments))
        case SearchOutputItem():
            made.append({"role": "tool", "content": _definitions(item), "tool_call_id": item.call_id})
        case AdditionalToolsItem():
            pass
        case CallOutputItem():
            named = {} if item.name is None else {"name": item.name}
            made.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id, **named})
        case ReasoningItem():
            _answer(made, "reasoning_content", "content", "tool_calls")["reasoning_content"] = _reasoning(item)
        case _:
            raise ParamError(
                f"input.{index}", "item_reference is not supported; send the item, or previous_response_id"
            )


def answer_message(output: Iterable[dict[str, Any]]) -> Message:
    """The message that the output of a response is."""
    made: list[Message] = [{"role": "assistant", "content": ""}]
    for item in output:
        match item["type"]:
            case "message":
                made[0]["content"] += "".join(part["text"] for part in item["content"])
            case "reasoning":
                said = "".join(part["text"] for part in item["content"])
                made[0]["reasoning_content"] = made[0].get("reasoning_content", "") + said
            case "function_call":
                _add_call(made, item["call_id"], _called(item), item["arguments"])
            case "custom_tool_call":
                _add_call(made, item["call_id"], _called(item), json.dumps({INPUT: item["input"]}))
            case "tool_search_call":
                _add_call(made, item["call_id"], SEARCH, json.dumps(item["arguments"]))
    return made[0]


def _answer(made: list[Message], *without: str) -> Message:
    """The assistant's message that more belongs to: the last one, unless it has one of these parts already."""
    last = made[-1] if made else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in without):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _add_call(made: list[Message], call_id: str, name: str, arguments: str) -> None:
    calls = _answer(made).setdefault("tool_calls", [])
    calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _called(item: dict[str, Any]) -> str:
    return qualified(item["name"], item.get("namespace"))


def _definitions(item: SearchOutputItem) -> str:
    """The tools that a search found, for the model to read."""
    return json.dumps([tool.function() for tool in callable_tools(item.tools)], ensure_ascii=False)


def _text(content: str | Iterable[ItemText | ItemRefusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, ItemText) else part.refusal for part in content)


def _reasoning(item: ReasoningItem) -> str:
    texts = item.content or ([] if item.encrypted_content else item.summary) or []
    return "".join(part.text for part in texts) or unsealed(item.encrypted_content or "")


def sealed(text: str) -> str:
    """Reasoning as `encrypted_content`, for clients that keep it: an encoding, not a secret."""
    return _SEALED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str) -> str:
    """Reasoning that `sealed` made; nothing where another server made it."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return ""
