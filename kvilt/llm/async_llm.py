"""AsyncLLM: the facade for event loops, over an engine that runs in a thread of its own.

Refuses to know HTTP. A caller that stops waiting, by a cancelled task or a closed stream, ends its request within one
step.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from ..batch import Adapter
from ..blend.certificate import Certificate
from ..engine.admission import BorrowedKV
from ..engine.driver import Driver
from ..engine.handles.handles import Handles
from ..engine.pooling import PoolingKind
from ..engine.request import Request
from ..engine.sessions.exchange import SessionExchange
from ..engine.sessions.sessions import Sessions
from ..engine.view import EngineView
from ..errors import StepHung
from ..kv.cache import KVCache
from ..kv.owner import owner_of
from ..metrics import Metrics
from ..sampling.params import SamplingParams
from ..store.channel import TierFailure
from ..text.parse import Tools
from .answer import Answer, AnswerConfig
from .async_kv import AsyncKV
from .async_stream import AsyncStream
from .completion import Completion
from .documents import DocumentInput
from .embedding import Embedding, check_dimensions, embedding_request
from .model import AdapterChoice, Chat, Model, Prompt, PromptInput, each_prompt, is_one
from .offload import OWNER, PROMPT, STORE, Offload
from .options import CallFields, RequestOptions, split_fields
from .prompts import PromptPreparer, PromptSource
from .python_tools import Tool
from .token_stream import Notifier, TokenStream
from .tool_choice import tool_use
from .warmup import AT_ONCE, DocumentWarmup, OnProgress, StoredDocument

if TYPE_CHECKING:
    from ..sampling.grammar import Grammar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a caller gets while its request runs."""

    unread: int | None = None  # deltas that may wait to be read; None: the caller wants none
    progress: bool = False  # deltas also say how far the prompt is computed
    tools: Tools | None = None  # that a parsed answer may call; None: it is not parsed


