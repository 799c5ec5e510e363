"""What callers hand to an executor: token ids, or ids mixed with embedding rows."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import Embeds, Hidden, Ids, Last, Row, SampledIds, Score
from ..config import STEP_SIZES
from ..errors import InputError
from ..kv.row import Token


@dataclass(frozen=True, slots=True)
class Inputs:
    """One sequence's input: ids, and perhaps embedding rows (of an image, say) that stand at the indices `at`."""

    ids: Sequence[int]
    at: Sequence[int] = ()
    embeddings: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [len(at), hidden]

    def __post_init__(self) -> None:
        if len(self.at) != self.embeddings.shape[0]:
            raise InputError(f"{self.embeddings.shape[0]} embedding rows were given for {len(self.at)} places")
        places = [operator.index(i) for i in self.at]
        if places != sorted(set(places)) or any(not 0 <= i < len(self.ids) for i in places):
            raise InputError("the places of embedding rows must ascend and lie inside the ids")

    @staticmethod
    def join(parts: Sequence[Sequence[int] | Tensor]) -> Inputs:
        """Parts one after the other: token ids, or embedding rows as floats [rows, hidden]."""
        ids: list[int] = []
        at: list[int] = []
        rows: list[Tensor] = []
        for part in parts:
            if isinstance(part, Tensor) and part.is_floating_point():
                at += range(len(ids), len(ids) + len(part))
                ids += [0] * len(part)
                rows.append(part)
            else:
                ids += [operator.index(token) for token in part]
        return Inputs(ids, at, torch.cat(rows)) if rows else Inputs(ids)

    def __len__(self) -> int:
        return len(self.ids)


# A longer input runs in pieces, so that activations stay small.
STEP_TOKENS, GPU_STEP_TOKENS = STEP_SIZES["cpu"].step_tokens, STEP_SIZES["cuda"].step_tokens

# One sequence, and what every method of an executor takes: one for a cache of batch 1, a list of them otherwise.
RowLike = Inputs | Sequence[int] | Tensor
InputsLike = RowLike | Sequence[RowLike]


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row's checked input, ready to be cut into pieces."""

    ids: tuple[int, ...]
    embeds: dict[int, Tensor]  # by index into ids

    def __len__(self) -> int:
        return len(self.ids)

    def source(self, start: int, stop: int) -> Ids | Embeds:
        """The part [start, stop) as a row's source."""
        ids = self.ids[start:stop]
        at = [i for i in self.embeds if start <= i < stop]
        if not at:
            return Ids(ids)
        return Embeds(ids, [i - start for i in at], torch.stack([self.embeds[i] for i in at]))

    def tokens(self) -> list[Token]:
        """What a cache remembers of this input; an embedding row counts by the hash of its bytes."""
        return [_digest(self.embeds[i]) if i in self.embeds else token for i, token in enumerate(self.ids)]


NO_INPUT = RowInput((), {})


def read_inputs(value: InputsLike, batch_size: int, vocab_size: int, hidden_size: int) -> list[RowInput]:
    """One checked input per row of a cache, none of them empty."""
    return [_read_row(row, vocab_size, hidden_size) for row in _rows_of(value, batch_size)]


def read_active_inputs(
    value: InputsLike, batch_size: int, vocab_size: int, hidden_size: int, active: Sequence[bool] | None = None
) -> list[RowInput]:
    """The same, where rows may be skipped: those that `active` says no to, whatever their input, and empty ones."""
    rows = _rows_of(value, batch_size)
    if active is not None and (len(active) != batch_size or not all(isinstance(one, bool) for one in active)):
        raise InputError(f"active must be {batch_size} times True or False, one for each row, not {active!r:.80}")
    runs = [len(row) > 0 and (active is None or active[i]) for i, row in enumerate(rows)]
    if not any(runs):
        raise InputError("the input is empty: no row has a token that is to run; give at least one token")
    return [_read_row(row, vocab_size, hidden_size) if run else NO_INPUT for row, run in zip(rows, runs, strict=True)]


def _rows_of(value: InputsLike, batch_size: int) -> list[Inputs | list[Any]]:
    rows = _per_row(value, batch_size)
    if len(rows) != batch_size:
        raise InputError(f"{len(rows)} inputs were given for a cache of {batch_size} rows")
    return rows


