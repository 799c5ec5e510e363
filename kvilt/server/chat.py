"""Conversations: what is asked of the model for a chat request, and what is made of its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ..errors import ParamError
from ..llm import AsyncStream, Completion, Delta, Reading
from ..llm.offload import ANSWER
from ..sampling.params import SamplingParams
from ..text.chat import RenderedChat
from .ask import grammar_of, messages_of, progress_of, sampling_of, terms_of, wants_progress
from .counts import Count, chat_logprobs, running_usage, usage_of
from .documents import check_documents
from .gate import Caller
from .keep import keep
from .refusal import Refused, refusal_of
from .schema.chat import ChatRequest, ChosenTool
from .service import Service, envelope, new_name
from .sse import DONE, event
from .voice import Listening, Voice


@dataclass(frozen=True, slots=True)
class Talk:
    """A chat request, ready to be asked."""

    asked: ChatRequest
    caller: Caller
    name: str
    messages: list[dict[str, Any]] | RenderedChat
    tools: list[dict[str, Any]] | None
    params: SamplingParams
    listening: Listening
    lora: str | None = None  # the adapter that was asked for as a model

    def given(self) -> dict[str, Any]:
        """The keywords of `AsyncLLM.stream_chat`."""
        return {
            "tools": self.tools,
            "progress": wants_progress(self.asked),
            **terms_of(self.asked, self.caller, self.name, self.lora),
        }


def ready(service: Service, asked: ChatRequest, caller: Caller) -> Talk:
    """Check a request and work out what it asks for; may take a while."""
    lora = service.check_model(asked.model)
    _check(service, asked)
    messages = messages_of(asked.messages)
    tools = _tools(asked)
    rendered = _rendered(service, messages, tools, len(asked.documents or ()))
    prompt = None if rendered is None else rendered.text
    listening = Listening(
        service.parser, tools or (), asked.parallel_tool_calls is not False, prompt, service.parser_marks
    )
    params = sampling_of(
        asked,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        **_forced(service, asked, listening),
    )
    return Talk(asked, caller, new_name("chatcmpl"), rendered or messages, tools, params, listening, lora)


def _check(service: Service, asked: ChatRequest) -> None:
    config = service.config
    for field, there, most in (
        ("messages", len(asked.messages), config.max_messages),
        ("tools", len(asked.tools or ()), config.max_tools),
    ):
        if there > most:
            raise Refused(400, f"{field}: {there} were sent and {most} are allowed", param=field, code="too_many")
    check_documents(service, asked)
    both = asked.max_tokens is not None and asked.max_completion_tokens is not None
    if both and asked.max_tokens != asked.max_completion_tokens:
        raise ParamError("max_completion_tokens", "is another name for max_tokens; give one of them")
    if asked.top_logprobs and not asked.logprobs:
        raise ParamError("top_logprobs", "needs logprobs to be true")
    if asked.stream_options is not None and not asked.stream:
        raise ParamError("stream_options", "is for streams; set stream to true")


def _tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the model hears of."""
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in asked.tools or ()]
    match asked.tool_choice:
        case None | "auto":
            return tools or None
        case "none":
            return None
        case _ if not tools:
            raise ParamError("tool_choice", "asks for a tool, and tools is empty")
        case ChosenTool(function=chosen) if chosen.name not in {tool["function"]["name"] for tool in tools}:
            raise ParamError("tool_choice", f"there is no tool called {chosen.name!r}")
        case _:
            return tools


def _forced(service: Service, asked: ChatRequest, listening: Listening) -> dict[str, Any]:
    """The grammar of answers that must call a tool."""
    match asked.tool_choice:
        case "required":
            names = None
        case ChosenTool(function=chosen):
            names = [chosen.name]
        case _:
            return {}
    if grammar_of(asked):
        raise ParamError("tool_choice", "cannot force a call beside a response_format; drop one of them")
    several = asked.parallel_tool_calls is not False and names is None
    return {"lark": service.parser.tool_grammar(listening.tools, names, several, listening.prompt)}


def _rendered(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, documents: int
) -> RenderedChat | None:
    """The prompt after its template where the parser wants to see its end; its ids are made of the same rendering."""
    if service.parser.thinking is None:
        return None
    return service.llm.render_chat(messages, tools, documents)


