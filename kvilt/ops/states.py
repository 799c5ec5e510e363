"""Recurrent state of layers: where it is kept, and how a step reads and replaces it.

A state is never changed in place: a step reads one slot of a row and writes others. Plain tensors on any device; the
numbers are float32 on every backend, because a state sums over all tokens before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .host_copies import HostCopies, HostCopy
from .kv_dtypes import FLOAT32
from .values import KeysValues, PageShape


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one slot holds of every layer of a group; an extent of 0 means that there is none."""

    layers: int
    tail: tuple[int, int]  # [channels, inputs]: the last inputs of a causal convolution
    memory: tuple[int, int, int]  # [heads, key_dim, value_dim]: what the tokens so far are folded into

    @property
    def page(self) -> PageShape:
        """A slot as a page of one token with one head: its tail stands for the key, its memory for the value."""
        return PageShape(self.layers, 1, 1, math.prod(self.tail), math.prod(self.memory), FLOAT32)

    @property
    def slot_bytes(self) -> int:
        return self.page.page_bytes


@dataclass(frozen=True, slots=True)
class StateStore:
    """The slots of one pool."""

    shape: StateShape
    tails: Tensor  # [layers, slots, channels, inputs] float32
    memories: Tensor  # [layers, slots, heads, key_dim, value_dim] float32

    @staticmethod
    def empty(shape: StateShape, slots: int, device: torch.device) -> StateStore:
        """Room for so many slots; their content is noise until written."""
        extents = (shape.layers, slots)
        tails, memories = (torch.empty((*extents, *part), device=device) for part in (shape.tail, shape.memory))
        return StateStore(shape, tails, memories)

    def read(self, slots: Tensor, copies: HostCopies) -> HostCopy:
        """The states in `slots` in canonical order, perhaps still on their way to the host; see `KeysValues`."""
        flat = [part[:, slots].flatten(2).unsqueeze(2) for part in (self.tails, self.memories)]
        return copies.download(flat)

    def write(self, slots: Tensor, states: KeysValues, copies: HostCopies) -> None:
        """The inverse of `read`."""
        for tails, memories in copies.uploads([[states.keys, states.values]]):
            self.tails[:, slots] = tails.view(self.shape.layers, len(slots), *self.shape.tail)
            self.memories[:, slots] = memories.view(self.shape.layers, len(slots), *self.shape.memory)


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Which states the rows of a step start from, and which ones they leave behind."""

    reads: Tensor  # [rows] int64: the slot that a row starts from; -1: it starts at position 0, from zeros
    writes: Tensor  # [tokens] int64: the slot that the state after this token goes to; -1: it is not kept
    starts: tuple[int, ...]  # rows + 1 offsets: the tokens of row r are starts[r]:starts[r + 1]
    cu_seqlens: Tensor | None = None  # [rows + 1] int64, the same on the device, where it is there already
