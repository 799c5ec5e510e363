"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ...llm.offload import PROMPT
from ..chat import ChatStream, ready, whole
from ..respond import json_response
from ..schema.answers import ChatCompletion
from ..schema.chat import ChatRequest
from ..spans import answered, tell
from ..sse import EventStream
from .common import ASKING, Here, StrictRoute, Who

router = APIRouter(route_class=StrictRoute, tags=["chat"])
_OK: dict[int | str, dict[str, Any]] = {
    200: {"model": ChatCompletion, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.post("/v1/chat/completions", responses=_OK | ASKING, response_model=None)
async def chat(asked: ChatRequest, request: Request, service: Here, caller: Who) -> Response:
    """Answer a conversation."""
    talk = await service.llm.offload.run(PROMPT, ready, service, asked, caller, owner=caller.tenant)
    tell(request.scope, "chat", service.model, talk.params)
    count = partial(answered, request.scope)
    if not asked.stream:
        done = await whole(service, talk)
        count(done["usage"])
        return json_response(done)
    stream = await service.llm.stream_chat(talk.messages, talk.params, **talk.given())
    return EventStream(ChatStream(service, talk, stream, count).events(), service.config.keep_alive_s)
