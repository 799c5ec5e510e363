"""From a prompt or a conversation to a request: its tokens, and a cache that holds their beginning.

`LLM` and `AsyncLLM` share this; it may run in any thread. Refuses to know how requests are run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..batch import Adapter
from ..blend.recipe import Recipe
from ..engine.admission import BorrowedKV
from ..engine.handles.handle import HandleLoan, check_loan
from ..engine.handles.handles import Handles
from ..engine.prompt_embeds import PromptEmbeds
from ..engine.request import Request
from ..engine.sessions.sessions import Sessions
from ..errors import HandleMismatch, InputError, ParamError, TruncateError
from ..executor.inputs import Inputs
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from ..text.parse import Tools
from .answer import AnswerConfig
from .blend import PromptParts, listed
from .model import Chat, Model, Prompt, PromptInput, after_cache, shared
from .offload import uninterruptible
from .options import RequestOptions
from .prepared_prompt import PreparedPrompt
from .session_use import SessionUse

if TYPE_CHECKING:
    from ..sampling.grammar import Grammar


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, what its answer must know, and the cache that the request borrows."""

    request: Request
    answer_config: AnswerConfig
    borrowed: BorrowedKV | None = None


# Prepares a prompt. It may take a while, so it runs in a thread of its own.
PromptSource = Callable[[RequestOptions], PreparedPrompt]


