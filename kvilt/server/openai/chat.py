"""POST /v1/chat/completions: checks a request, asks the model, and writes its answers, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Scope

from ...errors import ParamError, TemplateError
from ...llm import AsyncStream, Completion, Delta, ReadingProgress
from ...llm.offload import ANSWER, PROMPT
from ...sampling.params import SamplingParams
from ...text.chat import RenderedChat
from ..auth import Caller
from ..http.delta_source import DeltaSource
from ..http.errors import HTTPError, check_finish_reason
from ..http.event_stream import EventStream, EventTemplate, sse_event
from ..http.responses import json_response
from ..http.routing import CallerDep, ServiceDep, StrictRoute, generation_responses
from ..kv.handles import keep_kv
from ..service import Service, answer_header, new_id
from ..sessions.fields import session_options
from ..tracing import trace_request, trace_response, trace_usage
from .message import MessageBuilder, MessageFormat
from .params import (
    check_documents,
    grammar_params,
    prompt_progress,
    request_options,
    sampling_params,
    template_kwargs,
    template_messages,
    wants_progress,
)
from .schema import AllowedToolsChoice, AllowedToolSet, ChatCompletion, ChatRequest, ChosenTool
from .usage import OnUsage, blended_tokenizer, chat_logprobs, completion_usage, finish_reasons, running_usage


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked chat request with everything that the model needs."""

    body: ChatRequest
    caller: Caller
    name: str
    messages: list[dict[str, Any]] | RenderedChat
    tools: list[dict[str, Any]] | None
    params: SamplingParams
    message_format: MessageFormat
    lora: str | None = None  # the adapter that the request named as its model

    def keywords(self) -> dict[str, Any]:
        """The keywords of `AsyncLLM.stream_chat`."""
        return {
            "tools": self.tools,
            "chat_template_kwargs": template_kwargs(self.body),
            "progress": wants_progress(self.body),
            **request_options(self.body, self.caller, self.name, self.lora),
        }


def prepare_chat(
    service: Service,
    body: ChatRequest,
    caller: Caller,
    name: str | None = None,
    deferred: Sequence[dict[str, Any]] = (),
) -> PreparedChat:
    """Check a request and prepare its prompt and params; slow, so it runs off the event loop.

    `deferred` tools may be called too; the prompt does not list them.
    """
    lora = service.check_model(body.model)
    _check(service, body, len(deferred))
    tools = chat_tools(body)
    messages = _arranged(service, body, caller, template_messages(body.messages), tools)
    deferred = () if body.tool_choice == "none" else deferred
    rendered = _rendered(service, body, messages, tools)
    prompt = None if rendered is None else rendered.text
    message_format = MessageFormat(
        service.parser,
        [*(tools or ()), *deferred],
        body.parallel_tool_calls is not False,
        prompt,
        service.parser_markers,
    )
    params = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_forced(service, body, message_format, tools or ()),
    )
    name = name or new_id("chatcmpl")
    return PreparedChat(body, caller, name, rendered or messages, tools, params, message_format, lora)


