"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ...llm.offload import PROMPT
from ..completions import CompletionStream, open_streams, ready, whole
from ..respond import json_response
from ..schema.answers import TextCompletion
from ..schema.completion import CompletionRequest
from ..spans import answered, tell
from ..sse import EventStream
from .common import ASKING, Here, StrictRoute, Who

router = APIRouter(route_class=StrictRoute, tags=["completions"])
_OK: dict[int | str, dict[str, Any]] = {
    200: {"model": TextCompletion, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.post("/v1/completions", responses=_OK | ASKING, response_model=None)
async def completions(asked: CompletionRequest, request: Request, service: Here, caller: Who) -> Response:
    """Continue a prompt, or several."""
    prompts = await service.llm.offload.run(PROMPT, ready, service, asked, caller, owner=caller.tenant)
    tell(request.scope, "text_completion", service.model, prompts.params)
    count = partial(answered, request.scope)
    if not asked.stream:
        done = await whole(service, prompts)
        count(done["usage"])
        return json_response(done)
    streams = await open_streams(service, prompts)
    return EventStream(CompletionStream(service, prompts, streams, count).events(), service.config.keep_alive_s)