def read_ids(value: Iterable[Any], vocab_size: int) -> list[int]:
    """One sequence of checked token ids, perhaps empty."""
    if isinstance(value, Inputs):
        raise InputError("embedding rows cannot stand here; give text or token ids")
    ids = _listed(value)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:  # nearly always, and without a loop
        return ids
    return [_id(token, vocab_size) for token in ids]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise InputError(f"an input is made of token ids, not {type(value).__name__}; encode text with the tokenizer")
    return list(value)


def _per_row(value: InputsLike, batch_size: int) -> list[Inputs | list[Any]]:
    """A list of rows, or one bare row for a cache of batch 1."""
    if isinstance(value, Inputs):
        return [value]
    items = _listed(value)
    if batch_size == 1 and not any(_is_row(item) for item in items):
        return [items]
    for item in items:
        if not _is_row(item):
            raise InputError(f"a cache of {batch_size} rows takes one sequence of token ids for each row")
    return [item if isinstance(item, Inputs) else list(item) for item in items]


def _is_row(item: object) -> bool:
    if isinstance(item, Tensor | np.ndarray):
        return item.ndim > 0
    return isinstance(item, Inputs) or (isinstance(item, Sequence) and not isinstance(item, str | bytes))


def _read_row(row: Inputs | list[Any], vocab_size: int, hidden_size: int) -> RowInput:
    inputs = row if isinstance(row, Inputs) else Inputs(row)
    if len(inputs) == 0:
        raise InputError("the input is empty; give at least one token")
    embeds = {}
    if len(inputs.at):
        if tuple(inputs.embeddings.shape[1:]) != (hidden_size,):
            raise InputError(f"embedding rows must have {hidden_size} numbers each")
        vectors = inputs.embeddings.detach().float()
        if not bool(torch.isfinite(vectors).all()):  # as float32: a larger float may be finite and still overflow
            raise InputError("embedding rows must be finite float32 numbers")
        embeds = {operator.index(i): vectors[n] for n, i in enumerate(inputs.at)}
    ids = tuple(0 if i in embeds else _id(token, vocab_size) for i, token in enumerate(inputs.ids))
    return RowInput(ids, embeds)


def _id(token: object, vocab_size: int) -> int:
    try:
        value = operator.index(token)  # type: ignore[arg-type]
        if isinstance(token, bool) or getattr(token, "dtype", None) is torch.bool:  # an index to Python, a mistake here
            raise TypeError
    except TypeError:
        raise InputError(f"a token id must be a whole number, not {token!r}") from None
    if not 0 <= value < vocab_size:
        raise InputError(f"token id {value} is outside the vocabulary (0 to {vocab_size - 1})")
    return value


def check_row(row: Row, vocab_size: int, hidden_size: int, axes: int = 0, state_size: int | None = None) -> None:
    """Raise unless a model of these sizes can run the row; a backend would fail late, on a device past repair.

    `state_size`: what a token has between two layers, where that is more than one hidden state.
    """
    if type(row.source) is SampledIds and type(row.want) is Last and not row.rope_positions:
        return  # a decode: the sampler made its id
    if row.rope_positions and len(row.rope_positions) != axes:
        raise InputError(f"this model rotates by {axes or 1} axes of a position, not by {len(row.rope_positions)}")
    match row.source:
        case Ids(ids):
            _check_ids(ids, vocab_size)
        case Embeds(ids, at, vectors):
            places = set(at)
            _check_ids([token for i, token in enumerate(ids) if i not in places], vocab_size)
            _check_width(vectors, hidden_size)
        case Hidden(states):
            _check_width(states, hidden_size if state_size is None else state_size)
    if isinstance(row.want, Score):
        _check_ids(row.want.targets, vocab_size)
        if not 0 <= row.want.top <= vocab_size:
            raise InputError(f"the {row.want.top} likeliest of {vocab_size} tokens were asked for")


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            _id(token, vocab_size)  # says what is wrong, if anything is


def _check_width(states: Tensor, hidden_size: int) -> None:
    if states.dim() != 2 or states.shape[1] != hidden_size:
        raise InputError(f"hidden states must be [tokens, {hidden_size}], not {list(states.shape)}")


def _digest(row: Tensor) -> bytes:
    return hashlib.sha256(row.cpu().contiguous().numpy().tobytes()).digest()
