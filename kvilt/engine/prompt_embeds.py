"""Embedding rows that stand in a prompt instead of tokens, such as those of an image.

KV knows each row by the hash of its bytes, so that equal rows share KV and different ones never do. Refuses to know how
the rows were made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import Embeds, Ids
from ..errors import InputError
from ..executor.inputs import RowInput
from ..kv.row import EMBEDDED, Token


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """Rows by the positions at which they stand; the id that a prompt has there is not looked at."""

    at: tuple[int, ...]  # ascending
    vectors: Tensor  # [len(at), hidden] float32, not shared with the caller
    hashes: tuple[bytes, ...]

    @staticmethod
    def of(inputs: RowInput) -> PromptEmbeds | None:
        """The rows of a checked input; None where it has none."""
        if not inputs.embeds:
            return None
        at, tokens = sorted(inputs.embeds), inputs.tokens()
        hashes = tuple(token for token in (tokens[i] for i in at) if isinstance(token, bytes))
        return PromptEmbeds(tuple(at), torch.stack([inputs.embeds[i] for i in at]), hashes)

    def after(self, tokens: int) -> PromptEmbeds:
        """The same rows in an input that stands after so many tokens."""
        return replace(self, at=tuple(i + tokens for i in self.at))

    def check(self, prompt_tokens: int, hidden_size: int) -> None:
        """Raise unless a model of this width can run a prompt of so many tokens with these rows."""
        if not self.at or list(self.at) != sorted(set(self.at)) or not 0 <= self.at[0] <= self.at[-1] < prompt_tokens:
            raise InputError("the places of embedding rows must ascend and lie inside the prompt")
        if self.vectors.shape != (len(self.at), hidden_size) or len(self.hashes) != len(self.at):
            raise InputError(f"embedding rows must have {hidden_size} numbers each, and one row for each place")

    def source(self, ids: Sequence[int], start: int) -> Ids | Embeds:
        """Ids that stand from position `start` on as a row's source, with the rows among them."""
        first, last = bisect_left(self.at, start), bisect_left(self.at, start + len(ids))
        if first == last:
            return Ids(ids)
        return Embeds(ids, [i - start for i in self.at[first:last]], self.vectors[first:last])

    def tokens(self, ids: Sequence[int], start: int = 0) -> list[Token]:
        """What a cache and an index know the tokens from position `start` on by."""
        tokens: list[Token] = list(ids)
        for index in range(bisect_left(self.at, start), bisect_left(self.at, start + len(tokens))):
            tokens[self.at[index] - start] = self.hashes[index]
        return tokens

    def masked(self, ids: Sequence[int]) -> list[int]:
        """The ids of a prompt, with one that no token has where a row stands."""
        return [token if isinstance(token, int) else EMBEDDED for token in self.tokens(ids)]

    def ids_only(self, ids: Sequence[int], start: int = 0) -> list[int]:
        """Those of the ids from position `start` on that are looked at."""
        return [token for token in self.tokens(ids, start) if isinstance(token, int)]
