"""Answers of Ollama's API: one object, or a stream of objects, a line each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...llm import AsyncStream, Completion, Delta
from ...text.parse import CallArguments, CallEnd, CallStart, Content, Reasoning
from ..http.delta_source import DeltaSource
from ..http.errors import check_finish_reason
from ..openai.chat import PreparedChat, open_chat
from ..openai.message import MessageBuilder, call_arguments
from ..openai.usage import OnUsage, chat_logprobs, completion_usage, finish_reasons
from ..service import Service
from .errors import json_line


@dataclass(frozen=True, slots=True)
class PreparedOllama:
    """A checked request."""

    chat: PreparedChat
    model: str  # as the request names it
    is_chat: bool  # generate has other names for the parts of an answer
    raw: str | None = None  # a prompt that is continued as it is


async def open_stream(service: Service, prepared: PreparedOllama) -> AsyncStream:
    """The stream of the answer."""
    if prepared.raw is None:
        return await open_chat(service, prepared.chat)
    chat_only = ("tools", "chat_template_kwargs")
    options = {name: value for name, value in prepared.chat.keywords().items() if name not in chat_only}
    return await service.llm.stream(prepared.raw, prepared.chat.params, **options)


class OllamaParts:
    """The parts of one answer as they come: text, thinking, and calls, which are passed on when they are complete."""

    def __init__(self, service: Service, prepared: PreparedOllama) -> None:
        self._service = service
        self._prepared = prepared
        plain = prepared.raw is not None
        self._builder: MessageBuilder | None = None if plain else prepared.chat.message_format.builder()
        self._name = self._arguments = ""

    def add(self, delta: Delta) -> dict[str, Any]:
        """The parts that a delta adds; empty where it adds none."""
        made: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        pieces = [Content(delta.text)] if self._builder is None else self._builder.read(delta)
        for piece in pieces:
            match piece:
                case Content(text):
                    made["content"] += text
                case Reasoning(text):
                    made["thinking"] += text
                case CallStart(_, name):
                    self._name, self._arguments = name, ""
                case CallArguments(_, text):
                    self._arguments += text
                case CallEnd():
                    function = {"name": self._name, "arguments": call_arguments(self._arguments)}
                    made["tool_calls"].append({"function": function})
        if delta.logprobs is not None:
            made["logprobs"] = chat_logprobs(self._service.llm.tokenizer, [delta.logprobs])["content"]
        return {name: value for name, value in made.items() if value}

    def shown(self, parts: dict[str, Any]) -> dict[str, Any]:
        """An object of the stream, or the whole answer, with these parts."""
        made = {"model": self._prepared.model, "created_at": now()}
        logprobs = {"logprobs": parts["logprobs"]} if "logprobs" in parts else {}
        said = {name: value for name, value in parts.items() if name not in ("content", "logprobs")}
        if self._prepared.is_chat:
            message = {"role": "assistant", "content": parts.get("content", ""), **said}
            return {**made, "message": message, **logprobs, "done": False}
        return {**made, "response": parts.get("content", ""), **said, **logprobs, "done": False}


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def ending(done: Completion, usage: dict[str, Any]) -> dict[str, Any]:
    """The fields at the end of an answer."""
    first_s, total_s = done.timing.first_token_s, done.timing.total_s
    return {
        "done": True,
        "done_reason": "length" if check_finish_reason(done.finish_reason) == "length" else "stop",
        "total_duration": _ns(total_s),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": _ns(first_s),
        "eval_count": usage["completion_tokens"],
        "eval_duration": _ns(total_s - first_s),
        "kvilt": usage["kvilt"],
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


async def whole_answer(service: Service, prepared: PreparedOllama, on_usage: OnUsage) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    parts, all_parts = OllamaParts(service, prepared), dict[str, Any]()
    async with await open_stream(service, prepared) as stream:
        async for delta in stream:
            for name, value in parts.add(delta).items():
                all_parts[name] = all_parts[name] + value if name in all_parts else value
        done = stream.completion
    on_usage(usage := completion_usage([done]), finish_reasons([done]))
    return {**parts.shown(all_parts), **ending(done, usage)}


class OllamaStream(DeltaSource):
    """The answer to a streaming request, an object for each delta: an `EventSource`."""

    def __init__(self, service: Service, prepared: PreparedOllama, stream: AsyncStream, on_usage: OnUsage) -> None:
        """`on_usage` gets the token counts when the answer has ended."""
        super().__init__(stream)
        self._parts = OllamaParts(service, prepared)
        self._on_usage = on_usage

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """The last object."""
        done = self._stream.completion
        self._on_usage(usage := completion_usage([done]), finish_reasons([done]))
        yield json_line({**self._parts.shown({}), **ending(done, usage)})

    def _encode(self, delta: Delta) -> bytes:
        added = self._parts.add(delta)
        return json_line(self._parts.shown(added)) if added else b""