def _arranged(
    service: Service,
    body: ChatRequest,
    caller: Caller,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> list[dict[str, Any]]:
    """The messages of a session's request, perhaps with volatile lines of the system prompt behind the rest."""
    session = session_options(body.session)
    if session is None:
        return messages

    def renders(asked: list[dict[str, Any]]) -> bool:
        try:
            service.llm.render_chat(asked, tools, template_kwargs=template_kwargs(body))
        except TemplateError:
            return False
        return True

    tenant = caller.salted(body.cache_salt).tenant
    return service.stable_prompts.arranged(tenant, session.name, messages, renders)


async def open_chat(service: Service, prepared: PreparedChat) -> AsyncStream:
    """The stream of the answer to a request, of any API."""
    return await service.llm.stream_chat(prepared.messages, prepared.params, **prepared.keywords())


def _check(service: Service, body: ChatRequest, deferred: int) -> None:
    config = service.config
    for field, there, most in (
        ("messages", len(body.messages), config.max_messages),
        ("tools", len(body.tools or ()) + deferred, config.max_tools),
    ):
        if there > most:
            raise HTTPError(400, f"{field}: {there} were sent and {most} are allowed", param=field, code="too_many")
    check_documents(service, body)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ParamError("max_completion_tokens", "is another name for max_tokens; give one of them")
    if body.top_logprobs and not body.logprobs:
        raise ParamError("top_logprobs", "needs logprobs to be true")
    if body.add_generation_prompt is not None and body.add_generation_prompt == bool(body.continue_final_message):
        what = "must be false beside continue_final_message, and may be false only there"
        raise ParamError("add_generation_prompt", what)
    if body.stream_options is not None and not body.stream:
        raise ParamError("stream_options", "is for streams; set stream to true")


def chat_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the prompt lists."""
    tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]
    known = {tool["function"]["name"] for tool in tools}
    match body.tool_choice:
        case None | "auto":
            return tools or None
        case "none":
            return None
        case _ if not tools:
            raise ParamError("tool_choice", "asks for a tool, and tools is empty")
        case ChosenTool(function=chosen) if chosen.name not in known:
            raise ParamError("tool_choice", f"there is no tool called {chosen.name!r}")
        case AllowedToolsChoice(allowed_tools=allowed):
            names = {tool.function.name for tool in allowed.tools}
            if absent := sorted(names - known):
                raise ParamError("tool_choice", f"there is no tool called {absent[0]!r}")
            return [tool for tool in tools if tool["function"]["name"] in names]
        case _:
            return tools


def _forced(
    service: Service, body: ChatRequest, message_format: MessageFormat, listed: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The grammar that forces a tool call."""
    match body.tool_choice:
        case "required" | AllowedToolsChoice(allowed_tools=AllowedToolSet(mode="required")):
            names = None  # all that the prompt lists
        case ChosenTool(function=chosen):
            names = [chosen.name]
        case _:
            return {}
    if grammar_params(body):
        raise ParamError("tool_choice", "cannot force a call beside a response_format; drop one of them")
    several = body.parallel_tool_calls is not False and names is None
    return {"lark": service.parser.tool_grammar(listed, names, several, message_format.prompt)}


def _rendered(
    service: Service, body: ChatRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> RenderedChat | None:
    """The rendered prompt where the parser needs its end; the token ids are made from the same rendering."""
    continues = bool(body.continue_final_message)
    if service.parser.thinking is None and not continues:
        return None
    variables = template_kwargs(body)
    return service.llm.render_chat(
        messages,
        tools,
        len(body.documents or ()),
        template_kwargs=variables,
        continue_final_message=continues,
    )


async def complete_chat(service: Service, prepared: PreparedChat) -> dict[str, Any]:
    """The whole answer to a request without `stream`."""
    builders = [prepared.message_format.builder() for _ in range(prepared.params.n)]
    async with await open_chat(service, prepared) as stream:
        async for delta in stream:
            builders[delta.index].add(delta)
        done = stream.completion
    kept = await keep_kv(service.llm, done, prepared.keywords()["tenant"]) if prepared.body.kv_out else {}
    if prepared.params.logprobs is None and not prepared.body.return_blended_tokens:
        return _answer(service, prepared, builders, done, kept)
    return await service.llm.offload.run(
        ANSWER, _answer, service, prepared, builders, done, kept, owner=prepared.caller.tenant
    )


def _answer(
    service: Service,
    prepared: PreparedChat,
    builders: list[MessageBuilder],
    done: Completion,
    kept: dict[int, dict[str, Any]],
) -> dict[str, Any]:
    """All samples as choices; slow with logprobs."""
    choices = []
    for index, (builder, sample) in enumerate(zip(builders, (done, *done.alternatives), strict=True)):
        logprobs = None if sample.logprobs is None else chat_logprobs(service.llm.tokenizer, sample.logprobs)
        choice = {"index": index, "message": builder.message(), "logprobs": logprobs}
        choices.append({**choice, "finish_reason": _reason(builder, sample.finish_reason), **kept.get(index, {})})
    return {
        **answer_header(service, "chat.completion", prepared.name, prepared.lora),
        "choices": choices,
        "usage": completion_usage([done], blended_tokenizer(service.llm.tokenizer, prepared.body)),
        **({"warnings": list(done.warnings)} if done.warnings else {}),
    }


class ChatStream(DeltaSource):
    """The answers to a streaming request as server-sent events: an `EventSource`."""

    def __init__(self, service: Service, prepared: PreparedChat, stream: AsyncStream, on_usage: OnUsage) -> None:
        """`on_usage` gets the token counts when the answers have ended."""
        super().__init__(stream)
        self._service = service
        self._prepared = prepared
        self._on_usage = on_usage
        self._builders = [prepared.message_format.builder() for _ in range(prepared.params.n)]
        self._head = answer_header(service, "chat.completion.chunk", prepared.name, prepared.lora)
        options = prepared.body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running = bool(options and options.continuous_usage_stats)
        self._progress: ReadingProgress | None = None
        self._generated = 0
        self._ends: list[Delta] = []  # with kv_out: a handle is known only when all samples have ended
        self._templates = [EventTemplate(partial(self._content_chunk, index)) for index in range(len(self._builders))]

    def opening(self) -> bytes:
        """A chunk with the role for each sample."""
        roles = ({"role": "assistant", "content": ""} for _ in self._builders)
        return b"".join(self._chunk(index, role) for index, role in enumerate(roles))

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """Chunks that need the completion: those with handles, and the usage."""
        done = self._stream.completion
        if self._ends:
            kept = await keep_kv(self._service.llm, done, self._prepared.keywords()["tenant"])
            for delta in self._ends:
                yield self._delta_chunk(delta, **kept[delta.index])
        if (blended := blended_tokenizer(self._service.llm.tokenizer, self._prepared.body)) is None:
            took = completion_usage([done])
        else:
            owner = self._prepared.caller.tenant
            took = await self._service.llm.offload.run(ANSWER, completion_usage, [done], blended, owner=owner)
        self._on_usage(took, finish_reasons([done]))
        if self._usage:
            yield sse_event({**self._head, "choices": [], "usage": took})
        if done.warnings:
            yield sse_event({**self._head, "choices": [], "warnings": list(done.warnings)})

    def _encode(self, delta: Delta) -> bytes:
        """A delta as a chunk; empty where it adds nothing, or waits for the end."""
        if delta.finish_reason is not None and self._prepared.body.kv_out:
            self._ends.append(delta)
            return b""
        if self._builders[delta.index].is_content(delta) and delta.logprobs is None and not self._running:
            return self._templates[delta.index].with_text(delta.text)
        return self._delta_chunk(delta)

    def _delta_chunk(self, delta: Delta, **more: Any) -> bytes:
        """Any delta as a chunk; empty where it adds nothing."""
        if delta.reading is not None:
            self._progress = delta.reading
            shown = {**self._head, "choices": [], "prompt_progress": prompt_progress(delta.reading)}
            return sse_event(shown) if self._prepared.body.return_progress else b""
        self._generated += delta.token is not None
        builder = self._builders[delta.index]
        added = builder.add(delta)
        if not added and delta.finish_reason is None and delta.logprobs is None:
            return b""
        logprobs = None if delta.logprobs is None else chat_logprobs(self._service.llm.tokenizer, [delta.logprobs])
        return self._chunk(delta.index, added, logprobs, _reason(builder, delta.finish_reason), **more)

    def _content_chunk(self, index: int, text: str) -> bytes:
        """The chunk of most tokens."""
        return self._chunk(index, {"content": text})

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
            chunk["usage"] = running_usage([self._progress] if self._progress else [], self._generated)
        elif self._usage:
            chunk["usage"] = None
        return sse_event(chunk)


def _reason(builder: MessageBuilder, given: str | None) -> str | None:
    reason = check_finish_reason(given)
    return "tool_calls" if reason == "stop" and builder.has_tool_calls else reason


def trace_chat(scope: Scope, service: Service, prepared: PreparedChat, model: str | None = None) -> OnUsage:
    """Trace a request of any API; what gets its token counts. `model` is its name where that was translated."""
    body = prepared.body
    trace_request(scope, "chat", model or body.model or service.model, prepared.params, bool(body.stream))
    trace_response(scope, prepared.lora or service.model, prepared.name)
    return partial(trace_usage, scope)


router = APIRouter(route_class=StrictRoute, tags=["chat"])


@router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion), response_model=None)
async def chat(body: ChatRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Answer a conversation."""
    prepared = await service.llm.offload.run(PROMPT, prepare_chat, service, body, caller, owner=caller.tenant)
    on_usage = trace_chat(request.scope, service, prepared)
    if not body.stream:
        done = await complete_chat(service, prepared)
        on_usage(done["usage"], [choice["finish_reason"] for choice in done["choices"]])
        return json_response(done)
    stream = await open_chat(service, prepared)
    return EventStream(ChatStream(service, prepared, stream, on_usage), service.config.keep_alive_s)
