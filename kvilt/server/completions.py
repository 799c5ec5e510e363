"""Prompts to continue: what is asked of the model for a completion request, and what is made of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ParamError
from ..llm import AsyncStream, Completion, Delta, Reading
from ..llm.offload import ANSWER
from ..sampling.params import SamplingParams
from .ask import progress_of, sampling_of, terms_of, wants_progress
from .counts import Count, running_usage, usage_of
from .documents import check_documents, discovers
from .gate import Caller
from .keep import keep
from .merge import merged
from .refusal import Refused, refusal_of
from .schema.completion import CompletionRequest
from .scores import Scores
from .service import Service, envelope, new_name
from .sse import DONE, event

DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompts:
    """A completion request, ready to be asked."""

    asked: CompletionRequest
    caller: Caller
    name: str
    ids: Sequence[Sequence[int]]  # of each prompt
    texts: Sequence[str]  # what echo shows of each
    params: SamplingParams
    lora: str | None = None  # the adapter that was asked for as a model

    def given(self, index: int) -> dict[str, Any]:
        """The terms of one prompt."""
        return terms_of(self.asked, self.caller, f"{self.name}-{index}", self.lora)


def ready(service: Service, asked: CompletionRequest, caller: Caller) -> Prompts:
    """Check a request and work out what it asks for; may take a while."""
    lora = service.check_model(asked.model)
    prompts = _listed(asked)
    _check(service, asked, len(prompts))
    ids, texts = _read(service, asked, prompts)
    params = sampling_of(
        asked,
        max_tokens=DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs,
        prompt_logprobs=(asked.logprobs or 0) if _scores(asked) else None,
    )
    return Prompts(asked, caller, new_name("cmpl"), ids, texts, params, lora)


def _scores(asked: CompletionRequest) -> bool:
    """Whether log-probabilities of the prompt are wanted."""
    return bool(asked.echo) and (asked.logprobs is not None or asked.max_tokens == 0)


def _listed(asked: CompletionRequest) -> list[str | list[int]]:
    """The prompts as a list, which one prompt of token ids is already."""
    given = asked.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]
    return list(given)


def _check(service: Service, asked: CompletionRequest, prompts: int) -> None:
    most = service.config.max_prompts
    samples = prompts * (asked.n or 1)
    if samples > most:
        raise Refused(
            400, f"prompt: {samples} answers were asked for and {most} are allowed", param="prompt", code="too_many"
        )
    check_documents(service, asked)
    if (asked.documents or discovers(asked)) and _scores(asked):
        raise ParamError("echo", "cannot score a prompt behind documents, which are not computed as a whole")
    if asked.kv_out and prompts > 1:
        raise ParamError("kv_out", "keeps the KV of one prompt; send the prompts one by one")
    if asked.max_tokens == 0 and not asked.echo:
        raise ParamError("max_tokens", "must be at least 1, but beside echo")
    if asked.stream_options is not None and not asked.stream:
        raise ParamError("stream_options", "is for streams; set stream to true")


def _read(
    service: Service, asked: CompletionRequest, prompts: Sequence[str | list[int]]
) -> tuple[list[list[int]], list[str]]:
    """Ids and texts of prompts; may take a while."""
    llm = service.llm
    begins = asked.kv is None and not asked.documents  # behind documents a prompt does not begin the text
    ids = [llm.prompt_ids(prompt, begins=begins) for prompt in prompts]
    if not asked.echo:
        return ids, [""] * len(ids)
    shown = [given if isinstance(given, str) else llm.tokenizer.decode(given) for given in prompts]
    return ids, shown


async def whole(service: Service, prompts: Prompts) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one(service, prompts, index)) for index in range(len(prompts.ids))]
    done = [task.result() for task in tasks]
    kept = await keep(service, done[0], prompts.given(0)["tenant"]) if prompts.asked.kv_out else {}
    if prompts.asked.logprobs is None:
        return _answer(service, prompts, done, kept)
    return await service.llm.offload.run(ANSWER, _answer, service, prompts, done, kept, owner=prompts.caller.tenant)


def _answer(
    service: Service, prompts: Prompts, done: Sequence[Completion], kept: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """All samples as choices; with logprobs it may take a while."""
    choices = []
    for place, completion in enumerate(done):
        for index, sample in enumerate((completion, *completion.alternatives)):
            choice = _choice(service, prompts, place, sample)
            choices.append({"index": place * prompts.params.n + index, **choice, **kept.get(index, {})})
    return {
        **envelope(service, "text_completion", prompts.name, prompts.lora),
        "choices": choices,
        "usage": usage_of(done),
    }


async def _one(service: Service, prompts: Prompts, index: int) -> Completion:
    return await service.llm.generate(prompts.ids[index], prompts.params, **prompts.given(index))


def _choice(service: Service, prompts: Prompts, place: int, sample: Completion) -> dict[str, Any]:
    logprobs = None
    if prompts.asked.logprobs is not None:
        scores = Scores(service.llm.tokenizer)
        if prompts.asked.echo:
            scores.read(prompts.ids[place], sample.prompt_logprobs or ())
        scores.draw(sample.logprobs or ())
        logprobs = scores.taken()
    return {
        "text": prompts.texts[place] + sample.text,
        "logprobs": logprobs,
        "finish_reason": _reason(sample.finish_reason),
    }


def _reason(reason: str | None) -> str | None:
    if reason == "cancelled":
        raise Refused(503, "the request was ended by the server", code="cancelled")
    return reason


async def open_streams(service: Service, prompts: Prompts) -> list[AsyncStream]:
    """A stream for each prompt; refusals come here, before anything is sent."""
    streams: list[AsyncStream] = []
    try:
        for index, ids in enumerate(prompts.ids):
            streams.append(
                await service.llm.stream(
                    ids, prompts.params, progress=wants_progress(prompts.asked), **prompts.given(index)
                )
            )
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams


class CompletionStream:
    """A request's answers as chunks."""

    def __init__(self, service: Service, prompts: Prompts, streams: Sequence[AsyncStream], count: Count) -> None:
        """`count` hears what the answers took."""
        self._service = service
        self._prompts = prompts
        self._streams = streams
        self._count = count
        self._head = envelope(service, "text_completion", prompts.name, prompts.lora)
        options = prompts.asked.stream_options
        self._usage = bool(options and options.include_usage)
        self._running = bool(options and options.continuous_usage_stats)
        self._read: dict[int, Reading] = {}
        self._generated = 0
        self._scored: dict[int, Scores] = {}  # by choice; those that have not begun
        self._scores: dict[int, Scores] = {}  # by choice; a choice is in it once it has begun

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Every chunk, and the end."""
        ends = []
        try:
            async for place, delta in merged(self._streams):
                await self._score_prompt(place, delta)
                if delta.finish_reason is not None and self._prompts.asked.kv_out:
                    ends.append(delta)
                elif said := self._said(place, delta):
                    yield said
            async for last in self._closing(ends):
                yield last
        except Exception as error:
            yield event(refusal_of(error).body())
        finally:
            for stream in self._streams:
                await stream.aclose()
        yield DONE

    async def _score_prompt(self, place: int, delta: Delta) -> None:
        """Before the first token of a choice: the logprobs of a prompt that it echoes, which may take a while."""
        index = place * self._prompts.params.n + delta.index
        asked = self._prompts.asked
        if delta.reading is None and asked.echo and asked.logprobs is not None and index not in self._scores:
            owner = self._prompts.caller.tenant
            made = await self._service.llm.offload.run(ANSWER, self._prompt_scores, place, owner=owner)
            self._scored[index] = made

    def _prompt_scores(self, place: int) -> Scores:
        scores = Scores(self._service.llm.tokenizer)
        if self._prompts.asked.echo:
            scores.read(self._prompts.ids[place], self._streams[place].prompt_logprobs or ())
        return scores

    def _said(self, place: int, delta: Delta, **more: Any) -> bytes | None:
        """A delta as a chunk; None where it has nothing to say."""
        if delta.reading is not None:
            self._read[place] = delta.reading
            shown = {**self._head, "choices": [], "prompt_progress": progress_of(delta.reading)}
            return event(shown) if self._prompts.asked.return_progress else None
        self._generated += delta.token is not None
        index = place * self._prompts.params.n + delta.index
        text = self._begun(place, index) + delta.text
        if delta.logprobs is not None:
            self._scores[index].draw([delta.logprobs])
        logprobs = self._scores[index].taken() if self._prompts.asked.logprobs is not None else None
        if not text and delta.finish_reason is None and delta.logprobs is None:
            return None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _reason(delta.finish_reason)}
        return self._chunk({**choice, **more})

    def _begun(self, place: int, index: int) -> str:
        """What a choice begins with: the prompt, if it is echoed, when its first delta comes."""
        if index in self._scores:
            return ""
        self._scores[index] = self._scored.pop(index) if index in self._scored else self._prompt_scores(place)
        return self._prompts.texts[place]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._running:
            chunk["usage"] = running_usage(list(self._read.values()), self._generated)
        elif self._usage:
            chunk["usage"] = None
        return event(chunk)

    async def _closing(self, ends: list[Delta]) -> AsyncGenerator[bytes, None]:
        done = [stream.completion for stream in self._streams]
        if ends:
            kept = await keep(self._service, done[0], self._prompts.given(0)["tenant"])
            for delta in ends:
                if said := self._said(0, delta, **kept.get(delta.index, {})):
                    yield said
        self._count(took := usage_of(done))
        if self._usage:
            yield event({**self._head, "choices": [], "usage": took})
