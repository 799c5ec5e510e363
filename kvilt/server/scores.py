"""Logprobs as completions have them: four lists over the tokens of a text, those of its prompt first if echoed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..sampling.sampler import TokenLogprobs
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .counts import finite, token_text


class Scores:
    """The lists of one choice, given out piece by piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, at_start=False)
        self._offset = 0  # characters of text before the next token
        self._fresh: dict[str, list[Any]] = _empty()

    def read(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """The tokens of an echoed prompt, whose first has no logprob; a handle's before them are not shown."""
        self._detokenizer = Detokenizer(self._tokenizer)
        own = logprobs[len(logprobs) - len(ids) :] if logprobs else [None] * len(ids)
        for token, entry in zip(ids, own, strict=True):
            self._add(token, entry)

    def draw(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Tokens that were drawn."""
        for entry in logprobs:
            self._add(entry.token, entry)

    def taken(self) -> dict[str, list[Any]]:
        """What was added since the last time."""
        fresh, self._fresh = self._fresh, _empty()
        return fresh

    def _add(self, token: int, entry: TokenLogprobs | None) -> None:
        self._fresh["tokens"].append(token_text(self._tokenizer, token))
        self._fresh["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        self._fresh["top_logprobs"].append(None if entry is None else self._likely(entry))
        self._fresh["text_offset"].append(self._offset)
        self._offset += len(self._detokenizer.add(token))

    def _likely(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that was taken, by their texts; of two with one text, the likelier."""
        pairs = [(entry.token, entry.logprob), *reversed([*zip(entry.top_ids, entry.top_logprobs, strict=True)])]
        return {token_text(self._tokenizer, token): finite(logprob) for token, logprob in pairs}


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
