"""From `draft=` to a drafter: prompt lookup, another model with the same tokenizer, or one that the caller made."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import ParamError
from ..executor.protocol import Executor
from ..sampling.params import MAX_DRAFT_TOKENS
from ..speculative.drafter import Drafter
from ..speculative.model import ModelDrafter
from ..speculative.ngram import NgramDrafter
from ..text.tokenizer import Tokenizer

DraftLike = str | os.PathLike[str] | Drafter
NGRAM = "ngram"
# Long drafts cost little where nothing has to be computed for them.
_MOST_NGRAM, _MOST_MODEL = 16, 8

# Loads a draft model, with this much memory for its KV.
LoadDraft = Callable[[str, int], tuple[Executor, Tokenizer]]


def check_draft(draft: DraftLike | None, draft_tokens: int | None) -> None:
    """Check the options before a model is loaded."""
    if draft_tokens is None:
        return
    if draft is None:
        raise ParamError("draft_tokens", "needs a drafter beside it; add draft='ngram' or a draft model")
    if type(draft_tokens) is not int or not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise ParamError("draft_tokens", f"must be a whole number from 1 to {MAX_DRAFT_TOKENS}, not {draft_tokens!r}")
    if isinstance(draft, Drafter):
        raise ParamError("draft_tokens", "is what a drafter says itself; make yours with it")


def drafter_for(
    draft: DraftLike | None, draft_tokens: int | None, executor: Executor, tokenizer: Tokenizer, load: LoadDraft
) -> Drafter | None:
    """The drafter for a model."""
    if draft is None or isinstance(draft, Drafter):
        return draft
    if draft == NGRAM:
        return NgramDrafter(draft_tokens or _MOST_NGRAM)
    name = os.fspath(draft)
    # A page of a smaller model is smaller, so this is room for every sequence that the large model can hold.
    small, words = load(name, executor.pool.nbytes // 2)
    if (first := first_difference(tokenizer, words)) is not None:
        small.close()
        raise ParamError(
            "draft",
            f"{name!r} has another tokenizer (token {first} is {_shown(words, first)} there and "
            f"{_shown(tokenizer, first)} here); choose a smaller model of the same family, or draft='ngram'",
        )
    return ModelDrafter(small, draft_tokens or _MOST_MODEL)


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first token id with different bytes in the two tokenizers; ids that only one of them has do not count."""
    shared = min(one.vocab_size, other.vocab_size)
    return next((i for i in range(shared) if one.shown_bytes(i) != other.shown_bytes(i)), None)


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.shown_bytes(token).decode("utf-8", "replace")[:40])
