"""How the rows of a step sample, packed for a device: all that the host knows of it before it has seen logits.

A state's record is made once; a step adds the keys of its noise, and for rows that edit their scores the tokens that
they change. Refuses to know devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GrammarFailed
from ..ops.draw_table import DRAWS, EDITED, FILTERED, RECORD, RECORD_WORDS, TOP_P, TYPICAL, DrawTable
from .matcher import packed_masks
from .params import SamplingParams
from .state import SamplingState

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PreparedDraws:
    """A table, and the rows whose grammars could not say what may come next: an error to raise when tokens are read."""

    table: DrawTable | None  # None: every row takes its likeliest token
    failure: GrammarFailed | None = None


def prepare(states: Sequence[SamplingState], positions: Sequence[int], vocab_size: int) -> PreparedDraws:
    """Pack the rows of a step; nothing here waits for logits."""
    if all(state.params.greedy and not state.edited for state in states):
        return PreparedDraws(None)
    keys = [0 if state.params.greedy else state.noise_key(at) for state, at in zip(states, positions, strict=True)]
    made = bytearray(b"".join([_record(state, vocab_size) for state in states]))
    records = np.frombuffer(made, RECORD)
    edited = [row for row, state in enumerate(states) if state.edited]
    edits, failure = _edits(records, edited, states, vocab_size) if edited else ([], None)
    words = [np.array(keys, np.int64).view(np.int32), np.frombuffer(made, np.int32), *edits]
    packed = np.concatenate([*words, np.zeros(sum(map(len, words)) % 2, np.int32)])
    modes = int(np.bitwise_or.reduce(records["mode"], initial=0))
    whole = bool((records["mode"] & (DRAWS | FILTERED) == DRAWS).any())
    table = DrawTable(
        words=torch.from_numpy(packed),
        rows=len(states),
        draws=whole,
        filtered=bool(modes & FILTERED),
        typical=bool(modes & TYPICAL),
        copies=len(edited),
    )
    return PreparedDraws(table, failure)


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """How rows draw in several steps without the host between them."""

    table: DrawTable
    keys: Tensor  # [steps, rows] int64: of each row's noise at each step


def prepare_steps(
    states: Sequence[SamplingState], positions: Sequence[int], steps: int, vocab_size: int
) -> PreparedSteps | None:
    """Pack rows whose scores are not edited; `positions` are those of the first step. None where no row draws."""
    table = prepare(states, positions, vocab_size).table
    if table is None:
        return None
    keys = [
        [0 if state.params.greedy else state.noise_key(at + step) for state, at in zip(states, positions, strict=True)]
        for step in range(steps)
    ]
    return PreparedSteps(table, torch.tensor(keys, dtype=torch.int64))


def _record(state: SamplingState, vocab_size: int) -> bytes:
    """What a state says of every step, in a vocabulary of this size."""
    if state.record is None or state.record[0] != vocab_size:
        state.record = vocab_size, _packed(state.params, vocab_size)
    return state.record[1]


def _packed(params: SamplingParams, vocab_size: int) -> bytes:
    record = np.zeros(1, RECORD)
    record["temperature"], record["mask_at"] = params.temperature or 1.0, -1
    if not params.greedy:
        record["top_k"] = params.top_k if params.top_k < vocab_size else 0
        record["cut"], record["min_p"], record["typical_p"] = 1 - params.top_p, params.min_p, params.typical_p
        mode = DRAWS | TOP_P * (params.top_p < 1) | TYPICAL * (params.typical_p < 1)
        narrow = mode != DRAWS or params.min_p > 0 or record["top_k"][0] > 0
        record["mode"] = mode | FILTERED * narrow
    record["repetition"] = params.repetition_penalty
    record["frequency"], record["presence"] = params.frequency_penalty, params.presence_penalty
    return record.tobytes()


def _edits(
    records: np.ndarray, edited: Sequence[int], states: Sequence[SamplingState], vocab_size: int
) -> tuple[list[Words], GrammarFailed | None]:
    """What the records of edited rows point at; the records are completed."""
    at = len(records) * (RECORD_WORDS + 2)
    pieces: list[Words] = []
    places: list[list[int]] = []
    for row in edited:
        place = []
        for ids, values in _edited_tokens(states[row], vocab_size):
            place += [at, len(ids)]
            pieces += [ids.astype(np.int32)] if values is None else [ids.astype(np.int32), values.view(np.int32)]
            at += len(ids) if values is None else 2 * len(ids)
        places.append(place)
    rows = np.array(edited)
    records["mode"][rows] |= EDITED
    records["copy"][rows] = np.arange(len(rows))
    for name, column in zip(_PLACES, np.array(places).T, strict=True):
        records[name][rows] = column
    held = [row for row in edited if states[row].matcher is not None]
    masks, failure = _masks(records, held, states, vocab_size, at)
    return [*pieces, *masks], failure


_PLACES = ("bias_at", "biases", "penalties_at", "penalties", "bans_at", "bans")
_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)
_Tokens = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]


def _edited_tokens(state: SamplingState, vocab_size: int) -> tuple[_Tokens, _Tokens, _Tokens]:
    """The tokens of a row with a bias, with penalties and banned, and the numbers that go with them."""
    bias, penalties, banned = (_NO_IDS, _NO_VALUES), (_NO_IDS, _NO_VALUES), _NO_IDS
    if given := state.params.logit_bias:
        state.params.validate_vocab(vocab_size)
        bias = np.fromiter(given.keys(), np.int64), np.fromiter(given.values(), np.float32)
    if state.params.penalized:
        penalties = state.history.tally_arrays(vocab_size)
    if state.bans:
        banned = state.banned()
        banned = banned[banned < vocab_size]
    return bias, penalties, (banned, None)


def _masks(
    records: np.ndarray, held: Sequence[int], states: Sequence[SamplingState], vocab_size: int, at: int
) -> tuple[list[Words], GrammarFailed | None]:
    """The masks of rows with grammars."""
    if not held:
        return [], None
    try:
        bits, known = packed_masks([matcher for row in held if (matcher := states[row].matcher) is not None])
    except GrammarFailed as error:
        return [], GrammarFailed([held[row] for row in error.rows], error.reason)
    records["mask_at"][list(held)] = at + np.arange(len(held)) * bits.shape[1]
    records["mask_tokens"][list(held)] = min(known, vocab_size)
    return [bits.reshape(-1)], None
