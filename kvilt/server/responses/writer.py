"""The answer of a response, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from ...llm import AsyncStream, Completion, Delta
from ...text.parse import Reasoning
from ..http.delta_source import DeltaSource
from ..http.errors import HTTPError, check_finish_reason, renamed
from ..http.event_stream import COMMENT, StreamFormat, named_event
from ..openai.usage import OnUsage, chat_logprobs, completion_usage, finish_reasons
from ..service import Service
from .items import answer_message
from .output import Event
from .respond import PreparedResponse, keep_response, open_response, shown_response
from .store import StoredResponse

# Fields of the request that this one is translated to, and their names here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def responses_error(error: HTTPError) -> dict[str, Any]:
    """The body of an error: OpenAI's, with the names of this API."""
    message, param = renamed(error, _NAMES)
    body = error.body()
    return {"error": {**body["error"], "message": message, "param": param}}


class ResponseAnswer:
    """Turns the deltas of one answer into items, counts, and the response at its end."""

    def __init__(self, service: Service, prepared: PreparedResponse) -> None:
        self._service = service
        self._prepared = prepared
        self._builder = prepared.chat.message_format.builder()
        self.items = prepared.items()
        self.stored = StoredResponse(prepared.tenant, self.shown("in_progress"))
        self._reasoning_tokens = 0

    def shown(self, status: str, **more: Any) -> dict[str, Any]:
        """The response in a state."""
        return shown_response(self._service, self._prepared, status, self.items.output, **more)

    def add(self, delta: Delta) -> list[Event]:
        """Add a delta; the events it makes."""
        pieces = self._builder.read(delta)
        self._reasoning_tokens += delta.token is not None and any(isinstance(one, Reasoning) for one in pieces)
        entries = None
        if delta.logprobs is not None:
            entries = chat_logprobs(self._service.llm.tokenizer, [delta.logprobs])["content"]
        return self.items.add(pieces, entries)

    async def finish(self, done: Completion, on_usage: OnUsage) -> list[Event]:
        """The last events of the items; the response is complete and stored then."""
        try:
            return await self._finish(done, on_usage)
        except BaseException:
            if done.kv is not None:
                done.kv.close()
            raise

    async def _finish(self, done: Completion, on_usage: OnUsage) -> list[Event]:
        status, details = self._status(done)
        events = self.items.finish("completed" if status == "completed" else "incomplete")
        on_usage(counts := completion_usage([done]), finish_reasons([done]))
        self.stored.shown = self.shown(status, incomplete_details=details, usage=self._usage(counts))
        await keep_response(self._service, self._prepared, self.stored, done, self.items)
        return events

    def cancel(self) -> None:
        """The client has left: what was written so far can be continued. Its KV is gone."""
        self.items.finish("incomplete")
        self.stored.shown = self.shown("cancelled")
        self.stored.messages = [*self._prepared.messages, answer_message(self.items.output)]

    def _status(self, done: Completion) -> tuple[str, dict[str, str] | None]:
        if self.stored.cancelled:
            return "cancelled", None
        if check_finish_reason(done.finish_reason) == "length":
            return "incomplete", {"reason": "max_output_tokens"}
        return "completed", None

    def _usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        details = counts["prompt_tokens_details"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": details["cached_tokens"],
                "cache_write_tokens": details["cache_write_tokens"],
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": counts["total_tokens"],
            "kvilt": counts["kvilt"],
        }


async def complete_response(service: Service, prepared: PreparedResponse, on_usage: OnUsage) -> dict[str, Any]:
    """The whole response to a request without `stream`."""
    answer = ResponseAnswer(service, prepared)
    async with await open_response(service, prepared) as stream:
        async for delta in stream:
            answer.add(delta)
        done = stream.completion
    await answer.finish(done, on_usage)
    return answer.stored.shown


_ENDS = {"completed": "response.completed", "failed": "response.failed"}


class ResponseStream(DeltaSource):
    """The response to a streaming request as events: an `EventSource`."""

    def __init__(self, answer: ResponseAnswer, stream: AsyncStream, on_usage: OnUsage) -> None:
        """`on_usage` gets the token counts when the answer has ended."""
        super().__init__(stream)
        self._answer = answer
        self._on_usage = on_usage
        self._sequence = 0

    @property
    def format(self) -> StreamFormat:
        """The stream around the events."""
        return StreamFormat("text/event-stream", b"", COMMENT, self._failed)

    def opening(self) -> bytes:
        """The response before its first item."""
        shown = self._answer.shown("in_progress")
        begun = ("response.created", "response.in_progress")
        return self._written({"type": kind, "response": shown} for kind in begun)

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """The end of the last item, and the whole response."""
        yield self._written(await self._answer.finish(self._stream.completion, self._on_usage))
        yield self._end()

    def close(self) -> None:
        """End the request; a response that had not ended is cancelled."""
        if self._answer.stored.shown["status"] == "in_progress":
            self._answer.cancel()
        self._answer.stored.stream = None
        super().close()

    def _failed(self, error: HTTPError) -> bytes:
        message, param = renamed(error, _NAMES)
        told = {"code": error.code or error.type, "message": message, "param": param}
        self._answer.stored.shown = self._answer.shown("failed", error=told)
        return self._end()

    def _end(self) -> bytes:
        shown = self._answer.stored.shown
        return self._written([{"type": _ENDS.get(shown["status"], "response.incomplete"), "response": shown}])

    def _encode(self, delta: Delta) -> bytes:
        return self._written(self._answer.add(delta))

    def _written(self, events: Iterable[Event]) -> bytes:
        made = []
        for event in events:
            made.append(named_event({**event, "sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(made)