class AsyncLLM(Model):
    """A model for many callers at once. Close it, or use it as an async context manager.

    Methods that generate take the fields of `RequestOptions` and of `SamplingParams` as keywords.
    """

    def _start(self, metrics: Metrics) -> None:
        executor, store = self.executor, self._store
        model = executor.pool.identity().model
        notes = None if store is None else store.notes(model)
        session_notes = None if store is None else store.session_notes(model)
        self.response_notes = None if store is None else store.response_notes(model)
        self._handles = Handles(executor, self.config, metrics, notes=notes, on_expired=self.past_prompts.expire)
        self.engine = self._new_engine(metrics, self._handles.evict_one)
        self._notifier = Notifier()
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[TokenStream] = weakref.WeakSet()
        self._driver = Driver(self.engine, executor, self.config, self._notifier.deliver, self._hung)
        self.offload = Offload()
        expire = self.past_prompts.expire
        self.sessions = Sessions(executor, self._handles, self.config, on_expired=expire, notes=session_notes)
        self.exchange = SessionExchange(executor, self._handles, self.sessions, self.decoded, self.config)
        self._prompts = PromptPreparer(self, self.sessions, self._handles)
        given = (self.prompt_ids, self.chat_ids, self._compute, self._kv_of, self.adapter, self.offload)
        self.kv = AsyncKV(self._handles, *given)

    @property
    def healthy(self) -> bool:
        """Whether steps end in time, and all processes that share the model are there."""
        return self._driver.healthy

    @property
    def accepting(self) -> bool:
        """Whether new requests are accepted."""
        return self._driver.accepting

    # Requests.

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts; it is one prompt
        self, prompt: PromptInput, params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Sequence[PromptInput], params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of them at once: a Completion, or a list of them."""
        options, chosen = split_fields(params, fields)
        one = is_one(prompt)
        prompts = each_prompt(prompt)
        each = [options] if one else [options.numbered(index) for index in range(len(prompts))]
        done = await _all(
            [
                self._complete(partial(self._prompts.text, text), chosen, own)
                for text, own in zip(prompts, each, strict=True)
            ]
        )
        return done[0] if one else done

    async def blend(
        self,
        parts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        strategy: str | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion:
        """Continue a prompt of parts: what stands first, any documents, and the question. See `LLM.blend`."""
        options, chosen = split_fields(params, fields)
        options = options.with_recipe(ratio=ratio, strategy=strategy)
        return await self._complete(partial(self._prompts.parts, parts), chosen, options)

    async def stream(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **fields: Unpack[CallFields],
    ) -> AsyncStream:
        """`generate` for one prompt as a stream of deltas, those of all samples. A bad request is refused here already.

        With `progress`, deltas before the first token say how far the prompt is computed.
        """
        options, chosen = split_fields(params, fields)
        return await self._open(partial(self._prompts.text, prompt), chosen, options, progress)

    async def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion:
        """Answer a conversation. Where `kv` names a handle, the conversation must begin with its tokens.

        The completion is parsed as that of `LLM.chat`.
        """
        options, chosen = split_fields(params, fields)
        given = (self, messages, chosen, tools, tool_choice, chat_template_kwargs)
        use = await self.offload.run(PROMPT, tool_use, *given, owner=owner_of(options.tenant))
        source = partial(self._prompts.chat, messages, use.tools, chat_template_kwargs)
        return await self._complete(source, use.params, options, use.tools or ())

    async def stream_chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        **fields: Unpack[CallFields],
    ) -> AsyncStream:
        """`chat` as a stream of deltas, whose text is as generated."""
        options, chosen = split_fields(params, fields)
        return await self._open(
            partial(self._prompts.chat, messages, tools, chat_template_kwargs), chosen, options, progress
        )

    def store_failures(self) -> dict[str, TierFailure]:
        """The last failure of each tier of the store that has had one."""
        return {} if self._store is None else self._store.last_failures()

    async def warm(
        self,
        documents: Sequence[DocumentInput],
        *,
        tenant: str = "",
        priority: int = 0,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        on_progress: OnProgress | None = None,
    ) -> list[StoredDocument]:
        """Compute documents that are not stored yet, a few at a time, and store them for this tenant's prompts.

        `on_progress` is called with the number of tokens that are done, and of all. What was stored before a caller
        stops waiting stays stored.
        """
        chosen = AdapterChoice(lora, lora_scale)
        read = partial(DocumentWarmup, self, documents, chosen, tenant, on_progress)
        warmup = await self.offload.run(PROMPT, read, owner=owner_of(tenant))
        room = asyncio.Semaphore(min(AT_ONCE, self.config.max_waiting))  # its own requests never fill the queue
        await _all([self._warm(warmup, ids, priority, room) for ids in warmup.unique()])
        return warmup.results()

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: PoolingKind | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        tenant: str = "",
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        truncate: bool = False,
    ) -> Embedding:
        """The embedding of a text: the mean of its tokens' states after the last norm, or the last one, of length 1.

        `pooling` is the model's own, or `mean` where it has none. `dimensions` keeps the first values. `prompt_name` is
        one of the prompts that the model's author puts before texts, such as queries. With `truncate` a text that is
        longer than the context is cut; otherwise it is refused.
        """
        check_dimensions(dimensions, self.executor.spec.hidden_size)
        pooling, owner = self.embedding_config.pooled(pooling), owner_of(tenant)
        ids = await self.offload.run(PROMPT, self.embedded_ids, prompt, truncate, prompt_name, owner=owner)
        adapter = self.adapter(AdapterChoice(lora, lora_scale), ids)
        request = embedding_request(ids, pooling, tenant, adapter)
        answer = Answer(AnswerConfig(self.tokenizer, SamplingParams(), frozenset(), len(ids)))
        token_stream = self._token_stream(answer, request, None, asyncio.get_running_loop())
        self._admit(token_stream)
        await self._finished(token_stream)
        return Embedding.of(answer, self.embedding_config, dimensions)

    def abort(self, request_id: str) -> None:
        """End a request by its id within one step."""
        self._driver.abort(request_id)

    def view(self, tenant: str = "", most: int | None = None) -> EngineView:
        """What a tenant has here at this moment: samples in progress, prefixes, handles, and the pages of all.

        Of samples, prefixes and handles `most` of each, if that is given.
        """
        return self.engine.view(tenant, self._handles.owned(tenant), most)

    def certificates(self) -> list[Certificate]:
        """What a quality gate has learnt of each recipe; nothing without one."""
        return [] if self._gate is None else self._gate.certificates()

    # Shutdown.

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait until all others have ended; False if that took too long."""
        return await self.offload.run(OWNER, self._driver.drain, timeout_s)

    async def aclose(self) -> None:
        """Stop, and free the model. Requests in progress fail."""
        self.grammars.close()
        await self.offload.run(OWNER, self._driver.close)
        if self._gate is not None:
            await self.offload.run(OWNER, self._gate.close)
        if self._driver.healthy:
            # Before handles free their KV: pages in use are stored first.
            await self.offload.run(OWNER, self.engine.close)
        await self.offload.run(OWNER, self.sessions.close)
        await self.offload.run(OWNER, self._handles.close)
        if self.response_notes is not None:
            await self.offload.run(OWNER, self.response_notes.close)
        self.documents.close()
        if self._driver.healthy:
            self.executor.close()
            if self._drafter is not None:
                self._drafter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # From a prompt to a job; these run in a thread of their own.

    def _prepare(
        self,
        source: PromptSource,
        params: SamplingParams,
        options: RequestOptions,
        loop: asyncio.AbstractEventLoop,
        stream_options: StreamOptions,
        grammar: Grammar | None = None,
    ) -> TokenStream:
        prepared = self._prompts.request(
            source, params, options, grammar, stream_options.progress, stream_options.tools
        )
        answer = Answer(prepared.answer_config)
        return self._token_stream(answer, prepared.request, prepared.borrowed, loop, stream_options.unread)

    def _token_stream(
        self,
        answer: Answer,
        request: Request,
        borrowed: BorrowedKV | None,
        loop: asyncio.AbstractEventLoop,
        unread: int | None = None,
    ) -> TokenStream:
        token_stream = TokenStream(answer, loop, self._driver, self._notifier, unread)
        token_stream.job = self.engine.prepare(request, token_stream, borrowed)
        return token_stream

    # From a job to its end; these run in the event loop.

    async def _submit(
        self, source: PromptSource, params: SamplingParams, options: RequestOptions, stream_options: StreamOptions
    ) -> TokenStream:
        loop = asyncio.get_running_loop()
        owner = owner_of(options.tenant)
        grammar = await self.grammars.compiled(params.grammar, owner)  # first: a caller that is cancelled ends it
        prepare = partial(self._prepare, source, params, options, loop, stream_options, grammar)
        token_stream = await self.offload.run(PROMPT, prepare, owner=owner, discard=TokenStream.leave)
        self._admit(token_stream)
        return token_stream

    def _admit(self, token_stream: TokenStream) -> None:
        assert token_stream.job is not None
        with self._lock:
            self._streams.add(token_stream)
        self._driver.submit(token_stream.job)

    async def _complete(
        self, source: PromptSource, params: SamplingParams, options: RequestOptions, tools: Tools | None = None
    ) -> Completion:
        token_stream = await self._submit(source, params, options, StreamOptions(tools=tools))
        await self._finished(token_stream)
        return token_stream.answer.completion()

    async def _finished(self, token_stream: TokenStream) -> None:
        try:
            await token_stream.finished()
        except BaseException:
            token_stream.leave()
            raise

    async def _open(
        self, source: PromptSource, params: SamplingParams, options: RequestOptions, progress: bool
    ) -> AsyncStream:
        token_stream = await self._submit(source, params, options, StreamOptions(self.config.unread_tokens, progress))
        return AsyncStream(token_stream, options.id)

    async def _warm(self, warmup: DocumentWarmup, ids: tuple[int, ...], priority: int, room: asyncio.Semaphore) -> None:
        """Compute and store one document, unless it is stored already."""
        async with room:
            loop = asyncio.get_running_loop()
            if not await self.offload.run(STORE, warmup.missing, [ids], owner=owner_of(warmup.tenant)):
                return
            request, answer_config = warmup.request(ids, priority=priority)
            token_stream = self._token_stream(Answer(answer_config), request, None, loop)
            self._admit(token_stream)
            await self._finished(token_stream)
            warmup.finished(ids)

    async def _compute(self, ids: Sequence[int], tenant: str, adapter: Adapter) -> KVCache:
        """The exact KV of a prompt."""
        return await self._kv_of(Request(ids, tenant=tenant, keep_kv=True, adapter=adapter, discover=False))

    async def _kv_of(self, request: Request, borrowed: BorrowedKV | None = None) -> KVCache:
        """The KV of a request that keeps it."""
        answer = Answer(AnswerConfig(self.tokenizer, SamplingParams(), frozenset(), len(request.prompt)))
        token_stream = self._token_stream(answer, request, borrowed, asyncio.get_running_loop())
        self._admit(token_stream)
        await self._finished(token_stream)
        kv = answer.completion().kv
        assert kv is not None
        return kv

    def _hung(self, error: StepHung) -> None:
        """A step hangs: all streams fail. Called in the watchdog's thread."""
        with self._lock:
            token_streams = list(self._streams)
        for token_stream in token_streams:
            with suppress(RuntimeError):  # its loop is closed
                token_stream.loop.call_soon_threadsafe(token_stream.fail, error)


async def _all(each: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all; if one fails, the others are cancelled and its error is raised."""
    # Not a TaskGroup: before Python 3.13 the caller's task counts as being cancelled after an error in one.
    tasks = [asyncio.ensure_future(one) for one in each]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