async def whole(service: Service, talk: Talk) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    voices = [talk.listening.voice() for _ in range(talk.params.n)]
    async with await service.llm.stream_chat(talk.messages, talk.params, **talk.given()) as stream:
        async for delta in stream:
            voices[delta.index].hear(delta)
        done = stream.completion
    kept = await keep(service, done, talk.given()["tenant"]) if talk.asked.kv_out else {}
    if talk.params.logprobs is None:
        return _answer(service, talk, voices, done, kept)
    return await service.llm.offload.run(ANSWER, _answer, service, talk, voices, done, kept, owner=talk.caller.tenant)


def _answer(
    service: Service, talk: Talk, voices: list[Voice], done: Completion, kept: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """All samples as choices; with logprobs it may take a while."""
    choices = []
    for index, (voice, sample) in enumerate(zip(voices, (done, *done.alternatives), strict=True)):
        logprobs = None if sample.logprobs is None else chat_logprobs(service.llm.tokenizer, sample.logprobs)
        choice = {"index": index, "message": voice.message(), "logprobs": logprobs}
        choices.append({**choice, "finish_reason": _reason(voice, sample.finish_reason), **kept.get(index, {})})
    return {**envelope(service, "chat.completion", talk.name, talk.lora), "choices": choices, "usage": usage_of([done])}


class ChatStream:
    """A request's answers as chunks."""

    def __init__(self, service: Service, talk: Talk, stream: AsyncStream, count: Count) -> None:
        """`count` hears what the answers took."""
        self._service = service
        self._talk = talk
        self._stream = stream
        self._count = count
        self._voices = [talk.listening.voice() for _ in range(talk.params.n)]
        self._head = envelope(service, "chat.completion.chunk", talk.name, talk.lora)
        options = talk.asked.stream_options
        self._usage = bool(options and options.include_usage)
        self._running = bool(options and options.continuous_usage_stats)
        self._read: Reading | None = None
        self._generated = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Every chunk, and the end."""
        try:
            for index in range(len(self._voices)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            ends = []
            async for delta in self._stream:
                if delta.finish_reason is not None and self._talk.asked.kv_out:
                    ends.append(delta)  # its handle is known only when all samples have ended
                elif said := self._said(delta):
                    yield said
            async for last in self._closing(ends):
                yield last
        except Exception as error:
            yield event(refusal_of(error).body())
        finally:
            await self._stream.aclose()
        yield DONE

    def _said(self, delta: Delta, **more: Any) -> bytes | None:
        """A delta as a chunk; None where it has nothing to say."""
        if delta.reading is not None:
            self._read = delta.reading
            shown = {**self._head, "choices": [], "prompt_progress": progress_of(delta.reading)}
            return event(shown) if self._talk.asked.return_progress else None
        self._generated += delta.token is not None
        voice = self._voices[delta.index]
        added = voice.hear(delta)
        if not added and delta.finish_reason is None and delta.logprobs is None:
            return None
        logprobs = None if delta.logprobs is None else chat_logprobs(self._service.llm.tokenizer, [delta.logprobs])
        return self._chunk(delta.index, added, logprobs, _reason(voice, delta.finish_reason), **more)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        chunk = {**self._head, "choices": [choice]}
        if self._running:
            chunk["usage"] = running_usage([self._read] if self._read else [], self._generated)
        elif self._usage:
            chunk["usage"] = None
        return event(chunk)

    async def _closing(self, ends: list[Delta]) -> AsyncGenerator[bytes, None]:
        done = self._stream.completion
        if ends:
            kept = await keep(self._service, done, self._talk.given()["tenant"])
            for delta in ends:
                if said := self._said(delta, **kept[delta.index]):
                    yield said
        self._count(took := usage_of([done]))
        if self._usage:
            yield event({**self._head, "choices": [], "usage": took})


def _reason(voice: Voice, reason: str | None) -> str | None:
    if reason == "cancelled":
        raise Refused(503, "the request was ended by the server", code="cancelled")
    return "tool_calls" if reason == "stop" and voice.called else reason
