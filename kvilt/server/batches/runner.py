"""Answers the requests of a batch with the engine kept full, in an order in which shared prompts are computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from ...llm.offload import PROMPT
from ..auth import Caller
from ..http.body import validate
from ..http.errors import HTTPError, http_error_of
from ..openai.chat import complete_chat, prepare_chat
from ..openai.completions import complete_text, prepare_completion
from ..openai.schema import ChatRequest, CompletionRequest
from ..service import Service
from ..tracing import batch_span, trace_batch_answer
from .lines import BatchLine, answer_line, problem_line

AT_ONCE = 64  # requests in the engine; a batch of a GPU's rows or a CPU's has room for more than it computes at once


@dataclass(frozen=True, slots=True)
class BatchRoute:
    """A route that batches may ask for."""

    operation: str  # its name in traces
    shape: TypeAdapter[Any]
    prepare: Callable[[Service, Any, Caller], Any]
    complete: Callable[[Service, Any], Awaitable[dict[str, Any]]]


ROUTES: Mapping[str, BatchRoute] = MappingProxyType(
    {
        "/v1/chat/completions": BatchRoute("chat", TypeAdapter(ChatRequest), prepare_chat, complete_chat),
        "/v1/completions": BatchRoute(
            "text_completion", TypeAdapter(CompletionRequest), prepare_completion, complete_text
        ),
    }
)


class BatchRunner:
    """Runs the requests of one caller."""

    def __init__(self, service: Service, caller: Caller, at_once: int = AT_ONCE, any_model: bool = False) -> None:
        """With `any_model` the model that a request names is not looked at: there is one, and it answers all."""
        self._service = service
        self._caller = caller
        self._any_model = any_model
        self._room = asyncio.Semaphore(at_once)

    async def run(self, lines: Iterable[BatchLine], write: Callable[[dict[str, Any]], None]) -> None:
        """Answer all lines; `write` gets each answer as soon as it is there."""
        async with asyncio.TaskGroup() as group:
            for line in sorted(lines, key=lambda line: line.order):
                await self._room.acquire()
                group.create_task(self._one(line, write))

    async def _one(self, line: BatchLine, write: Callable[[dict[str, Any]], None]) -> None:
        try:
            write(problem_line(line) if line.problem else await self._answered(line))
        finally:
            self._room.release()

    async def _answered(self, line: BatchLine) -> dict[str, Any]:
        try:
            return answer_line(line, 200, await self._answer(line))
        except Exception as error:  # each request has an answer of its own, and no other one suffers
            refused = http_error_of(error)
            return answer_line(line, refused.status_code, refused.body())

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        route = ROUTES.get(line.url)
        if route is None:
            known = ", ".join(ROUTES)
            raise HTTPError(404, f"batches have no route {line.url[:64]!r}; they have {known}", code="unknown_url")
        fields = dict(line.body or {})
        if self._any_model:
            fields.pop("model", None)
        if fields.get("stream"):
            raise HTTPError(400, "stream: an answer of a batch is not streamed; leave it out", param="stream")
        service, caller = self._service, self._caller
        body = validate(fields, route.shape)
        with batch_span(line.url, line.custom_id) as span:
            prepared = await service.llm.offload.run(PROMPT, route.prepare, service, body, caller, owner=caller.tenant)
            answer = await route.complete(service, prepared)
            trace_batch_answer(span, route.operation, answer)
        return answer
