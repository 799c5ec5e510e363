"""POST /v1/completions: checks a request, asks the model, and writes its answers, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ...errors import ParamError
from ...llm import AsyncStream, Completion, Delta, ReadingProgress
from ...llm.offload import ANSWER, PROMPT
from ...sampling.params import SamplingParams
from ..auth import Caller
from ..http.errors import HTTPError, check_finish_reason
from ..http.event_stream import EventStream, EventTemplate, sse_event
from ..http.responses import json_response
from ..http.routing import CallerDep, ServiceDep, StrictRoute, generation_responses
from ..kv.handles import keep_kv
from ..service import Service, answer_header, new_id
from ..tracing import trace_request, trace_response, trace_usage
from .params import check_documents, prompt_progress, request_options, sampling_params, wants_discovery, wants_progress
from .schema import CompletionRequest, TextCompletion
from .usage import CompletionLogprobs, OnUsage, blended_tokenizer, completion_usage, finish_reasons, running_usage

DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A checked completion request with everything that the model needs."""

    body: CompletionRequest
    caller: Caller
    name: str
    ids: Sequence[Sequence[int]]  # of each prompt
    texts: Sequence[str]  # of each prompt, for echo
    params: SamplingParams
    lora: str | None = None  # the adapter that the request named as its model

    def keywords(self, index: int) -> dict[str, Any]:
        """The keywords of `AsyncLLM.generate` and `AsyncLLM.stream` for one prompt."""
        return request_options(self.body, self.caller, f"{self.name}-{index}", self.lora)


def prepare_completion(service: Service, body: CompletionRequest, caller: Caller) -> PreparedCompletion:
    """Check a request, tokenize its prompts and prepare its params; slow, so it runs off the event loop."""
    lora = service.check_model(body.model)
    prompts = _listed(body)
    _check(service, body, len(prompts))
    ids, texts = _read(service, body, prompts)
    params = sampling_params(
        body,
        max_tokens=DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=(body.logprobs or 0) if _wants_prompt_logprobs(body) else None,
    )
    return PreparedCompletion(body, caller, new_id("cmpl"), ids, texts, params, lora)


def _wants_prompt_logprobs(body: CompletionRequest) -> bool:
    """Whether log-probabilities of the prompt are wanted."""
    return bool(body.echo) and (body.logprobs is not None or body.max_tokens == 0)


