"""How the rows of a step sample, as words that a device reads: packed on the host, one copy for all of it.

First the keys of the rows' noise, then a record for each row, then what the records point at: tokens with a bias, with
penalties or banned, and the masks of grammars. Refuses to know params and states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Places are counted in words of 32 bits from the start of the table.
RECORD = np.dtype(
    [
        ("mode", "<i4"),
        ("temperature", "<f4"),  # 1 for a row that takes the argmax
        ("top_k", "<i4"),  # 0: off
        ("cut", "<f4"),  # 1 - top_p
        ("min_p", "<f4"),  # 0: off
        ("copy", "<i4"),  # the place of an edited row among the copies
        ("typical_p", "<f8"),
        ("repetition", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("bias_at", "<i4"),  # ids, then what is added to each
        ("biases", "<i4"),
        ("penalties_at", "<i4"),  # ids, then how often each was generated
        ("penalties", "<i4"),
        ("bans_at", "<i4"),  # ids
        ("bans", "<i4"),
        ("mask_at", "<i4"),  # bit i of word w allows token 32 * w + i; -1: no mask
        ("mask_tokens", "<i4"),  # ids from here on are not allowed
        ("unused", "<i4"),
    ]
)
RECORD_WORDS = RECORD.itemsize // 4
# Bits of a mode.
DRAWS, FILTERED, EDITED, TOP_P, TYPICAL = 1, 2, 4, 8, 16
# Why a row has no token: its logits are no numbers, all its tokens are banned, its scores are no numbers.
NO_PEAK, NO_TOKEN, NO_SCORE = 1, 2, 3


def word(name: str) -> int:
    """The place of a field in a record."""
    fields = RECORD.fields
    assert fields is not None
    return int(fields[name][1]) // 4


@dataclass(frozen=True, slots=True)
class DrawTable:
    """The words of a table, and what has to run for its rows."""

    words: Tensor  # int32
    rows: int
    draws: bool  # some rows draw from their whole vocabulary
    filtered: bool  # some rows draw from a part of it
    typical: bool  # some of these by typical-p
    copies: int  # rows whose scores are edited

    @property
    def keys(self) -> Tensor:
        """Of each row's noise [rows] int64; a loop over steps replaces them."""
        return self.words[: 2 * self.rows].view(torch.int64)

    def to(self, device: torch.device) -> DrawTable:
        """The same table there; the host does not wait for the copy."""
        if self.words.device == device:
            return self
        return replace(self, words=self.words.pin_memory().to(device, non_blocking=True))

    @property
    def kinds(self) -> tuple[bool, bool, bool]:
        """Which draws have to run: a recorded loop serves tables of the same kinds."""
        return self.draws, self.filtered, self.typical


@dataclass(frozen=True, slots=True)
class LoopDraws:
    """How the rows of a recorded loop draw: buffers for a table, and for the keys of the noise of all its steps."""

    table: DrawTable
    keys: Tensor  # [steps, rows] int64
    step: Tensor  # [rows] int64: how many steps each row has behind it

    @staticmethod
    def blank(table: DrawTable, rows: int, steps: int, device: torch.device) -> LoopDraws:
        """For tables of the same kinds, without edited scores, of up to `rows` rows; others take their likeliest."""
        words = torch.zeros(rows * (RECORD_WORDS + 2), dtype=torch.int32, device=device)
        keys = torch.zeros((steps, rows), dtype=torch.int64, device=device)
        return LoopDraws(replace(table, words=words, rows=rows), keys, keys.new_zeros(rows))

    def fill(self, table: DrawTable, keys: Tensor) -> None:
        """A table, and the keys of the steps that it is for, [steps, rows]."""
        own, words, (steps, rows) = self.table.words, table.to(self.keys.device).words, keys.shape
        own.zero_()
        own[: 2 * rows] = words[: 2 * rows]
        first, count = 2 * self.table.rows, rows * RECORD_WORDS
        own[first : first + count] = words[2 * rows : 2 * rows + count]
        self.keys[:steps, :rows] = keys.to(self.keys.device)
        self.step.zero_()
