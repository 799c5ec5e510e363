"""LLM: generate, stream, chat and prefill through the engine, in the thread of the caller.

Refuses to know HTTP and terminals, and how a model is found and built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, overload

from ..blend.certificate import Certificate
from ..engine.admission import BorrowedKV
from ..engine.handles.handles import Handles
from ..engine.request import Request
from ..engine.sessions.exchange import SessionExchange, SessionImport
from ..engine.sessions.session import SessionOptions
from ..engine.sessions.sessions import Sessions, check_options
from ..engine.view import EngineView
from ..executor.inputs import Inputs
from ..kv.cache import KVCache
from ..kv.row import maker_parts
from ..metrics import Metrics
from ..sampling.params import SamplingParams
from ..text.parse import Tools
from .answer import Answer, AnswerConfig
from .completion import Completion, Stream
from .documents import DocumentInput
from .embedding import Embedding, EmbedFields, RankedText, check_dimensions, embedding_request, ranked
from .model import AdapterChoice, Chat, Model, Prompt, PromptInput, each_prompt, is_one
from .options import CallFields, RequestOptions, split_fields
from .prompts import PromptPreparer, PromptSource
from .python_tools import Tool
from .replace import DEFAULT_REPAIR, SpanReplacement, replace_request
from .session import LLMSession
from .sync_runner import PendingAnswer, SyncRunner
from .tool_choice import tool_use
from .warmup import DocumentWarmup, OnProgress, StoredDocument


class LLM(Model):
    """A model with its tokenizer and chat template. Close it, or use it as a context manager.

    Several threads may call it at once; their requests then share steps. Methods that generate take the fields of
    `RequestOptions` and of `SamplingParams` as keywords.
    """

    def _start(self, metrics: Metrics) -> None:
        self._handles = Handles(self.executor, self.config, metrics, on_expired=self.past_prompts.expire)
        self.engine = self._new_engine(metrics, self._handles.evict_one)
        self.sessions = Sessions(self.executor, self._handles, self.config, on_expired=self.past_prompts.expire)
        self.exchange = SessionExchange(self.executor, self._handles, self.sessions, self.decoded, self.config)
        self._runner = SyncRunner(self.engine, self.executor)
        self._prompts = PromptPreparer(self, self.sessions)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts; it is one prompt
        self, prompt: PromptInput, params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Sequence[PromptInput], params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion | list[Completion]:
        """Continue a prompt, or each of a list of them in one batch. A prompt is a text, token ids, or `Inputs`.

        With `kv` the prompt continues what that cache holds; the cache itself is forked, never changed. With `n`
        the prompt is computed once, and the samples after the first are the result's `alternatives`. `documents` stand
        before each prompt; what is computed of them is kept, and blended wherever they stand next time. `discover`
        blends also known ones that stand in the prompt itself. `lora` is the id or the name of a loaded adapter.
        """
        options, chosen = split_fields(params, fields)
        one = is_one(prompt)
        prompts = each_prompt(prompt)
        each = [options] if one else [options.numbered(index) for index in range(len(prompts))]
        done = self._runner.answers(
            [
                self._preparing(partial(self._prompts.text, text), chosen, own)
                for text, own in zip(prompts, each, strict=True)
            ]
        )
        return done[0] if one else done

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None, **fields: Unpack[CallFields]) -> Stream:
        """`generate` for one prompt, piece by piece."""
        options, chosen = split_fields(params, fields)
        return self._runner.stream(self._preparing(partial(self._prompts.text, prompt), chosen, options), chosen)

    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion:
        """Answer a conversation. With `kv`, what it shares with the conversation's beginning is not computed again.

        `documents` stand where the chat template puts them, else before the last user's text, and are blended.
        `chat_template_kwargs` are variables for the template, like `enable_thinking` or `reasoning_effort`; those that
        it does not read have no effect. `tools` are Python functions with type hints, or OpenAI's JSON; `tool_choice`
        is auto, none, required, or the name of one of them. The completion's `text` is the answer's content;
        `reasoning` and `tool_calls` are beside it, and `run_tools` carries the calls out.
        """
        options, chosen = split_fields(params, fields)
        use = tool_use(self, messages, chosen, tools, tool_choice, chat_template_kwargs)
        source = partial(self._prompts.chat, messages, use.tools, chat_template_kwargs)
        return self._complete(source, use.params, options, use.tools or ())

    def stream_chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Unpack[CallFields],
    ) -> Stream:
        """`chat`, piece by piece; a piece of reasoning says so."""
        options, chosen = split_fields(params, fields)
        use = tool_use(self, messages, chosen, tools, tool_choice, chat_template_kwargs)
        source = partial(self._prompts.chat, messages, use.tools, chat_template_kwargs)
        return self._runner.stream(self._preparing(source, use.params, options, use.tools or ()), use.params)

    def stream_answer(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Unpack[CallFields]
    ) -> Stream:
        """`stream` for a prompt that a chat template has rendered: reasoning and content are told apart."""
        options, chosen = split_fields(params, fields)
        return self._runner.stream(self._preparing(partial(self._prompts.text, prompt), chosen, options, ()), chosen)

    def blend(
        self,
        parts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        ratio: float | None = None,
        strategy: str | None = None,
        **fields: Unpack[CallFields],
    ) -> Completion:
        """Continue a prompt of parts: what stands first, any documents, and the question.

        The KV of documents is reused wherever they stand, and a `ratio` of their tokens is computed again; the recipe
        says which. What is not stored yet is computed once, kept, and blended as it will be next time.
        """
        options, chosen = split_fields(params, fields)
        options = options.with_recipe(ratio=ratio, strategy=strategy)
        return self._complete(partial(self._prompts.parts, parts), chosen, options)

    def warm(
        self,
        documents: Sequence[DocumentInput],
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

    @overload
    def embed(  # type: ignore[overload-overlap]  # a text is also a sequence of texts; it is one
        self, prompt: Prompt, **options: Unpack[EmbedFields]
    ) -> Embedding: ...

    @overload
    def embed(self, prompt: Sequence[Prompt], **options: Unpack[EmbedFields]) -> list[Embedding]: ...

    def embed(self, prompt: Prompt | Sequence[Prompt], **options: Unpack[EmbedFields]) -> Embedding | list[Embedding]:
        """The embedding of a text or of token ids, or of each of a list of them in one batch.

        The options are the fields of `EmbedFields`.
        """
        one, prompts, dimensions = is_one(prompt), each_prompt(prompt), options.get("dimensions")
        check_dimensions(dimensions, self.executor.spec.hidden_size)
        pooling = self.embedding_config.pooled(options.get("pooling"))
        pending: list[PendingAnswer] = []

        def prepare(text: Prompt) -> PendingAnswer:
            ids = self.embedded_ids(text, options.get("truncate", False), options.get("prompt_name"))
            adapter = self.adapter(AdapterChoice(options.get("lora"), options.get("lora_scale", 1.0)), ids)
            answer_config = AnswerConfig(self.tokenizer, SamplingParams(), frozenset(), len(ids))
            pending.append(self._pending_answer(embedding_request(ids, pooling, "", adapter), answer_config))
            return pending[-1]

        self._runner.answers([partial(prepare, text) for text in prompts])
        found = [Embedding.of(each.answer, self.embedding_config, dimensions) for each in pending]
        return found[0] if one else found

    def score(self, text: Prompt, others: Sequence[Prompt], **options: Unpack[EmbedFields]) -> list[float]:
        """How near a text is to each of the others: the cosine of the angle between their embeddings."""
        first, *rest = self.embed([text, *others], **options)
        return [first.similarity(other) for other in rest]

    def rerank(
        self,
        query: Prompt,
        documents: Sequence[Prompt],
        top_n: int | None = None,
        query_prompt: str | None = None,
        **options: Unpack[EmbedFields],
    ) -> list[RankedText]:
        """Documents in the order of their scores with a query, the nearest first, `top_n` of them.

        `query_prompt` names the model's prompt for the query, `prompt_name` that for documents.
        """
        asked: EmbedFields = {**options, "prompt_name": query_prompt}
        return ranked(self.embed(query, **asked), documents, self.embed(list(documents), **options), top_n)

    def prefill(self, prompt: PromptInput, *, lora: int | str | None = None, lora_scale: float = 1.0) -> KVCache:
        """The KV of a prompt, to fork and generate from as often as you like."""
        given = prompt if isinstance(prompt, Inputs) else self.prompt_ids(prompt)
        lora_id = None if lora is None else self.executor.adapters.find(lora).id
        kv = self.executor.create_kv_cache()
        try:
            self.executor.prefill(given, kv, lora_id, lora_scale)
        except BaseException:
            kv.close()
            raise
        return kv

    def replace(
        self, kv: KVCache, start: int, stop: int, new_tokens: Prompt = (), *, repair: float = DEFAULT_REPAIR
    ) -> KVCache:
        """A cache with new tokens in place of the tokens [start, stop) of `kv`, which stays as it is.

        What stands before is kept. What stands behind is moved, and a share of it, `repair`, is computed again; with
        1.0 all of it is. The `origin` of the result says how it was made.
        """
        ids = self.prompt_ids(new_tokens, begins=False) if len(new_tokens) else []
        adapter = self.executor.adapters.by_identity(*maker_parts(kv.maker))
        made = replace_request(kv, SpanReplacement(start, stop, tuple(ids), repair), adapter, exact=False)
        config = AnswerConfig(self.tokenizer, SamplingParams(), frozenset(), len(made.request.prompt))
        prepare = partial(self._pending_answer, made.request, config, made.borrowed)
        (done,) = self._runner.answers([prepare])
        assert done.kv is not None
        return done.kv

    def open(self, path: str | os.PathLike[str]) -> KVCache:
        """The cache that `kv.save(path)` wrote; the caller closes it. KV of other numerics is computed again."""
        return self.executor.open_kv_cache(path)

    def session(self, name: str, *, ttl_s: float | None = None, exact: bool = True, tenant: str = "") -> LLMSession:
        """A named session: its prompts find the KV of its earlier turns, whatever was stripped or edited.

        It is kept for `ttl_s` after its last turn. Not `exact`: text that was cut out moves the KV behind it.
        """
        options = SessionOptions(name, ttl_s, exact=exact)
        check_options(options)
        return LLMSession(self, options, tenant)

    def import_session(
        self, path: str | os.PathLike[str], name: str | None = None, *, tenant: str = ""
    ) -> SessionImport:
        """Add a session from a file, in place of one of that name, and say whether its KV is used."""
        return self.exchange.load(tenant, Path(path).read_bytes(), name)

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
        self.sessions.close()
        self._handles.close()
        self.executor.close()
        if self._drafter is not None:
            self._drafter.close()
        self.documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _complete(
        self, source: PromptSource, params: SamplingParams, options: RequestOptions, tools: Tools | None = None
    ) -> Completion:
        return self._runner.answers([self._preparing(source, params, options, tools)])[0]

    def _preparing(
        self, source: PromptSource, params: SamplingParams, options: RequestOptions, tools: Tools | None = None
    ) -> Callable[[], PendingAnswer]:
        """A function that makes the request; with `tools`, even none of them, its answer is parsed."""

        def prepare() -> PendingAnswer:
            made = self._prompts.request(source, params, options, tools=tools)
            return self._pending_answer(made.request, made.answer_config, made.borrowed)

        return prepare

    def _pending_answer(
        self, request: Request, answer_config: AnswerConfig, borrowed: BorrowedKV | None = None
    ) -> PendingAnswer:
        answer = Answer(answer_config)
        return PendingAnswer(self.engine.prepare(request, answer, borrowed), answer)

    def _prepare_warm(self, warmup: DocumentWarmup, ids: tuple[int, ...]) -> PendingAnswer:
        return self._pending_answer(*warmup.request(ids))


def _watch(warmup: DocumentWarmup, documents: Sequence[tuple[int, ...]], pending: Sequence[PendingAnswer]) -> None:
    for ids, one in zip(documents, pending, strict=True):
        warmup.watch(ids, one.job)
