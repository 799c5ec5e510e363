"""Documents in prompts: their positions, how they are blended, and the store of their KV.

Refuses to know how rows are run; the engine blends.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..blend.chunk import ChunkCache
from ..blend.recipe import BlendPrompt, Recipe
from ..config import available_memory_bytes
from ..errors import ContextOverflow, InputError, ParamError
from ..executor.inputs import read_ids
from ..executor.protocol import Executor
from ..metrics import Metrics
from ..store.store import Store
from ..store.tier import Budget
from ..text.tokenizer import Tokenizer

_STORE_SHARE = 8  # without a given store, documents may take 1/8 of the free memory


def listed(documents: object) -> bool:
    """Whether there are documents; InputError where this is not a list."""
    if isinstance(documents, str | bytes | Mapping) or not hasattr(documents, "__len__"):
        what = "one text" if isinstance(documents, str) else type(documents).__name__
        raise InputError(f"documents is a list of texts, or of token ids, not {what}")
    return len(documents) > 0


@dataclass(frozen=True, slots=True)
class PromptParts:
    """A prompt as tokens, and what of it is documents."""

    blend_prompt: BlendPrompt
    recipe: Recipe

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a request that describe the documents."""
        return {"documents": self.blend_prompt.documents, "recipe": self.recipe}


class Documents:
    """One model's documents. The store is opened when it is first needed, unless one is given."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        store: Store | None = None,
        context_prefix: Sequence[int] | None = None,
    ) -> None:
        """Documents are computed after the tokens `context_prefix`; by default after those that begin every text."""
        self._executor = executor
        self._tokenizer = tokenizer
        self.context_prefix = tuple(tokenizer.head if context_prefix is None else context_prefix)
        if len(self.context_prefix) > executor.max_context // 2:
            raise ParamError(
                "context_prefix", f"has {len(self.context_prefix)} tokens, over half of max_context; shorten it"
            )
        self._given = store
        self._own: Store | None = None
        self._chunks: ChunkCache | None = None
        self._lock = threading.Lock()

    @property
    def chunks(self) -> ChunkCache:
        """Where documents are found."""
        with self._lock:
            if self._chunks is None:
                store = self._given
                if store is None:
                    store = self._own = Store(Budget(available_memory_bytes() // _STORE_SHARE))
                self._chunks = ChunkCache(self._executor, store, self.context_prefix)
            return self._chunks

    @property
    def metrics(self) -> Metrics | None:
        """The metrics of the store; None before it is opened."""
        store = self._given or self._own
        return store.metrics if store is not None else None

    def close(self) -> None:
        """Release the store, and close it if it was opened here."""
        with self._lock:
            if self._chunks is not None:
                self._chunks.close()
            if self._own is not None:
                self._own.close()
            self._own = self._chunks = None

    def ids(self, text: str | Sequence[int], taken: int = 0) -> list[int]:
        """The tokens of a document, or of a part of a prompt other than the first; `taken` tokens stand before it."""
        if isinstance(text, str):
            return self._tokenizer.encode(text, add_special=False, limit=self._executor.max_context, taken=taken)
        return read_ids(text, self._executor.spec.vocab_size)

    def ids_alone(self, name: str, text: str | Sequence[int]) -> list[int]:
        """The tokens of a document, checked to fit this model; errors name it by `name`."""
        try:
            ids = self.ids(text)
        except ContextOverflow as error:
            why = f"has at least {error.tokens} tokens, and with a max_context this small {error.limit - 1} fit"
            raise ParamError(name, f"{why}; shorten it") from error
        self._check_alone(name, len(ids))
        return ids

    def _check_alone(self, name: str, tokens: int) -> None:
        if not tokens:
            raise ParamError(name, "is empty; give at least one token")
        pool, needed = self._executor.pool, tokens + len(self.context_prefix) + 1
        if needed > self._executor.max_context:
            most = self._executor.max_context - needed + tokens
            raise ParamError(name, f"has {tokens} tokens, and with a max_context this small {most} fit; shorten it")
        size = pool.layout.page_tokens
        # The chunk, and the prompt that makes it, each written as a whole.
        if -(-needed // size) + -(-(needed - 1) // size) > min(pool.group_pages):
            raise ParamError(name, f"has {tokens} tokens, for which the KV memory is too small; raise kv_memory")

    def parts(self, parts: Sequence[str | Sequence[int]], recipe: Recipe) -> PromptParts:
        """A text, documents and a question, one after the other."""
        if isinstance(parts, str | bytes | Mapping) or not hasattr(parts, "__len__") or len(parts) < 2:
            raise InputError("give at least two parts: what stands first, any documents, and the question")
        first, *rest = parts
        begin = [*self._tokenizer.head, *self.ids(first)] if isinstance(first, str) else self.ids(first)
        segments = self._token_segments(begin, rest)
        flags = [False, *[True] * (len(segments) - 2), not recipe.last_segment]
        return self._prompt_parts(segments, flags, recipe)

    def before(
        self, prompt: str | Sequence[int], documents: Sequence[str | Sequence[int]], recipe: Recipe
    ) -> PromptParts:
        """Documents, and a prompt after them."""
        segments = self._token_segments(self._tokenizer.head, [*documents, prompt])
        return self._prompt_parts(segments, [False, *[True] * len(documents), False], recipe)

    def between(
        self, pieces: Sequence[Sequence[int]], documents: Sequence[str | Sequence[int]], recipe: Recipe
    ) -> PromptParts:
        """Documents between the pieces of a chat prompt, of which there is one more."""
        segments: list[Sequence[int]] = [pieces[0]]
        taken = sum(map(len, pieces))
        for document, piece in zip(documents, pieces[1:], strict=True):
            segments += [self.ids(document, taken), piece]
            taken += len(segments[-2])
        return self._prompt_parts(segments, [index % 2 == 1 for index in range(len(segments))], recipe)

    def _token_segments(self, begin: Sequence[int], texts: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        """The tokens of texts, one after the other; tokenizing stops at the end of the context."""
        segments, taken = [begin], len(begin)
        for text in texts:
            segments.append(self.ids(text, taken))
            taken += len(segments[-1])
        return segments

    def _prompt_parts(
        self, segments: Sequence[Sequence[int]], documents: Sequence[bool], recipe: Recipe
    ) -> PromptParts:
        blend_prompt = BlendPrompt.of(segments, documents)
        if not blend_prompt.ids or not segments[-1]:
            raise InputError("the question is empty; give at least one token behind the documents")
        return PromptParts(blend_prompt, recipe)
