"""The tokens of one sequence, as a list and as the distinct ids that penalties touch.

Grows one token at a time in constant time; refuses to know what the penalties are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InputError


class History:
    """Prompt ids, then generated ids, with a tally of distinct ids that exists once someone asks for it."""

    __slots__ = ("_counts", "_distinct", "_places", "ids", "prompt_tokens")

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self.ids = [_token(token) for token in prompt_ids]
        self.prompt_tokens = len(self.ids)
        self._places: dict[int, int] | None = None  # id -> its place in the two arrays below
        self._distinct: npt.NDArray[np.int64] = np.empty(0, np.int64)  # in order of first appearance
        self._counts: npt.NDArray[np.float32] = np.empty(0, np.float32)  # how often generated

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def generated(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[self.prompt_tokens :]

    def append(self, token: int) -> None:
        """One more generated id."""
        self.ids.append(_token(token))
        if self._places is not None:
            self._count(self._places, self.ids[-1], 1)

    def fork(self) -> History:
        """The same history, free to go its own way."""
        other = History()
        other.ids, other.prompt_tokens = list(self.ids), self.prompt_tokens
        if self._places is not None:
            other._places = dict(self._places)
            other._distinct, other._counts = self._distinct.copy(), self._counts.copy()
        return other

    def tally(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Distinct ids below `vocab_size` (int64) and how often each was generated (float32), valid until append."""
        if self._places is None:
            self._places = {}
            for index, token in enumerate(self.ids):
                self._count(self._places, token, int(index >= self.prompt_tokens))
        used = len(self._places)
        ids, counts = torch.from_numpy(self._distinct[:used]), torch.from_numpy(self._counts[:used])
        # An embedding may be larger than the output: ids past the logits cannot be drawn, so nothing touches them.
        known = ids < vocab_size
        return (ids, counts) if bool(known.all()) else (ids[known], counts[known])

    def _count(self, places: dict[int, int], token: int, times: int) -> None:
        place = places.setdefault(token, len(places))
        if place == len(self._distinct):
            room = max(64, place)  # doubling keeps append constant on average
            self._distinct = np.concatenate([self._distinct, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._distinct[place] = token
        self._counts[place] += times


def _token(token: int) -> int:
    if not 0 <= token < 2**31:
        raise InputError(f"{token} is not a token id; ids start at 0 and end at the size of the vocabulary")
    return token
