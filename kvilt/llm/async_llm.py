"""AsyncLLM: the facade's twin for event loops, over an engine that a thread of its own steps.

Refuses to know HTTP. Whoever stops waiting, by a cancelled task or a stream that is left, ends the request within one
step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from ..batch import Adapter
from ..blend.certificate import Certificate
from ..blend.recipe import Recipe
from ..config import EngineConfig, GateConfig
from ..engine.admission import BorrowedKV
from ..engine.counters import ENGINE_METRICS
from ..engine.drafting import Drafting
from ..engine.driver import Driver
from ..engine.engine import Engine
from ..engine.handles import HandleLoan, Handles, check_loan
from ..engine.request import Request, new_id
from ..engine.view import EngineView
from ..errors import HandleMismatch, InputError, StepHung, TruncateError
from ..executor.executor import Executor
from ..kv.cache import KVCache
from ..kv.owner import owner_of
from ..metrics import Metrics
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams
from ..speculative.drafter import Drafter
from ..store.store import Store
from ..text.tokenizer import Tokenizer
from .answer import Answer, AnswerConfig
from .async_kv import AsyncKV
from .async_stream import AsyncStream
from .blend import PromptParts, listed
from .completion import Completion
from .generation import SamplingDefaults
from .model import AdapterChoice, Chat, ContextPrefix, DiscoveryChoice, Model, Prompt, after_cache, is_one, shared
from .offload import OWNER, PROMPT, STORE, Offload, uninterruptible
from .quality import gate_for
from .token_stream import Notifier, TokenStream
from .warmup import AT_ONCE, DocumentWarmup, OnProgress, StoredDocument

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """How a request is served, besides how its tokens are drawn."""

    id: str = dataclasses.field(default_factory=new_id)
    priority: int = 0  # the lower, the sooner
    tenant: str = ""  # KV is found again, and handles are seen, only by the same tenant
    kv: KVCache | str | None = None  # what the prompt stands behind: a cache, which is forked, or a handle's id
    keep_kv: bool = False  # the completion's `kv` is then yours to close
    documents: Sequence[Prompt] = ()  # stand before the prompt, or where a chat template puts them, and are blended
    recipe: Recipe | None = None  # how
    discover: bool | None = None  # blend also known documents that the prompt holds itself; None: as the engine does
    lora: int | str | None = None  # the adapter it runs on, by id or name
    lora_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as tokens, and a cache with its beginning."""

    ids: Sequence[int]
    borrowed: BorrowedKV | None
    continued_tokens: int = 0  # tokens that the prompt continues, as far as they are not its own
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the request says of documents
    loan: HandleLoan | None = None  # of a handle


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a caller hears before the end."""

    unread: int | None = None  # deltas that may wait for it; None: it wants none
    progress: bool = False  # and how far its prompt is read


# Makes a prompt ready; may take a while, so it runs in a thread of its own.
Source = Callable[[RequestTerms], PreparedPrompt]


class AsyncLLM(Model):
    """A model for many callers at once. Close it, or use it as an async context manager.

    Besides sampling fields, every method takes those of `RequestTerms`: id, priority, tenant, kv, keep_kv, documents,
    recipe.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int] = (),
        config: EngineConfig | None = None,
        metrics: Metrics | None = None,
        drafter: Drafter | None = None,
        store: Store | None = None,
        gate: GateConfig | None = None,
        context_prefix: ContextPrefix | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        super().__init__(executor, tokenizer, stop_ids, store, context_prefix, defaults)
        self._gate = gate_for(gate, executor, store)
        self.config = config or EngineConfig()
        drafting = None if drafter is None else Drafting(drafter)
        metrics = metrics or Metrics(ENGINE_METRICS)
        notes = store.notes(executor.pool.identity().model) if store is not None and store.folder is not None else None
        self._handles = Handles(executor, self.config, metrics, notes=notes)
        self.engine = Engine(
            executor,
            self.config,
            metrics,
            drafting=drafting,
            chunks=self._chunks,
            gate=self._gate,
            store=store,
            relieve=self._handles.relieve,
        )
        if self.config.discover:
            self.documents.chunks.read()
        self._drafter = drafter
        self._post = Notifier()
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[TokenStream] = weakref.WeakSet()
        self._driver = Driver(self.engine, executor, self.config, self._post.deliver, self._hung)
        self.offload = Offload()
        self.kv = AsyncKV(self._handles, self.prompt_ids, self.chat_ids, self._compute, self.adapter, self.offload)

    @property
    def healthy(self) -> bool:
        """Whether steps end in time."""
        return self._driver.healthy

    @property
    def accepting(self) -> bool:
        """Whether new requests are let in."""
        return self._driver.accepting

    # Asking.

    @overload
    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]: ...

    async def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of them at once: a Completion, or a list of them."""
        terms, chosen = _terms(params, fields)
        one = is_one(prompt)
        prompts: Sequence[Any] = [prompt] if one else list(prompt)
        each = [terms] if one else [dataclasses.replace(terms, id=f"{terms.id}-{i}") for i in range(len(prompts))]
        done = await _all(
            [self._whole(partial(self._prompt, text), chosen, own) for text, own in zip(prompts, each, strict=True)]
        )
        return done[0] if one else done

    async def blend(self, parts: Sequence[Prompt], params: SamplingParams | None = None, **fields: Any) -> Completion:
        """Continue a prompt of parts: what stands first, any documents, and the question."""
        terms, chosen = _terms(params, fields)
        made = terms.recipe or Recipe()
        return await self._whole(lambda own: self._pieces(self.documents.parts(parts, made), own), chosen, terms)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, progress: bool = False, **fields: Any
    ) -> AsyncStream:
        """`generate` for one prompt, delta by delta, those of all samples. Refusals come before the stream.

        With `progress` deltas also say how far the prompt is read, while it is.
        """
        terms, chosen = _terms(params, fields)
        return await self._open(partial(self._prompt, prompt), chosen, terms, progress)

    async def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> Completion:
        """Answer a conversation. Where `kv` names a handle, the conversation must begin with its tokens."""
        terms, chosen = _terms(params, fields)
        return await self._whole(partial(self._chat, messages, tools), chosen, terms)

    async def stream_chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = False,
        **fields: Any,
    ) -> AsyncStream:
        """`chat`, delta by delta."""
        terms, chosen = _terms(params, fields)
        return await self._open(partial(self._chat, messages, tools), chosen, terms, progress)

    async def warm(
        self,
        documents: Sequence[Prompt],
        *,
        tenant: str = "",
        priority: int = 0,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        on_progress: OnProgress | None = None,
    ) -> list[StoredDocument]:
        """Compute documents that are not stored yet, a few at a time, and store them for this tenant's prompts.

        `on_progress` is called with the tokens that are done, and with all there are. Whoever stops waiting leaves what
        is stored by then.
        """
        chosen = AdapterChoice(lora, lora_scale)
        read = partial(DocumentWarmup, self, documents, chosen, tenant, on_progress)
        warming = await self.offload.run(PROMPT, read, owner=owner_of(tenant))
        room = asyncio.Semaphore(min(AT_ONCE, self.config.max_waiting))  # never turned away because of its own
        await _all([self._warm(warming, ids, priority, room) for ids in warming.unique()])
        return warming.results()

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
        return self.engine.certificates()

    # Ending.

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take nothing new and wait until what there is has ended; False if that took too long."""
        return await self.offload.run(OWNER, self._driver.drain, timeout_s)

    async def aclose(self) -> None:
        """Stop, and let go of the model. Requests in progress fail."""
        self.grammars.close()
        await self.offload.run(OWNER, self._driver.close)
        if self._gate is not None:
            await self.offload.run(OWNER, self._gate.close)
        if self._driver.healthy:
            await self.offload.run(OWNER, self.engine.close)  # while handles hold their KV: what is held is kept first
        await self.offload.run(OWNER, self._handles.close)
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

    # From what was asked to a job; these run in a thread of their own.

    def _pieces(self, pieces: PromptParts, terms: RequestTerms) -> PreparedPrompt:
        uninterruptible()
        if terms.kv is not None:
            raise InputError("documents stand in a prompt of their own; leave out kv")
        return PreparedPrompt(pieces.blend_prompt.ids, None, more=pieces.fields)

    def _prompt(self, prompt: Prompt, terms: RequestTerms) -> PreparedPrompt:
        if listed(terms.documents):
            return self._pieces(self.documents.before(prompt, terms.documents, terms.recipe or Recipe()), terms)
        ids = self.prompt_ids(prompt, begins=terms.kv is None)
        uninterruptible()  # what is lent must be given back
        if isinstance(terms.kv, str):
            loan = self._handles.lend(terms.tenant, terms.kv)
            borrowed = BorrowedKV(loan.kv, exact=True) if loan.kv is not None else None
            return PreparedPrompt([*loan.tokens, *ids], borrowed, len(loan.tokens), loan=loan)
        if terms.kv is None:
            return PreparedPrompt(ids, None)
        return PreparedPrompt(after_cache(terms.kv, ids), BorrowedKV(terms.kv.fork()), terms.kv.num_entries)

    def _chat(self, messages: Chat, tools: Sequence[Mapping[str, Any]] | None, terms: RequestTerms) -> PreparedPrompt:
        if listed(terms.documents):
            return self._pieces(self.chat_pieces(messages, tools, terms.documents, terms.recipe or Recipe()), terms)
        ids = self.chat_ids(messages, tools)
        uninterruptible()
        if isinstance(terms.kv, str):
            return self._begins_with(ids, terms.kv, terms.tenant)
        reused = shared(ids, terms.kv)
        return PreparedPrompt(ids, BorrowedKV(terms.kv.fork_to(reused)) if terms.kv is not None and reused else None)

    def _begins_with(self, ids: list[int], handle: str, tenant: str) -> PreparedPrompt:
        """A prompt whose first tokens must be those of a handle; at least one is left to compute."""
        loan = self._handles.lend(tenant, handle)
        pairs = zip(loan.tokens, ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(loan.tokens), len(ids)))
        kv = loan.kv
        try:
            if same < len(loan.tokens):
                raise HandleMismatch(handle, same)
            if kv is not None and same == len(ids):
                kv.truncate(same - 1)
        except BaseException as error:
            if kv is not None:
                kv.close()
            if not isinstance(error, TruncateError):
                raise
            kv = None  # a window gave that part back
        return PreparedPrompt(ids, BorrowedKV(kv, exact=True) if kv is not None else None, loan=loan)

    def _prepare(
        self,
        source: Source,
        params: SamplingParams,
        terms: RequestTerms,
        loop: asyncio.AbstractEventLoop,
        hearing: StreamOptions,
        grammar: Grammar | None = None,
    ) -> TokenStream:
        ready = source(terms)
        if params.prompt_logprobs is not None and not ready.continued_tokens and ready.borrowed is not None:
            ready.borrowed.kv.close()  # all of the prompt is to be scored, so nothing of it can be found
            ready = dataclasses.replace(ready, borrowed=None)
        # A handle says the same whether its KV is here or has to be computed again: nothing in it is blended.
        discover = terms.discover if ready.loan is None else False
        own = {name: getattr(terms, name) for name in ("id", "priority", "tenant", "keep_kv")}
        more = {**DiscoveryChoice(discover, terms.recipe).fields, **ready.more}
        try:
            request, asked = self.request(
                ready.ids,
                params,
                grammar,
                continued_tokens=ready.continued_tokens,
                reuse=not isinstance(terms.kv, KVCache),
                progress=hearing.progress,
                adapter=self._checked(ready, AdapterChoice(terms.lora, terms.lora_scale)),
                **own,
                **more,
            )
        except BaseException:
            if ready.borrowed is not None:
                ready.borrowed.kv.close()
            raise
        return self._outlet(Answer(asked), request, ready.borrowed, loop, hearing.unread)

    def _checked(self, ready: PreparedPrompt, lora: AdapterChoice) -> Adapter:
        """What a request runs on; a handle's tokens must have been read by the same, also where they must be again."""
        adapter = self.adapter(lora, ready.ids)
        if ready.loan is not None:
            check_loan(ready.loan, adapter, self.executor.adapters)
        return adapter

    def _outlet(
        self,
        answer: Answer,
        request: Request,
        borrowed: BorrowedKV | None,
        loop: asyncio.AbstractEventLoop,
        unread: int | None = None,
    ) -> TokenStream:
        token_stream = TokenStream(answer, loop, self._driver, self._post, unread)
        token_stream.job = self.engine.prepare(request, token_stream, borrowed)
        return token_stream

    # From a job to its end; these run in the event loop.

    async def _submit(
        self, source: Source, params: SamplingParams, terms: RequestTerms, hearing: StreamOptions
    ) -> TokenStream:
        loop = asyncio.get_running_loop()
        grammar = await self.grammars.compiled(params.grammar)  # first: a caller that leaves ends it
        prepare = partial(self._prepare, source, params, terms, loop, hearing, grammar)
        token_stream = await self.offload.run(PROMPT, prepare, owner=owner_of(terms.tenant), discard=TokenStream.leave)
        self._admit(token_stream)
        return token_stream

    def _admit(self, token_stream: TokenStream) -> None:
        assert token_stream.job is not None
        with self._lock:
            self._streams.add(token_stream)
        self._driver.submit(token_stream.job)

    async def _whole(self, source: Source, params: SamplingParams, terms: RequestTerms) -> Completion:
        token_stream = await self._submit(source, params, terms, StreamOptions())
        await self._finished(token_stream)
        return token_stream.answer.completion()

    async def _finished(self, token_stream: TokenStream) -> None:
        try:
            await token_stream.finished()
        except BaseException:
            token_stream.leave()
            raise

    async def _open(self, source: Source, params: SamplingParams, terms: RequestTerms, progress: bool) -> AsyncStream:
        token_stream = await self._submit(source, params, terms, StreamOptions(self.config.unread_tokens, progress))
        return AsyncStream(token_stream, terms.id)

    async def _warm(
        self, warming: DocumentWarmup, ids: tuple[int, ...], priority: int, room: asyncio.Semaphore
    ) -> None:
        """One document."""
        async with room:
            loop = asyncio.get_running_loop()
            if not await self.offload.run(STORE, warming.missing, [ids], owner=owner_of(warming.tenant)):
                return
            request, asked = warming.request(ids, priority=priority)
            token_stream = self._outlet(Answer(asked), request, None, loop)
            self._admit(token_stream)
            await self._finished(token_stream)
            warming.finished(ids)

    async def _compute(self, ids: Sequence[int], tenant: str, adapter: Adapter) -> KVCache:
        """The exact KV of a prompt."""
        request = Request(ids, tenant=tenant, keep_kv=True, adapter=adapter, discover=False)
        answer = Answer(AnswerConfig(self.tokenizer, SamplingParams(), frozenset(), len(ids)))
        token_stream = self._outlet(answer, request, None, asyncio.get_running_loop())
        self._admit(token_stream)
        await self._finished(token_stream)
        kv = answer.completion().kv
        assert kv is not None
        return kv

    def _hung(self, error: StepHung) -> None:
        """In the watchdog's thread."""
        with self._lock:
            outlets = list(self._streams)
        for token_stream in outlets:
            with suppress(RuntimeError):  # its loop is closed
                token_stream.loop.call_soon_threadsafe(token_stream.fail, error)


def _terms(params: SamplingParams | None, fields: dict[str, Any]) -> tuple[RequestTerms, SamplingParams]:
    """The fields of a call, sorted into those of a request and those of sampling."""
    names = {field.name for field in dataclasses.fields(RequestTerms)}
    own = {name: value for name, value in fields.items() if name in names}
    rest = {name: value for name, value in fields.items() if name not in names}
    return RequestTerms(**own), SamplingParams.of(params, **rest)


async def _all(each: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All of these; if one fails, the others are given up and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in each]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
