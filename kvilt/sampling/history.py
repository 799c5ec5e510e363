"""The tokens of one sequence: as a list, as the distinct ids that penalties touch, and as runs that may not repeat.

Grows and shrinks one token at a time in constant time; refuses to know what the penalties are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InputError


class History:
    """Prompt ids, then generated ids, with a count of distinct ids that is built on first use."""

    __slots__ = ("_array", "_arrayed", "_counts", "_distinct", "_places", "_prompt_places", "ids", "prompt_tokens")

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self.ids = [_token(token) for token in prompt_ids]
        self.prompt_tokens = len(self.ids)
        self._places: dict[int, int] | None = None  # id -> its place in the two arrays below
        self._prompt_places = 0  # how many of those the prompt has: the first ones
        self._distinct: npt.NDArray[np.int64] = np.empty(0, np.int64)  # in order of first appearance
        self._counts: npt.NDArray[np.float32] = np.empty(0, np.float32)  # how often generated
        self._array: npt.NDArray[np.int64] = np.empty(0, np.int64)  # `ids` up to `_arrayed`, then spare room
        self._arrayed = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def generated(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[self.prompt_tokens :]

    @property
    def generated_tokens(self) -> int:
        """How many ids stand after the prompt."""
        return len(self.ids) - self.prompt_tokens

    def append(self, token: int) -> None:
        """One more generated id."""
        self.ids.append(_token(token))
        if self._places is not None:
            self._count(self._places, self.ids[-1], 1)

    def check_rollback(self, count: int) -> None:
        """Raise unless so many ids were generated."""
        if not 0 <= count <= self.generated_tokens:
            raise InputError(f"{count} tokens cannot be taken back: {self.generated_tokens} were generated")

    def rollback(self, count: int) -> None:
        """Forget the last `count` generated ids, as if they had never been appended."""
        self.check_rollback(count)
        for _ in range(count):
            token = self.ids.pop()
            if self._places is not None:
                self._uncount(self._places, token)
        self._arrayed = min(self._arrayed, len(self.ids))

    def fork(self) -> History:
        """An independent copy."""
        other = History()
        other.ids, other.prompt_tokens = list(self.ids), self.prompt_tokens
        if self._places is not None:
            other._places = dict(self._places)
            other._prompt_places = self._prompt_places
            other._distinct, other._counts = self._distinct.copy(), self._counts.copy()
        other._array, other._arrayed = self._array.copy(), self._arrayed
        return other

    def repeats(self, size: int) -> npt.NDArray[np.int64]:
        """Ids that as the next token would repeat a run of `size` ids which this history already has."""
        ids = self._as_array()
        runs = len(ids) - size + 1
        if runs < 1:
            return ids[:0]
        same = np.ones(runs, np.bool_)  # the run that starts here begins as the history ends
        for place, token in enumerate(ids[runs:]):
            same &= ids[place : place + runs] == token
        return ids[size - 1 :][same]

    def tally(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Distinct ids below `vocab_size` (int64) and how often each was generated (float32), valid until append."""
        ids, counts = self.tally_arrays(vocab_size)
        return torch.from_numpy(ids), torch.from_numpy(counts)

    def tally_arrays(self, vocab_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The same as arrays."""
        if self._places is None:
            self._places = {}
            for token in self.ids[: self.prompt_tokens]:
                self._count(self._places, token, 0)
            self._prompt_places = len(self._places)
            for token in self.generated:
                self._count(self._places, token, 1)
        used = len(self._places)
        ids, counts = self._distinct[:used], self._counts[:used]
        # An embedding may be larger than the output: ids past the logits cannot be drawn, so nothing touches them.
        known = ids < vocab_size
        return (ids, counts) if known.all() else (ids[known], counts[known])

    def _as_array(self) -> npt.NDArray[np.int64]:
        """All ids; brought up to date only here, so that a history that is never searched pays nothing."""
        length = len(self.ids)
        if length > len(self._array):
            self._array = np.concatenate(
                [self._array[: self._arrayed], np.zeros(length - self._arrayed + length, np.int64)]
            )
        self._array[self._arrayed : length] = self.ids[self._arrayed :]
        self._arrayed = length
        return self._array[:length]

    def _count(self, places: dict[int, int], token: int, times: int) -> None:
        place = places.setdefault(token, len(places))
        if place == len(self._distinct):
            room = max(64, place)  # doubling keeps append constant on average
            self._distinct = np.concatenate([self._distinct, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._distinct[place] = token
        self._counts[place] += times

    def _uncount(self, places: dict[int, int], token: int) -> None:
        """The latest id goes. Places are in order of first appearance, so if it was new, its place is the last."""
        place = places[token]
        self._counts[place] -= 1
        if self._counts[place] == 0 and place >= self._prompt_places:
            assert place == len(places) - 1
            del places[token]


def _token(token: int) -> int:
    if not 0 <= token < 2**31:
        raise InputError(f"{token} is not a token id; ids start at 0 and end at the size of the vocabulary")
    return token
