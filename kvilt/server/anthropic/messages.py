"""Answers of the Messages API: prepares a request, and writes its answer whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TemplateError
from ...llm import AsyncStream, Completion, Delta, Usage
from ..auth import Caller
from ..http.delta_source import DeltaSource
from ..http.errors import check_finish_reason
from ..http.event_stream import EventTemplate, named_event
from ..kv.pins import PinnedPrefix
from ..openai.chat import PreparedChat, open_chat, prepare_chat
from ..openai.params import template_kwargs, template_messages
from ..openai.schema import chat_messages
from ..openai.usage import OnUsage, completion_usage, finish_reasons
from ..service import Service, new_id
from .blocks import ContentBlocks
from .diagnostics import RequestDigests
from .schema import CountTokensRequest, MessagesRequest
from .translate import CachedPrefix, translate
from .usage import message_usage

_UNSAID = [{"role": "user", "content": "\ue000"}]  # no prompt goes on with this


@dataclass(frozen=True, slots=True)
class PreparedMessages:
    """A checked request."""

    chat: PreparedChat
    prefixes: tuple[PinnedPrefix, ...]  # that the request asks to pin
    shows_thinking: bool
    digests: RequestDigests | None = None  # where diagnostics are asked for
    previous: str | None = None  # the message that it is compared with

    @property
    def tenant(self) -> str:
        """The owner of the KV."""
        tenant: str = self.chat.keywords()["tenant"]
        return tenant


def prepare_messages(service: Service, body: MessagesRequest, caller: Caller) -> PreparedMessages:
    """Check a request and prepare it; slow, so it runs off the event loop."""
    translated = translate(body)
    asked = translated.body
    if translated.prefixes:
        asked = asked.model_copy(update={"kv_out": True})
    chat = prepare_chat(service, asked, caller, new_id("msg").replace("-", "_"), translated.deferred)
    prefixes = _pinned(service, chat, translated.prefixes)
    shows = body.thinking is None or body.thinking.display != "omitted"
    if body.diagnostics is None:
        return PreparedMessages(chat, prefixes, shows)
    digests = RequestDigests.of(body, caller.tenant)
    return PreparedMessages(chat, prefixes, shows, digests, body.diagnostics.previous_message_id)


def count_tokens(service: Service, body: CountTokensRequest, caller: Caller) -> int:
    """The tokens of a prompt; slow."""
    return len(_ids(service, prepare_chat(service, translate(body).body, caller)))


def _ids(service: Service, chat: PreparedChat) -> list[int]:
    return service.llm.chat_ids(chat.messages, chat.tools, template_kwargs=template_kwargs(chat.body))


def _pinned(service: Service, chat: PreparedChat, prefixes: Sequence[CachedPrefix]) -> tuple[PinnedPrefix, ...]:
    """How many tokens of the prompt stand before each breakpoint. A breakpoint before the first token is left out."""
    if not prefixes:
        return ()
    whole = _ids(service, chat)
    counts = [(_shared(whole, _prefix_ids(service, chat, prefix)), prefix.ttl_s) for prefix in prefixes]
    return tuple(PinnedPrefix(tokens, ttl_s) for tokens, ttl_s in counts if tokens)


def _prefix_ids(service: Service, chat: PreparedChat, prefix: CachedPrefix) -> list[int]:
    """The tokens of a conversation that ends at a breakpoint; none where the template refuses such a conversation."""
    messages = template_messages(chat_messages(list(prefix.messages)))
    for rest in ([], _UNSAID):  # some templates want a user's message
        try:
            return service.llm.chat_ids([*messages, *rest], chat.tools, False, template_kwargs(chat.body))
        except TemplateError:
            continue
    return []


def _shared(whole: Sequence[int], beginning: Sequence[int]) -> int:
    """How many tokens two prompts begin with together; not the last token, which is always computed."""
    pairs = zip(whole[:-1], beginning, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(whole) - 1, len(beginning)))


async def complete_message(service: Service, prepared: PreparedMessages, on_usage: OnUsage) -> dict[str, Any]:
    """The whole answer to a request without `stream`."""
    blocks, builder = ContentBlocks(prepared.shows_thinking), prepared.chat.message_format.builder()
    async with await open_chat(service, prepared.chat) as stream:
        async for delta in stream:
            blocks.add(builder.read(delta))
        done = stream.completion
    blocks.finish()
    await _pin(service, prepared, done)
    on_usage(completion_usage([done]), finish_reasons([done]))
    return {
        **_head(service, prepared),
        "content": blocks.content,
        **_stop(prepared, blocks, done.finish_reason, done.stop_string, len(done.token_ids)),
        "usage": message_usage(done.usage, len(done.token_ids), prepared.prefixes),
        **_diagnostics(service, prepared, done.usage),
    }


def _diagnostics(service: Service, prepared: PreparedMessages, usage: Usage) -> dict[str, Any]:
    """The field `diagnostics`, where the request asks for it."""
    if prepared.digests is None:
        return {}
    found = service.diagnostics.reason(prepared.digests, prepared.previous, usage)
    service.diagnostics.add(prepared.chat.name, prepared.digests)
    return {"diagnostics": found}


async def _pin(service: Service, prepared: PreparedMessages, done: Completion) -> None:
    if done.kv is not None:
        await service.pins.pin(done.kv, prepared.prefixes, prepared.tenant)


def _head(service: Service, prepared: PreparedMessages) -> dict[str, Any]:
    model = prepared.chat.lora or service.model
    return {"id": prepared.chat.name, "type": "message", "role": "assistant", "model": model}


def _stop(
    prepared: PreparedMessages, blocks: ContentBlocks, reason: str | None, stop_string: str | None, generated: int
) -> dict[str, Any]:
    """Why an answer ended."""
    if check_finish_reason(reason) == "length":
        most = prepared.chat.params.max_tokens
        said = "max_tokens" if most is None or generated >= most else "model_context_window_exceeded"
    elif blocks.has_calls:
        said = "tool_use"
    else:
        said = "end_turn" if stop_string is None else "stop_sequence"
    return {"stop_reason": said, "stop_sequence": stop_string if said == "stop_sequence" else None}


class MessagesStream(DeltaSource):
    """The answer to a streaming request as events: an `EventSource`."""

    def __init__(self, service: Service, prepared: PreparedMessages, stream: AsyncStream, on_usage: OnUsage) -> None:
        """`on_usage` gets the token counts when the answer has ended."""
        super().__init__(stream)
        self._service = service
        self._prepared = prepared
        self._on_usage = on_usage
        self._builder = prepared.chat.message_format.builder()
        self._blocks = ContentBlocks(prepared.shows_thinking)
        self._started = False  # the first event has counts that are known when the prompt's first step is done
        self._template: tuple[int, EventTemplate] | None = None  # of text, for the block with this index
        self._last: Delta | None = None

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """The end of the last block, and of the message."""
        done = self._stream.completion
        await _pin(self._service, self._prepared, done)
        self._on_usage(completion_usage([done]), finish_reasons([done]))
        generated = len(done.token_ids)
        stop = _stop(self._prepared, self._blocks, done.finish_reason, done.stop_string, generated)
        usage = message_usage(done.usage, generated, self._prepared.prefixes)
        yield b"".join(map(named_event, self._blocks.finish()))
        more = _diagnostics(self._service, self._prepared, done.usage)
        yield named_event({"type": "message_delta", "delta": stop, "usage": usage, **more})
        yield named_event({"type": "message_stop"})

    def _encode(self, delta: Delta) -> bytes:
        started = b"" if self._started else self._start(delta)
        if delta.reading is not None:
            return started
        index = self._blocks.index_of_text
        if index is not None and self._builder.is_content(delta):
            self._blocks.append_text(delta.text)
            return started + self._text_event(index, delta.text)
        return started + b"".join(map(named_event, self._blocks.add(self._builder.read(delta))))

    def _start(self, delta: Delta) -> bytes:
        self._started = True
        usage = Usage(0, 0, 0) if delta.reading is None else delta.reading.usage
        message = {
            **_head(self._service, self._prepared),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(usage, 0, self._prepared.prefixes),
        }
        return named_event({"type": "message_start", "message": message}) + named_event({"type": "ping"})

    def _text_event(self, index: int, text: str) -> bytes:
        """The event of most tokens."""
        if self._template is None or self._template[0] != index:
            self._template = index, EventTemplate(lambda text: named_event(_text_delta(index, text)))
        return self._template[1].with_text(text)


def _text_delta(index: int, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
