"""Responses: prepares a request, opens its stream, and keeps what the next response goes on from."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any

import orjson

from ...errors import HandleError, ParamError
from ...llm import AsyncStream, Completion
from ..auth import Caller
from ..openai.chat import PreparedChat, open_chat, prepare_chat
from ..openai.params import template_kwargs, template_messages
from ..service import Service, new_id
from .items import Message, answer_message, messages_of
from .output import OutputItems
from .schema import ResponsePrompt, ResponseRequest
from .store import Continuation, StoredResponse
from .translate import SEALED_REASONING, TranslatedResponse, shortened, translate

_NAMED_S = 1800.0  # how long KV is kept under a prompt_cache_key
_LEFT_FOR_ANSWER = 256  # tokens, or a quarter of the context, where a conversation is shortened


@dataclass(frozen=True, slots=True)
class Resumed:
    """The stored KV that a prompt goes on from, and the tokens after it."""

    handle: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A checked request."""

    body: ResponseRequest
    chat: PreparedChat
    translated: TranslatedResponse
    messages: list[Message]  # the whole conversation, without instructions
    digest: bytes  # of what stands before the messages
    resumed: Resumed | None
    created_s: int

    @property
    def tenant(self) -> str:
        """The owner of the response and its KV."""
        tenant: str = self.chat.keywords()["tenant"]
        return tenant

    @property
    def stores(self) -> bool:
        """Whether the response is kept."""
        return self.body.store is not False

    def items(self) -> OutputItems:
        """A builder for the output."""
        seals = SEALED_REASONING in (self.body.include or ())
        return OutputItems(self.translated.tools, self.translated.forced, seals)


def prepare_response(service: Service, body: ResponseRequest, caller: Caller) -> PreparedResponse:
    """Check a request and prepare it; slow, so it runs off the event loop."""
    previous = _previous(service, body, caller.salted(body.cache_salt).tenant)
    messages = _messages(service, body, previous, caller)
    translated = translate(body, messages)
    name = new_id("resp").replace("-", "_")
    chat = prepare_chat(service, translated.body, caller, name, translated.deferred)
    digest = _digest(body, chat)
    resumed = _resumed(service, chat, messages, previous, digest)
    return PreparedResponse(body, chat, translated, messages, digest, resumed, int(time.time()))


def count_input(service: Service, body: ResponsePrompt, caller: Caller) -> int:
    """The tokens of a prompt; slow."""
    messages = _messages(service, body, _previous(service, body, caller.tenant), caller)
    return len(_ids(service, prepare_chat(service, translate(body, messages).body, caller)))


def _previous(service: Service, body: ResponsePrompt, tenant: str) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    found = service.responses.find(body.previous_response_id, tenant, "previous_response_id")
    if found.shown["status"] in ("in_progress", "failed"):
        raise ParamError("previous_response_id", f"that response is {found.shown['status']}, so nothing continues it")
    return found


def _messages(service: Service, body: ResponsePrompt, previous: StoredResponse | None, caller: Caller) -> list[Message]:
    """The whole conversation, shortened if that is asked for and needed."""
    messages = [*(previous.messages if previous is not None else ()), *messages_of(body.input)]
    if body.truncation != "auto" or not messages:
        return messages
    context = service.llm.executor.max_context
    wanted = getattr(body, "max_output_tokens", None) or _LEFT_FOR_ANSWER

    def count(some: list[Message]) -> int:
        return len(_ids(service, prepare_chat(service, translate(body, some).body, caller)))

    return shortened(messages, count, context - min(wanted, context // 4))


def _ids(service: Service, chat: PreparedChat) -> list[int]:
    return service.llm.chat_ids(chat.messages, chat.tools, template_kwargs=template_kwargs(chat.body))


def _digest(body: ResponseRequest, chat: PreparedChat) -> bytes:
    before = [body.instructions, chat.tools, template_kwargs(chat.body), chat.lora]
    return hashlib.sha256(orjson.dumps(before, option=orjson.OPT_SORT_KEYS)).digest()


def _resumed(
    service: Service, chat: PreparedChat, messages: list[Message], previous: StoredResponse | None, digest: bytes
) -> Resumed | None:
    """Where the prompt goes on from stored tokens; None where it must be rendered as a whole.

    That is so after reasoning and calls, which templates show in another form than the model wrote them. What both
    have in common is found by the prefix index then.
    """
    stored = None if previous is None else previous.continuation
    if previous is None or stored is None or not stored.exact or stored.prompt != digest:
        return None
    before = len(previous.messages)
    if messages[:before] != previous.messages or any(one["role"] == "assistant" for one in messages[before:]):
        return None
    template = service.llm.chat_template
    variables = template.options_read(template_kwargs(chat.body))
    said = template_messages(chat.body.messages)
    behind = template.encode_after(service.llm.tokenizer, said, tools=chat.tools, **variables)
    return None if behind is None else Resumed(stored.handle, (*stored.unread, *behind))


async def open_response(service: Service, prepared: PreparedResponse) -> AsyncStream:
    """The stream of the answer."""
    resumed = prepared.resumed
    if resumed is not None:
        chat_only = ("tools", "chat_template_kwargs", "kv")
        options = {name: value for name, value in prepared.chat.keywords().items() if name not in chat_only}
        try:
            return await service.llm.stream(list(resumed.ids), prepared.chat.params, kv=resumed.handle, **options)
        except HandleError:
            pass  # it has expired meanwhile, or its owner has deleted it
    return await open_chat(service, prepared.chat)


async def keep_response(
    service: Service, prepared: PreparedResponse, stored: StoredResponse, done: Completion, items: OutputItems
) -> None:
    """Store a response that has ended, with its KV. Takes the KV of the completion over."""
    if done.kv is not None and prepared.body.prompt_cache_key is not None:
        named = done.kv.fork() if prepared.stores else done.kv
        await service.pins.pin_named(named, prepared.body.prompt_cache_key, prepared.tenant, _NAMED_S)
    if not prepared.stores:
        return
    if done.kv is not None:
        stored.continuation = await _continuation(service, prepared, done, items)
    stored.messages = [*prepared.messages, answer_message(items.output)]
    stored.stream = None
    await service.responses.put(prepared.chat.name, stored)


async def _continuation(
    service: Service, prepared: PreparedResponse, done: Completion, items: OutputItems
) -> Continuation | None:
    assert done.kv is not None
    held, expected = done.kv.num_entries, done.usage.prompt_tokens + len(done.token_ids) - 1
    plain = [item["type"] for item in items.output] == ["message"] and held == expected
    handle = await service.responses.keep_kv(done.kv, prepared.tenant)
    if handle is None:
        return None
    unread = tuple(token for token in done.token_ids[-1:] if token not in service.llm.stop_ids)
    return Continuation(handle, prepared.digest, unread, plain)


def shown_response(
    service: Service, prepared: PreparedResponse, status: str, output: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """A response as clients get it."""
    body, params = prepared.body, prepared.chat.params
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    choice = body.tool_choice
    made = {
        "id": prepared.chat.name,
        "object": "response",
        "created_at": prepared.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": prepared.chat.lora or service.model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": prepared.stores,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(exclude_none=True, by_alias=True) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
        **more,
    }
    return made | ({"warnings": list(prepared.translated.warnings)} if prepared.translated.warnings else {})