def _listed(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts as a list; a list of token ids is one prompt."""
    given = body.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _check(service: Service, body: CompletionRequest, prompts: int) -> None:
    most = service.config.max_prompts
    samples = prompts * (body.n or 1)
    if samples > most:
        raise HTTPError(
            400, f"prompt: {samples} answers were asked for and {most} are allowed", param="prompt", code="too_many"
        )
    check_documents(service, body)
    if (body.documents or wants_discovery(body)) and _wants_prompt_logprobs(body):
        raise ParamError("echo", "cannot score a prompt with documents, because they are not computed as a whole")
    if body.kv_out and prompts > 1:
        raise ParamError("kv_out", "keeps the KV of one prompt; send the prompts one by one")
    if body.max_tokens == 0 and not body.echo:
        raise ParamError("max_tokens", "must be at least 1; 0 is possible with echo only")
    if body.stream_options is not None and not body.stream:
        raise ParamError("stream_options", "is for streams; set stream to true")


def _read(
    service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[list[int]], list[str]]:
    """Token ids of the prompts, and their texts for echo."""
    llm = service.llm
    begins = body.kv is None and not body.documents  # after documents a prompt does not start the text
    ids = [llm.prompt_ids(prompt, begins=begins) for prompt in prompts]
    if not body.echo:
        return ids, [""] * len(ids)
    shown = [given if isinstance(given, str) else llm.tokenizer.decode(given) for given in prompts]
    return ids, shown


_PROMPTS_AT_ONCE = 64  # of one request, in the engine: starting or ending a thousand at once would hold the event loop


async def complete_text(service: Service, prepared: PreparedCompletion) -> dict[str, Any]:
    """The whole answer to a request without `stream`."""
    room = asyncio.Semaphore(_PROMPTS_AT_ONCE)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(service, prepared, index, room)) for index in range(len(prepared.ids))]
    done = [task.result() for task in tasks]
    kept = await keep_kv(service.llm, done[0], prepared.keywords(0)["tenant"]) if prepared.body.kv_out else {}
    if prepared.body.logprobs is None and not prepared.body.return_blended_tokens:
        return _answer(service, prepared, done, kept)
    return await service.llm.offload.run(ANSWER, _answer, service, prepared, done, kept, owner=prepared.caller.tenant)


def _answer(
    service: Service, prepared: PreparedCompletion, done: Sequence[Completion], kept: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """All samples as choices; slow with logprobs."""
    choices = []
    for place, completion in enumerate(done):
        for index, sample in enumerate((completion, *completion.alternatives)):
            choice = _choice(service, prepared, place, sample)
            choices.append({"index": place * prepared.params.n + index, **choice, **kept.get(index, {})})
    return {
        **answer_header(service, "text_completion", prepared.name, prepared.lora),
        "choices": choices,
        "usage": completion_usage(done, blended_tokenizer(service.llm.tokenizer, prepared.body)),
        **({"warnings": list(done[0].warnings)} if done[0].warnings else {}),
    }


async def _one(service: Service, prepared: PreparedCompletion, index: int, room: asyncio.Semaphore) -> Completion:
    async with room:
        return await service.llm.generate(prepared.ids[index], prepared.params, **prepared.keywords(index))


def _choice(service: Service, prepared: PreparedCompletion, place: int, sample: Completion) -> dict[str, Any]:
    logprobs = None
    if prepared.body.logprobs is not None:
        logprob_lists = CompletionLogprobs(service.llm.tokenizer)
        if prepared.body.echo:
            logprob_lists.add_prompt(prepared.ids[place], sample.prompt_logprobs or ())
        logprob_lists.add_generated(sample.logprobs or ())
        logprobs = logprob_lists.take_new()
    return {
        "text": prepared.texts[place] + sample.text,
        "logprobs": logprobs,
        "finish_reason": check_finish_reason(sample.finish_reason),
    }


async def open_streams(service: Service, prepared: PreparedCompletion) -> list[AsyncStream]:
    """A stream for each prompt. Errors are raised here, before the response starts."""
    streams: list[AsyncStream] = []
    try:
        for index, ids in enumerate(prepared.ids):
            streams.append(
                await service.llm.stream(
                    ids, prepared.params, progress=wants_progress(prepared.body), **prepared.keywords(index)
                )
            )
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams


class CompletionStream:
    """The answers to a streaming request as server-sent events: an `EventSource`."""

    def __init__(
        self, service: Service, prepared: PreparedCompletion, streams: Sequence[AsyncStream], on_usage: OnUsage
    ) -> None:
        """`on_usage` gets the token counts when the answers have ended."""
        self._service = service
        self._prepared = prepared
        self._merged = MergedStreams(streams)
        self._on_usage = on_usage
        self._head = answer_header(service, "text_completion", prepared.name, prepared.lora)
        options = prepared.body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running = bool(options and options.continuous_usage_stats)
        self._read: dict[int, ReadingProgress] = {}
        self._generated = 0
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice; from its first delta on
        self._prompt_logprobs: dict[int, CompletionLogprobs] = {}  # by choice; until its first delta
        self._templates: dict[int, EventTemplate] = {}  # by choice
        self._unsent: deque[tuple[int, Delta]] = deque()  # wait for `work`
        self._ends: list[Delta] = []  # with kv_out
        self.work: Callable[[], Awaitable[None]] | None = None

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be something to read."""
        self._merged.on_news(callback)

    def opening(self) -> bytes:
        """Nothing: a choice begins with its first text."""
        return b""

    def read_ready(self) -> bytes | None:
        """The chunks of deltas that are there; None where there are none, or `work` comes first."""
        if self.work is not None:
            return None
        self._unsent.extend(self._merged.read_ready())
        if not self._unsent:
            return None
        chunks = []
        while self._unsent and not self._needs_work(*self._unsent[0]):
            chunks.append(self._encode(*self._unsent.popleft()))
        return b"".join(chunks)

    @property
    def over(self) -> bool:
        """Whether all deltas were read."""
        return not self._unsent and self._merged.ended

    async def closing(self) -> AsyncGenerator[bytes, None]:
        """Chunks that need the completions: those with handles, and the usage."""
        done = [stream.completion for stream in self._merged.streams]
        if self._ends:
            kept = await keep_kv(self._service.llm, done[0], self._prepared.keywords(0)["tenant"])
            for delta in self._ends:
                yield self._delta_chunk(0, delta, **kept.get(delta.index, {}))
        if (blended := blended_tokenizer(self._service.llm.tokenizer, self._prepared.body)) is None:
            took = completion_usage(done)
        else:
            owner = self._prepared.caller.tenant
            took = await self._service.llm.offload.run(ANSWER, completion_usage, done, blended, owner=owner)
        self._on_usage(took, finish_reasons(done))
        if self._usage:
            yield sse_event({**self._head, "choices": [], "usage": took})
        if done[0].warnings:
            yield sse_event({**self._head, "choices": [], "warnings": list(done[0].warnings)})

    def close(self) -> None:
        """End the requests."""
        for stream in self._merged.streams:
            stream.close()

    def _needs_work(self, place: int, delta: Delta) -> bool:
        """Whether this is the first token of a choice that echoes its prompt with logprobs: a slow conversion."""
        body, index = self._prepared.body, place * self._prepared.params.n + delta.index
        if not body.echo or body.logprobs is None or delta.reading is not None:
            return False
        if index in self._logprobs or index in self._prompt_logprobs:
            return False
        self.work = partial(self._convert_prompt_logprobs, place, index)
        return True

    async def _convert_prompt_logprobs(self, place: int, index: int) -> None:
        """The logprobs of a choice's prompt, off the event loop."""
        owner = self._prepared.caller.tenant
        self._prompt_logprobs[index] = await self._service.llm.offload.run(
            ANSWER, self._new_logprobs, place, owner=owner
        )
        self.work = None

    def _new_logprobs(self, place: int) -> CompletionLogprobs:
        logprob_lists = CompletionLogprobs(self._service.llm.tokenizer)
        if self._prepared.body.echo:
            scored = self._merged.streams[place].prompt_logprobs
            logprob_lists.add_prompt(self._prepared.ids[place], scored or ())
        return logprob_lists

    def _encode(self, place: int, delta: Delta) -> bytes:
        """A delta as a chunk; empty where it adds nothing, or waits for the end."""
        if delta.finish_reason is not None:
            if self._prepared.body.kv_out:
                self._ends.append(delta)  # its handle is known only when all samples have ended
                return b""
        elif delta.text and delta.logprobs is None and not self._running:
            template = self._templates.get(place * self._prepared.params.n + delta.index)
            if template is not None:
                return template.with_text(delta.text)
        return self._delta_chunk(place, delta)

    def _delta_chunk(self, place: int, delta: Delta, **more: Any) -> bytes:
        """Any delta as a chunk; empty where it adds nothing."""
        if delta.reading is not None:
            self._read[place] = delta.reading
            shown = {**self._head, "choices": [], "prompt_progress": prompt_progress(delta.reading)}
            return sse_event(shown) if self._prepared.body.return_progress else b""
        self._generated += delta.token is not None
        index = place * self._prepared.params.n + delta.index
        text = self._begun(place, index) + delta.text
        if delta.logprobs is not None:
            self._logprobs[index].add_generated([delta.logprobs])
        logprobs = self._logprobs[index].take_new() if self._prepared.body.logprobs is not None else None
        if not text and delta.finish_reason is None and delta.logprobs is None:
            return b""
        return self._chunk(index, text, logprobs, check_finish_reason(delta.finish_reason), **more)

    def _begun(self, place: int, index: int) -> str:
        """The text before the first delta of a choice: the prompt if it is echoed, else nothing."""
        if index in self._logprobs:
            return ""
        self._logprobs[index] = (
            self._prompt_logprobs.pop(index) if index in self._prompt_logprobs else self._new_logprobs(place)
        )
        if self._prepared.body.logprobs is None:
            self._templates[index] = EventTemplate(partial(self._chunk, index))
        return self._prepared.texts[place]

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        chunk = {**self._head, "choices": [choice]}
        if self._running:
            chunk["usage"] = running_usage(list(self._read.values()), self._generated)
        elif self._usage:
            chunk["usage"] = None
        return sse_event(chunk)


_AT_ONCE = 16  # deltas of one stream


class MergedStreams:
    """The deltas of several streams as they come, each with the index of its stream; the first failure ends them."""

    def __init__(self, streams: Sequence[AsyncStream]) -> None:
        self.streams = streams
        self._fresh: dict[int, None] = dict.fromkeys(range(len(streams)))  # streams that may have something to read

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be something to read."""
        for index, stream in enumerate(self.streams):
            stream.on_news(partial(self._news, index, callback))

    def _news(self, index: int, callback: Callable[[], None]) -> None:
        self._fresh[index] = None
        callback()

    def read_ready(self) -> list[tuple[int, Delta]]:
        """Some deltas of one stream; of another one the next time."""
        while self._fresh:
            index = next(iter(self._fresh))
            del self._fresh[index]
            if deltas := self.streams[index].read_ready(_AT_ONCE):
                self._fresh[index] = None  # after the others; until it has nothing, or raises
                return [(index, delta) for delta in deltas]
        return []

    @property
    def ended(self) -> bool:
        """Whether the last delta of every stream was read."""
        return all(stream.ended for stream in self.streams)


router = APIRouter(route_class=StrictRoute, tags=["completions"])


@router.post("/v1/completions", responses=generation_responses(TextCompletion), response_model=None)
async def completions(body: CompletionRequest, request: Request, service: ServiceDep, caller: CallerDep) -> Response:
    """Continue a prompt, or several."""
    prepared = await service.llm.offload.run(PROMPT, prepare_completion, service, body, caller, owner=caller.tenant)
    stream = bool(body.stream)
    trace_request(request.scope, "text_completion", body.model or service.model, prepared.params, stream)
    trace_response(request.scope, prepared.lora or service.model, prepared.name)
    on_usage = partial(trace_usage, request.scope)
    if not body.stream:
        done = await complete_text(service, prepared)
        on_usage(done["usage"], [choice["finish_reason"] for choice in done["choices"]])
        return json_response(done)
    streams = await open_streams(service, prepared)
    return EventStream(CompletionStream(service, prepared, streams, on_usage), service.config.keep_alive_s)
