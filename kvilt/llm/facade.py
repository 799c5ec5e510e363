"""LLM: generate, stream, chat and prefill through the engine, in the thread of the caller.

Refuses to know HTTP and terminals, and how a model is found and built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, overload

from ..blend.certificate import Certificate
from ..blend.recipe import Recipe
from ..config import EngineConfig, GateConfig
from ..engine.admission import BorrowedKV
from ..engine.counters import ENGINE_METRICS
from ..engine.engine import Engine
from ..engine.request import Request
from ..engine.view import EngineView
from ..errors import InputError
from ..executor.protocol import Executor
from ..kv.cache import KVCache
from ..metrics import Metrics
from ..sampling.params import SamplingParams
from ..speculative.drafter import Drafter
from ..store.store import Store
from ..text.tokenizer import Tokenizer
from .answer import Answer, AnswerConfig
from .blend import PromptParts, listed
from .completion import Completion, Stream
from .features import plugins_for
from .generation import SamplingDefaults
from .model import AdapterChoice, ContextPrefix, DiscoveryChoice, Message, Model, Prompt, after_cache, is_one, shared
from .quality import gate_for
from .sync_runner import PendingAnswer, SyncRunner
from .warmup import DocumentWarmup, OnProgress, StoredDocument


class LLM(Model):
    """A model with its tokenizer and chat template. Close it, or use it as a context manager.

    Several threads may call it at once; their requests then share steps.
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
        metrics = metrics or Metrics(ENGINE_METRICS)
        plugins = plugins_for(drafter, self._gate, executor, metrics)
        self.engine = Engine(
            executor,
            config,
            metrics,
            features=plugins.features,
            judge=plugins.judge,
            chunks=self._chunks,
            store=store,
        )
        self._drafter = drafter
        self._runner = SyncRunner(self.engine, executor)
        if config is not None and config.discover:
            self.documents.chunks.read()

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of them in one batch.

        With `kv` the prompt continues what that cache holds; the cache itself is forked, never changed. With `n`
        the prompt is computed once, and the samples after the first are the result's `alternatives`. `documents` stand
        before each prompt; what is computed of them is kept, and blended wherever they stand next time. `discover`
        blends also known ones that stand in the prompt itself. `lora` is the id or the name of a loaded adapter.
        """
        chosen = SamplingParams.of(params, **fields)
        one = is_one(prompt)
        prompts: Sequence[Any] = [prompt] if one else list(prompt)
        if listed(documents):
            made = [self.documents.before(each, documents, recipe or Recipe()) for each in prompts]
            blended = self._runner.answers(
                self._prepare_blends(made, chosen, kv, keep_kv, AdapterChoice(lora, lora_scale))
            )
            return blended[0] if one else blended
        ids = [self._ids(each, kv) for each in prompts]
        borrowed, discovery = kv.num_entries if kv else 0, DiscoveryChoice(discover, recipe)
        done = self._complete(ids, chosen, kv, borrowed, keep_kv, AdapterChoice(lora, lora_scale), discovery)
        return done[0] if one else done

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Stream:
        """`generate` for one prompt, piece by piece."""
        chosen, own = SamplingParams.of(params, **fields), AdapterChoice(lora, lora_scale)
        if listed(documents):
            prompt_parts = self.documents.before(prompt, documents, recipe or Recipe())
            return self._runner.stream(self._prepare_blends([prompt_parts], chosen, kv, keep_kv, own)[0], chosen)
        ids, reused = self._ids(prompt, kv), kv.num_entries if kv else 0
        prepare = partial(self._prepare, ids, chosen, kv, reused, keep_kv, own, DiscoveryChoice(discover, recipe))
        return self._runner.stream(prepare, chosen)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Completion:
        """Answer a conversation. With `kv`, what it shares with the conversation's beginning is not computed again.

        `documents` stand where the chat template puts them, else before the last user's text, and are blended.
        """
        chosen = SamplingParams.of(params, **fields)
        if listed(documents):
            prompt_parts = self.chat_pieces(messages, tools, documents, recipe or Recipe())
            return self._runner.answers(
                self._prepare_blends([prompt_parts], chosen, kv, keep_kv, AdapterChoice(lora, lora_scale))
            )[0]
        ids = self.chat_ids(messages, tools)
        own, discovery = AdapterChoice(lora, lora_scale), DiscoveryChoice(discover, recipe)
        return self._complete([ids], chosen, kv, _reused(ids, chosen, kv), keep_kv, own, discovery)[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kv: KVCache | None = None,
        keep_kv: bool = False,
        documents: Sequence[Prompt] = (),
        recipe: Recipe | None = None,
        discover: bool | None = None,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Stream:
        """`chat`, piece by piece."""
        chosen, own = SamplingParams.of(params, **fields), AdapterChoice(lora, lora_scale)
        if listed(documents):
            prompt_parts = self.chat_pieces(messages, tools, documents, recipe or Recipe())
            return self._runner.stream(self._prepare_blends([prompt_parts], chosen, kv, keep_kv, own)[0], chosen)
        ids = self.chat_ids(messages, tools)
        reused, discovery = _reused(ids, chosen, kv), DiscoveryChoice(discover, recipe)
        prepare = partial(self._prepare, ids, chosen, kv, reused, keep_kv, own, discovery)
        return self._runner.stream(prepare, chosen)

    def blend(
        self,
        parts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        strategy: str | None = None,
        recipe: Recipe | None = None,
        keep_kv: bool = False,
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        **fields: Any,
    ) -> Completion:
        """Continue a prompt of parts: what stands first, any documents, and the question.

        The KV of documents is reused wherever they stand, and a `ratio` of their tokens is computed again; the recipe
        says which. What is not stored yet is computed once, kept, and blended as it will be next time.
        """
        given = {"ratio": ratio, "strategy": strategy}
        made = Recipe.of(recipe, **{name: value for name, value in given.items() if value is not None})
        chosen = SamplingParams.of(params, **fields)
        prompt_parts = self.documents.parts(parts, made)
        return self._runner.answers(
            self._prepare_blends([prompt_parts], chosen, None, keep_kv, AdapterChoice(lora, lora_scale))
        )[0]

    def warm(
        self,
        documents: Sequence[Prompt],
        *,
        tenant: str = "",
        lora: int | str | None = None,
        lora_scale: float = 1.0,
        on_progress: OnProgress | None = None,
    ) -> list[StoredDocument]:
        """Compute documents that are not stored yet, and store them, so that prompts with them find all of their KV.

        `on_progress` is called with the number of tokens that are done, and of all. Where a store is shared with a
        server, requests of this `tenant` find the documents.
        """
        warmup = DocumentWarmup(self, documents, AdapterChoice(lora, lora_scale), tenant, on_progress)
        for some in warmup.groups():
            missing = warmup.missing(some)
            self._runner.answers(
                [partial(self._prepare_warm, warmup, ids) for ids in missing], partial(_watch, warmup, missing)
            )
            for ids in missing:
                warmup.finished(ids)
        return warmup.results()

    def prefill(self, prompt: Prompt, *, lora: int | str | None = None, lora_scale: float = 1.0) -> KVCache:
        """The KV of a prompt, to fork and generate from as often as you like."""
        ids = self.prompt_ids(prompt)
        lora_id = None if lora is None else self.executor.adapters.find(lora).id
        kv = self.executor.create_kv_cache()
        try:
            self.executor.prefill(ids, kv, lora_id, lora_scale)
        except BaseException:
            kv.close()
            raise
        return kv

    def view(self) -> EngineView:
        """What is here at this moment: samples in progress, prefixes and pages."""
        return self.engine.view("")

    def certificates(self) -> list[Certificate]:
        """What a quality gate has learnt of each recipe; nothing without one."""
        return [] if self._gate is None else self._gate.certificates()

    def close(self) -> None:
        self.grammars.close()
        if self._gate is not None:
            self._gate.close()
        self.engine.close()
        self.executor.close()
        if self._drafter is not None:
            self._drafter.close()
        self.documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ids(self, prompt: Prompt, kv: KVCache | None) -> list[int]:
        """All tokens of a prompt, those in `kv` first."""
        ids = self.prompt_ids(prompt, begins=kv is None)
        return ids if kv is None else after_cache(kv, ids)

    def _prepare(
        self,
        ids: list[int],
        params: SamplingParams,
        kv: KVCache | None,
        reused: int,
        keep_kv: bool,
        lora: AdapterChoice,
        discovery: DiscoveryChoice,
    ) -> PendingAnswer:
        """A request for `ids`, whose first `reused` tokens are taken from a fork of `kv`.

        A request with a cache of its own takes nothing from the prefix index.
        """
        own: dict[str, Any] = {
            "keep_kv": keep_kv,
            "reuse": kv is None,
            "continued_tokens": reused,
            "adapter": self.adapter(lora, ids),
        }
        made = self.request(ids, params, **own, **discovery.fields)
        return self._pending_answer(*made, BorrowedKV(kv.fork_to(reused)) if kv is not None and reused else None)

    def _pending_answer(
        self, request: Request, answer_config: AnswerConfig, borrowed: BorrowedKV | None = None
    ) -> PendingAnswer:
        answer = Answer(answer_config)
        return PendingAnswer(self.engine.prepare(request, answer, borrowed), answer)

    def _prepare_blends(
        self,
        prompts: Sequence[PromptParts],
        params: SamplingParams,
        kv: KVCache | None,
        keep_kv: bool,
        lora: AdapterChoice,
    ) -> list[Callable[[], PendingAnswer]]:
        """Functions that make the requests of prompts with documents."""
        if kv is not None:
            raise InputError("documents stand in a prompt of their own; leave out kv")
        return [partial(self._prepare_blend, one, params, keep_kv, lora) for one in prompts]

    def _prepare_blend(
        self, prompt_parts: PromptParts, params: SamplingParams, keep_kv: bool, lora: AdapterChoice
    ) -> PendingAnswer:
        own = {"keep_kv": keep_kv, "adapter": self.adapter(lora, prompt_parts.blend_prompt.ids), **prompt_parts.fields}
        return self._pending_answer(*self.request(prompt_parts.blend_prompt.ids, params, **own))

    def _prepare_warm(self, warmup: DocumentWarmup, ids: tuple[int, ...]) -> PendingAnswer:
        return self._pending_answer(*warmup.request(ids))

    def _complete(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        kv: KVCache | None,
        reused: int,
        keep_kv: bool,
        lora: AdapterChoice,
        discovery: DiscoveryChoice,
    ) -> list[Completion]:
        each = [partial(self._prepare, ids, params, kv, reused, keep_kv, lora, discovery) for ids in prompts]
        return self._runner.answers(each)


def _watch(warmup: DocumentWarmup, documents: Sequence[tuple[int, ...]], pending: Sequence[PendingAnswer]) -> None:
    for ids, one in zip(documents, pending, strict=True):
        warmup.watch(ids, one.job)


def _reused(ids: list[int], params: SamplingParams, kv: KVCache | None) -> int:
    """Tokens of a conversation that need not be computed; with prompt_logprobs there are none."""
    return shared(ids, kv) if params.prompt_logprobs is None else 0
