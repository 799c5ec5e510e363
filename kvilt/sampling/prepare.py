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

from ..errors import GrammarFailed
from ..ops.draw_table import DRAWS, EDITED, FILTERED, RECORD, RECORD_WORDS, TOP_P, TYPICAL, DrawTable
from .matcher import packed_masks
from .params import SamplingParams
from .state import SamplingState

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PreparedDraws:
    """A table, and the rows whose grammars could not say what may come next: an error to raise when tokens are read."""

    table: DrawTable
    failure: GrammarFailed | None = None


def prepare(states: Sequence[SamplingState], positions: Sequence[int], vocab_size: int) -> PreparedDraws:
    """Pack the rows of a step; nothing here waits for logits."""
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

    def put(row: int, name: str, count: str, ids: npt.NDArray[np.int64], *beside: npt.NDArray[np.float32]) -> None:
        nonlocal at
        records[row][f"{name}_at"], records[row][count] = at, len(ids)
        for piece in (ids.astype(np.int32), *(values.view(np.int32) for values in beside)):
            pieces.append(piece)
            at += len(piece)

    for copy, row in enumerate(edited):
        state, record = states[row], records[row]
        record["mode"] |= EDITED
        record["copy"] = copy
        if bias := state.params.logit_bias:
            state.params.validate_vocab(vocab_size)
            ids, values = np.fromiter(bias.keys(), np.int64), np.fromiter(bias.values(), np.float32)
            put(row, "bias", "biases", ids, values)
        if state.params.penalized:
            touched, counts = state.history.tally(vocab_size)
            put(row, "penalties", "penalties", touched.numpy(), counts.numpy())
        if state.bans:
            banned = state.banned()
            put(row, "bans", "bans", banned[banned < vocab_size])
    held = [row for row in edited if states[row].matcher is not None]
    masks, failure = _masks(records, held, states, vocab_size, at)
    return [*pieces, *masks], failure


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
