"""Answers the requests of a batch with the engine kept full, in an order in which shared prompts are computed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from ...errors import Draining, ModelClosed
from ...llm.offload import PROMPT
from ..auth import Caller
from ..http.body import validate
from ..http.errors import HTTPError, http_error_of
from ..openai.chat import complete_chat, prepare_chat
from ..openai.completions import complete_text, prepare_completion
from ..openai.embeddings import EmbeddingsRequest, complete_embeddings, prepare_embeddings
from ..openai.schema import ChatRequest, CompletionRequest
from ..responses.respond import PreparedResponse, prepare_response
from ..responses.schema import ResponseRequest
from ..responses.writer import complete_response
from ..service import Service
from ..tracing import batch_span, trace_batch_answer
from .lines import BatchLine, answer_line, problem_line

Write = Callable[[dict[str, Any]], Awaitable[None]]  # takes an answer
AT_ONCE = 64  # requests in the engine; a batch of a GPU's rows or a CPU's has room for more than it computes at once
BUSY_S = 0.5  # until a request that found the server busy is tried again


@dataclass(frozen=True, slots=True)
class BatchRoute:
    """A route that batches may ask for."""

    operation: str  # its name in traces
    shape: TypeAdapter[Any]
    prepare: Callable[[Service, Any, Caller], Any]
    complete: Callable[[Service, Any], Awaitable[dict[str, Any]]]


async def _respond(service: Service, prepared: PreparedResponse) -> dict[str, Any]:
    return await complete_response(service, prepared, lambda _usage, _reasons: None)


ROUTES: Mapping[str, BatchRoute] = MappingProxyType(
    {
        "/v1/chat/completions": BatchRoute("chat", TypeAdapter(ChatRequest), prepare_chat, complete_chat),
        "/v1/completions": BatchRoute(
            "text_completion", TypeAdapter(CompletionRequest), prepare_completion, complete_text
        ),
        "/v1/embeddings": BatchRoute(
            "embeddings", TypeAdapter(EmbeddingsRequest), prepare_embeddings, complete_embeddings
        ),
        "/v1/responses": BatchRoute("chat", TypeAdapter(ResponseRequest), prepare_response, _respond),
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

    async def run(self, lines: AsyncIterator[BatchLine], write: Write) -> None:
        """Answer all lines, begun in their order; `write` gets each answer as soon as it is there.

        A line is read when there is room for its request.
        """
        async with asyncio.TaskGroup() as group:
            await self._room.acquire()
            async for line in lines:
                group.create_task(self._one(line, write))
                await self._room.acquire()

    async def _one(self, line: BatchLine, write: Write) -> None:
        try:
            await write(problem_line(line) if line.problem else await self._answered(line))
        finally:
            self._room.release()

    async def _answered(self, line: BatchLine) -> dict[str, Any]:
        while True:
            try:
                return answer_line(line, 200, await self._answer(line))
            except (Draining, ModelClosed):
                raise  # this is no answer: the batch goes on when there is a model again
            except Exception as error:  # each request has an answer of its own, and no other one suffers
                refused = http_error_of(error)
                if refused.status_code != 429:
                    return answer_line(line, refused.status_code, refused.body())
                await asyncio.sleep(BUSY_S)  # other requests go first; a batch has time

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


async def in_turn(lines: Iterable[BatchLine]) -> AsyncIterator[BatchLine]:
    """Lines that are in memory."""
    for line in lines:
        yield line
