"""From a prompt or a conversation to tokens, and to a cache that holds their beginning. Runs in threads of its own.

Refuses to know how requests are sampled and run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..blend.recipe import Recipe
from ..engine.admission import BorrowedKV
from ..engine.handle import HandleLoan
from ..engine.handles import Handles
from ..engine.request import new_id
from ..errors import HandleMismatch, InputError, TruncateError
from ..kv.cache import KVCache
from ..sampling.params import SamplingParams
from .blend import PromptParts, listed
from .model import Chat, Model, Prompt, after_cache, shared
from .offload import uninterruptible


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """How a request is served, besides how its tokens are drawn."""

    id: str = dataclasses.field(default_factory=new_id)
    priority: int = 0  # the lower, the sooner
    tenant: str = ""  # KV is found again, and handles are seen, only by the same tenant
    kv: KVCache | str | None = None  # what the prompt continues: a cache, which is forked, or a handle's id
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
    continued_tokens: int = 0  # tokens of the cache that the prompt continues
    blend_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of the request about documents
    loan: HandleLoan | None = None  # of a handle

    def without_cache(self) -> PreparedPrompt:
        """The same prompt, all of which is computed."""
        if self.borrowed is not None:
            self.borrowed.kv.close()
        return dataclasses.replace(self, borrowed=None)


# Prepares a prompt. It may take a while, so it runs in a thread of its own.
PromptSource = Callable[[RequestTerms], PreparedPrompt]


class PromptPreparer:
    """Prepares the prompts of one model."""

    def __init__(self, model: Model, handles: Handles) -> None:
        self._model = model
        self._handles = handles

    def text(self, prompt: Prompt, terms: RequestTerms) -> PreparedPrompt:
        """A text or tokens, which continue the terms' cache or handle if there is one."""
        if listed(terms.documents):
            parts = self._model.documents.before(prompt, terms.documents, terms.recipe or Recipe())
            return self._with_documents(parts, terms)
        ids = self._model.prompt_ids(prompt, begins=terms.kv is None)
        uninterruptible()  # a borrowed cache must be given back
        if isinstance(terms.kv, str):
            loan = self._handles.lend(terms.tenant, terms.kv)
            borrowed = BorrowedKV(loan.kv, exact=True) if loan.kv is not None else None
            return PreparedPrompt([*loan.tokens, *ids], borrowed, len(loan.tokens), loan=loan)
        if terms.kv is None:
            return PreparedPrompt(ids, None)
        return PreparedPrompt(after_cache(terms.kv, ids), BorrowedKV(terms.kv.fork()), terms.kv.num_entries)

    def parts(self, parts: Sequence[Prompt], terms: RequestTerms) -> PreparedPrompt:
        """A text, documents and a question."""
        return self._with_documents(self._model.documents.parts(parts, terms.recipe or Recipe()), terms)

    def chat(self, messages: Chat, tools: Sequence[Mapping[str, Any]] | None, terms: RequestTerms) -> PreparedPrompt:
        """A conversation, whose beginning is taken from the terms' cache or handle as far as they agree."""
        model = self._model
        if listed(terms.documents):
            parts = model.chat_pieces(messages, tools, terms.documents, terms.recipe or Recipe())
            return self._with_documents(parts, terms)
        ids = model.chat_ids(messages, tools)
        uninterruptible()
        if isinstance(terms.kv, str):
            return self._after_handle(ids, terms.kv, terms.tenant)
        reused = shared(ids, terms.kv)
        return PreparedPrompt(ids, BorrowedKV(terms.kv.fork_to(reused)) if terms.kv is not None and reused else None)

    def _with_documents(self, parts: PromptParts, terms: RequestTerms) -> PreparedPrompt:
        uninterruptible()
        if terms.kv is not None:
            raise InputError("documents stand in a prompt of their own; leave out kv")
        return PreparedPrompt(parts.blend_prompt.ids, None, blend_fields=parts.fields)

    def _after_handle(self, ids: list[int], handle: str, tenant: str) -> PreparedPrompt:
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
            kv = None  # a sliding window has dropped what is needed
        return PreparedPrompt(ids, BorrowedKV(kv, exact=True) if kv is not None else None, loan=loan)


def split_fields(params: SamplingParams | None, fields: dict[str, Any]) -> tuple[RequestTerms, SamplingParams]:
    """The fields of a call, split into those of a request and those of sampling."""
    names = {field.name for field in dataclasses.fields(RequestTerms)}
    own = {name: value for name, value in fields.items() if name in names}
    rest = {name: value for name, value in fields.items() if name not in names}
    return RequestTerms(**own), SamplingParams.of(params, **rest)
