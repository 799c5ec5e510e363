"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ...llm.offload import PROMPT
from ..http.event_stream import EventStream
from ..http.responses import json_response
from ..http.routing import CallerDep, ServiceDep, StrictRoute, error_responses, generation_responses
from ..openai.chat import open_chat, trace_chat
from .answers import AnthropicError, AnthropicMessage, TokenCount
from .errors import ANTHROPIC_STREAM
from .messages import MessagesStream, complete_message, count_tokens, prepare_messages
from .schema import CountTokensRequest, MessagesRequest

router = APIRouter(route_class=StrictRoute, tags=["anthropic"])
_COUNTED = error_responses(400, 404, 408, 413, 415, 429, model=AnthropicError)


@router.post(
    "/v1/messages", response_model=None, responses=generation_responses(AnthropicMessage, error=AnthropicError)
)
async def messages(body: MessagesRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Answer a conversation, in the format of Anthropic's Messages API."""
    prepared = await service.llm.offload.run(PROMPT, prepare_messages, service, body, caller, owner=caller.tenant)
    on_usage = trace_chat(request.scope, service, prepared.chat)
    if not body.stream:
        return json_response(await complete_message(service, prepared, on_usage))
    stream = await open_chat(service, prepared.chat)
    source = MessagesStream(service, prepared, stream, on_usage)
    return EventStream(source, service.config.keep_alive_s, ANTHROPIC_STREAM)


@router.post("/v1/messages/count_tokens", response_model=None, responses={200: {"model": TokenCount}, **_COUNTED})
async def count(body: CountTokensRequest, service: ServiceDep, caller: CallerDep) -> Response:
    """The number of tokens of a conversation."""
    tokens = await service.llm.offload.run(PROMPT, count_tokens, service, body, caller, owner=caller.tenant)
    return json_response({"input_tokens": tokens})
