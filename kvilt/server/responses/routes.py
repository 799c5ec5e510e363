"""POST, GET and DELETE /v1/responses, their cancelling, and the count of input tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ...llm.offload import PROMPT
from ..http.event_stream import EventStream
from ..http.responses import json_response
from ..http.routing import (
    BODY_ERRORS,
    CallerDep,
    SaltedCallerDep,
    ServiceDep,
    StrictRoute,
    error_responses,
    generation_responses,
)
from ..openai.chat import trace_chat
from .answers import DeletedResponse, InputTokens, ResponseObject
from .respond import count_input, open_response, prepare_response
from .schema import ResponsePrompt, ResponseRequest
from .writer import ResponseAnswer, ResponseStream, complete_response

router = APIRouter(route_class=StrictRoute, tags=["responses"])
_FOUND: dict[int | str, dict[str, Any]] = {200: {"model": ResponseObject}, **error_responses(400, 404)}


@router.post("/v1/responses", response_model=None, responses=generation_responses(ResponseObject))
async def create(body: ResponseRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Answer a conversation, and store the response."""
    prepared = await service.llm.offload.run(PROMPT, prepare_response, service, body, caller, owner=caller.tenant)
    on_usage = trace_chat(request.scope, service, prepared.chat)
    if not body.stream:
        return json_response(await complete_response(service, prepared, on_usage))
    answer = ResponseAnswer(service, prepared)
    stream = await open_response(service, prepared)
    if prepared.stores:
        answer.stored.stream = stream
        await service.responses.put(prepared.chat.name, answer.stored)
    source = ResponseStream(answer, stream, on_usage)
    return EventStream(source, service.config.keep_alive_s, source.format)


@router.post("/v1/responses/input_tokens", response_model=None, responses={200: {"model": InputTokens}, **BODY_ERRORS})
async def input_tokens(body: ResponsePrompt, service: ServiceDep, caller: CallerDep) -> Response:
    """The number of tokens of a prompt."""
    tokens = await service.llm.offload.run(PROMPT, count_input, service, body, caller, owner=caller.tenant)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


@router.get("/v1/responses/{name}", response_model=None, responses=_FOUND)
async def retrieve(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """A stored response."""
    return json_response(service.responses.find(name, caller.tenant).shown)


@router.delete(
    "/v1/responses/{name}",
    response_model=None,
    responses={200: {"model": DeletedResponse}, **error_responses(400, 404)},
)
async def delete(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """Forget a stored response and its KV."""
    await service.responses.delete(name, caller.tenant)
    return json_response({"id": name, "object": "response", "deleted": True})


@router.post("/v1/responses/{name}/cancel", response_model=None, responses=_FOUND)
async def cancel(name: str, service: ServiceDep, caller: SaltedCallerDep) -> Response:
    """End a response that is in progress; one that has ended stays as it is."""
    found = service.responses.find(name, caller.tenant)
    if found.stream is None:
        return json_response(found.shown)
    found.cancelled = True
    found.stream.stop()
    return json_response({**found.shown, "status": "cancelled"})