class PromptPreparer:
    """Prepares the prompts and requests of one model."""

    def __init__(self, model: Model, sessions: Sessions, handles: Handles | None = None) -> None:
        """Without `handles`, a request that names one is refused."""
        self._model = model
        self._sessions = sessions
        self._handles = handles

    def request(
        self,
        source: PromptSource,
        params: SamplingParams,
        options: RequestOptions,
        grammar: Grammar | None = None,
        progress: bool = False,
        tools: Tools | None = None,
    ) -> PreparedRequest:
        """The request for a prompt; `grammar` is that of the params, where it is compiled already.

        With `tools`, even none of them, the answer is parsed into reasoning, content and calls.
        """
        prompt = source(options)
        if params.prompt_logprobs is not None and not prompt.continued_tokens and prompt.borrowed is not None:
            prompt = prompt.without_cache()  # all of the prompt gets log-probabilities, so all of it is computed
        # Nothing in a handle is blended: the answer must not depend on whether its KV is here or is computed again.
        discovery = options.discovery if prompt.loan is None else dataclasses.replace(options.discovery, discover=False)
        own = {name: getattr(options, name) for name in ("id", "priority", "tenant", "blend_plugins")}
        use = SessionUse.of(self._sessions, options)
        try:
            adapter = self._adapter(prompt, options)
            if use is not None:
                prompt = dataclasses.replace(prompt, borrowed=use.borrow(prompt, params, adapter))
            made = self._model.request(
                prompt.ids,
                params,
                grammar,
                continued_tokens=prompt.continued_tokens,
                reuse=not isinstance(options.kv, KVCache),
                progress=progress,
                adapter=adapter,
                keep_kv=options.keep_kv or use is not None,
                session="" if use is None else use.options.name,
                embeds=prompt.embeds,
                predicted=self._predicted(options.prediction),
                **{**own, **discovery.fields, **prompt.blend_fields, **({} if use is None else use.fields)},
            )
        except BaseException:
            if prompt.borrowed is not None:
                prompt.borrowed.kv.close()
            raise
        request, config = made
        config = dataclasses.replace(config, session=use)
        if tools is not None:
            config = dataclasses.replace(config, parsing=self._model.chat_parsing(prompt.ids, tools))
        return PreparedRequest(request, config, prompt.borrowed)

    def _predicted(self, text: str) -> tuple[int, ...]:
        most = self._model.executor.max_context
        return tuple(self._model.tokenizer.encode(text, add_special=False, limit=most)) if text else ()

    def _adapter(self, prompt: PreparedPrompt, options: RequestOptions) -> Adapter:
        """The adapter of a request. The KV of its handle, if it has one, must have been computed with the same."""
        # An embedding row is none of the tokens that may switch an adapter on.
        ids = prompt.ids if prompt.embeds is None else prompt.embeds.masked(prompt.ids)
        adapter = self._model.adapter(options.adapter, ids)
        if prompt.loan is not None:
            check_loan(prompt.loan, adapter, self._model.executor.adapters)
        return adapter

    def text(self, prompt: PromptInput, options: RequestOptions) -> PreparedPrompt:
        """A text, tokens or tokens with embedding rows, which continue the options' cache or handle if there is one."""
        if listed(options.documents):
            if isinstance(prompt, Inputs):
                raise ParamError("documents", "cannot be blended into a prompt with embedding rows")
            parts = self._model.documents.before(prompt, options.documents, options.recipe or Recipe())
            return self._with_documents(parts, options)
        given = self._model.prompt_input(prompt, begins=options.kv is None)
        ids, embeds = list(given.ids), PromptEmbeds.of(given)
        uninterruptible()  # a borrowed cache must be given back
        if isinstance(options.kv, str):
            loan = self._lend(options.tenant, options.kv)
            borrowed = BorrowedKV(loan.kv, exact=True) if loan.kv is not None else None
            own = embeds and embeds.after(len(loan.tokens))
            return PreparedPrompt([*loan.tokens, *ids], borrowed, len(loan.tokens), loan=loan, embeds=own)
        if options.kv is None:
            return PreparedPrompt(ids, None, embeds=embeds)
        all_ids, held = after_cache(options.kv, ids), options.kv.num_entries
        own = embeds and embeds.after(held)
        return PreparedPrompt(all_ids, BorrowedKV(options.kv.fork()) if held else None, held, embeds=own)

    def parts(self, parts: Sequence[Prompt], options: RequestOptions) -> PreparedPrompt:
        """A text, documents and a question."""
        if listed(options.documents):
            raise ParamError("documents", "are parts of the prompt here; give them between the first and the last part")
        return self._with_documents(self._model.documents.parts(parts, options.recipe or Recipe()), options)

    def chat(
        self,
        messages: Chat,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        options: RequestOptions,
    ) -> PreparedPrompt:
        """A conversation, whose beginning is taken from the options' cache or handle as far as they agree."""
        model = self._model
        if listed(options.documents):
            parts = model.chat_pieces(messages, tools, options.documents, options.recipe or Recipe(), template_kwargs)
            return self._with_documents(parts, options)
        ids = model.chat_ids(messages, tools, template_kwargs=template_kwargs)
        uninterruptible()
        if isinstance(options.kv, str):
            return self._after_handle(ids, options.kv, options.tenant)
        reused = shared(ids, options.kv)
        return PreparedPrompt(
            ids, BorrowedKV(options.kv.fork_to(reused)) if options.kv is not None and reused else None
        )

    def _with_documents(self, parts: PromptParts, options: RequestOptions) -> PreparedPrompt:
        uninterruptible()
        if options.kv is not None:
            raise InputError("documents stand in a prompt of their own; leave out kv")
        return PreparedPrompt(parts.blend_prompt.ids, None, blend_fields=parts.fields)

    def _lend(self, tenant: str, handle: str) -> HandleLoan:
        if self._handles is None:
            raise ParamError("kv", "is a KVCache here; handles by id are for AsyncLLM")
        return self._handles.lend(tenant, handle)

    def _after_handle(self, ids: list[int], handle: str, tenant: str) -> PreparedPrompt:
        """A prompt whose first tokens must be those of a handle; at least one is left to compute."""
        loan = self._lend(tenant, handle)
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
            kv = None  # a sliding window has dropped what is needed
        return PreparedPrompt(ids, BorrowedKV(kv, exact=True) if kv is not None else None, loan=loan)
