"""From a Messages request to the internal chat request, and the prefixes of its prompt that are to be pinned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ParamError
from ..openai.schema import ChatRequest, chat_request
from ..sessions.fields import session_json
from .schema import (
    AssistantTurn,
    CacheControl,
    CountTokensRequest,
    CustomTool,
    DocumentBlock,
    MessagesRequest,
    NamedChoice,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)

MAX_BREAKPOINTS = 4
Message = dict[str, Any]  # of the internal request
ToolDict = dict[str, Any]  # of the internal request
_TTL_S = {"5m": 300.0, "1h": 3600.0}


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The messages up to a cache breakpoint, and for how long their KV is pinned."""

    messages: tuple[Message, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TranslatedMessages:
    """A Messages request as the internal request."""

    body: ChatRequest
    prefixes: tuple[CachedPrefix, ...]  # in the order of the prompt
    deferred: tuple[ToolDict, ...]  # tools that may be called, and that the prompt does not list


def translate(body: CountTokensRequest) -> TranslatedMessages:
    """The internal request, and its cache breakpoints."""
    tools = {tool.name: _tool(tool) for tool in body.tools or ()}
    conversation = _Conversation(tools)
    for tool in body.tools or ():
        conversation.mark(tool.cache_control)
    conversation.add_texts("system", body.system or ())
    for turn in body.messages:
        conversation.add_turn(turn)
    conversation.mark(body.cache_control)
    if len(conversation.marks) > MAX_BREAKPOINTS:
        there = len(conversation.marks)
        raise ParamError("cache_control", f"{there} blocks have it, and {MAX_BREAKPOINTS} are allowed")
    deferred = tuple(_tool(tool) for tool in body.tools or () if _is_deferred(tool, body))
    return TranslatedMessages(_request(body, conversation.messages()), tuple(conversation.prefixes()), deferred)


def _request(body: CountTokensRequest, messages: list[Message]) -> ChatRequest:
    made: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body), **_reasoning(body)}
    if body.output_config is not None and (wanted := body.output_config.format) is not None:
        made["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.json_schema}}
    if isinstance(body, MessagesRequest):
        made |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        made |= {"stop": body.stop_sequences, "return_progress": body.stream or None}
        made["session"] = session_json(body.session)
    made["continue_final_message"] = messages[-1]["role"] == "assistant" or None
    return chat_request(made)


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    tools = [_tool(tool) for tool in body.tools or () if not _is_deferred(tool, body)]
    made: dict[str, Any] = {"tools": tools or None}
    if (choice := body.tool_choice) is not None:
        made["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if isinstance(choice, NamedChoice):
            made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            made["tool_choice"] = "required" if choice.type == "any" else choice.type
    return made


def _tool(tool: CustomTool) -> ToolDict:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _is_deferred(tool: CustomTool, body: CountTokensRequest) -> bool:
    chosen = isinstance(body.tool_choice, NamedChoice) and body.tool_choice.name == tool.name
    return bool(tool.defer_loading) and not chosen


def _reasoning(body: CountTokensRequest) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        made["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    if body.output_config is not None and body.output_config.effort is not None:
        made["reasoning_effort"] = body.output_config.effort
    return made


@dataclass(slots=True)
class _Said:
    """One message while it is put together. Neighbours of one role are one message, as Anthropic has it."""

    role: str
    parts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    answers: str | None = None  # the id of the call that a tool's message answers

    def message(self, parts: int | None = None, calls: int | None = None) -> Message:
        """The message, or its beginning of so many parts and calls."""
        made: Message = {"role": self.role, "content": _content(self.parts[:parts])}
        if self.role == "tool":
            made["tool_call_id"] = self.answers
        if self.reasoning:
            made["reasoning_content"] = "".join(self.reasoning)
        if self.calls[:calls]:
            made["tool_calls"] = self.calls[:calls]
        return made


@dataclass(frozen=True, slots=True)
class _Mark:
    """A breakpoint: whole messages, and the beginning of the next one, if any."""

    messages: int
    parts: int
    calls: int
    ttl_s: float


class _Conversation:
    """The messages of a request, and the breakpoints among them."""

    def __init__(self, tools: Mapping[str, ToolDict]) -> None:
        self._tools = tools  # that a block can refer to
        self._said: list[_Said] = []
        self.marks: list[_Mark] = []

    def add_texts(self, role: str, content: str | Iterable[TextBlock]) -> None:
        if isinstance(content, str):
            self._last(role).parts.append(content)
            return
        for block in content:
            self._add_block(role, block)

    def add_turn(self, turn: Turn) -> None:
        if isinstance(turn.content, str):
            self.add_texts(turn.role, turn.content)
            return
        if isinstance(turn, AssistantTurn):
            self._last("assistant")
        for block in turn.content:
            self._add_block(turn.role, block)

    def _add_block(self, role: str, block: Any) -> None:
        match block:
            case TextBlock() | DocumentBlock():
                self._last(role).parts.append(_text(block))
            case ToolResultBlock():
                self._said.append(_Said("tool", self._results(block.content), answers=block.tool_use_id))
                for inner in () if isinstance(block.content, str) else block.content or ():
                    self.mark(inner.cache_control)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                self._last(role).calls.append({"id": block.id, "function": function})
            case ThinkingBlock():
                self._last(role).reasoning.append(block.thinking)
        self.mark(getattr(block, "cache_control", None))

    def _results(self, content: str | Sequence[TextBlock | DocumentBlock | ToolReferenceBlock] | None) -> list[str]:
        """The texts of a tool's answer. A reference to a tool is the tool's definition."""
        if content is None or isinstance(content, str):
            return [content or ""]
        return [self._definition(one) if isinstance(one, ToolReferenceBlock) else _text(one) for one in content]

    def _definition(self, reference: ToolReferenceBlock) -> str:
        found = self._tools.get(reference.tool_name)
        if found is None:
            raise ParamError("messages", f"tool_reference: there is no tool called {reference.tool_name!r}")
        return json.dumps(found, ensure_ascii=False)

    def mark(self, control: CacheControl | None) -> None:
        """Set a breakpoint after what was added last."""
        if control is None:
            return
        last = self._said[-1] if self._said else _Said("")
        ttl_s = _TTL_S[control.ttl or "5m"]
        self.marks.append(_Mark(max(0, len(self._said) - 1), len(last.parts), len(last.calls), ttl_s))

    def _last(self, role: str) -> _Said:
        """The message that more of this role belongs to."""
        if not self._said or self._said[-1].role != role:
            self._said.append(_Said(role))
        return self._said[-1]

    def messages(self) -> list[Message]:
        return [said.message() for said in self._said]

    def prefixes(self) -> Iterable[CachedPrefix]:
        whole = self.messages()
        for mark in self.marks:
            cut = self._said[mark.messages].message(mark.parts, mark.calls) if mark.parts or mark.calls else None
            before = whole[: mark.messages]
            yield CachedPrefix((*before, cut) if cut is not None else tuple(before), mark.ttl_s)


def _content(parts: Sequence[str]) -> str | list[dict[str, str]]:
    if len(parts) < 2:
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} for part in parts]


def _text(block: TextBlock | DocumentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    return "\n".join(text for text in (block.title, block.context, block.source.data) if text)
