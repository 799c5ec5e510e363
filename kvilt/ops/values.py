"""The values that operations take and give: shapes of pages, where rows find their KV, masks, rotations, weights.

Plain tensors, page ids and numbers; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..quant.tensor import Weight
from .kv_dtypes import KVDtype

# "swiglu_oai" is that of gpt-oss: gate and up are clamped, and 1 is added to up. "relu2" is the square of relu.
Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai", "tanh", "relu2", "relu"]
Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in a layout of one backend's own."""

    kind: str
    shape: tuple[int, ...]  # [outputs, inputs]
    data: Tensor  # uint8
    handle: Any  # what the backend's kernels know it by

    @property
    def nbytes(self) -> int:
        return self.data.numel()


_NO_SCALES = torch.empty(0)  # of dtypes without scales

# What a backend multiplies with, and a map: a weight [out, in] and perhaps a bias [out].
Prepared: TypeAlias = Weight | PackedWeight
LinearMap: TypeAlias = tuple[Prepared, Tensor | None]
# A root-mean-square norm: its weight and its epsilon.
RmsNorm: TypeAlias = tuple[Tensor, float]


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page of a layer group holds: `page_tokens` tokens of every layer of the group."""

    layers: int
    page_tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: KVDtype
    # Latent attention: a key goes on in its value, so that a query has numbers for both and values are stored once.
    latent: bool = False

    @property
    def query_dim(self) -> int:
        """Numbers of a query: first those for the key, then, with latent KV, those for the value."""
        return self.key_dim + self.value_dim if self.latent else self.key_dim

    @property
    def scales(self) -> int:
        """Scales that a token has in each head, for its keys and again for its values."""
        return self.dtype.scales

    @property
    def value_width(self) -> int:
        """Numbers in memory that the values of a head take: fewer than values where those are packed."""
        return self.dtype.value_width(self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in all layers of the group."""
        keys, values = self.key_dim * self.dtype.storage.itemsize, self.value_width * self.dtype.value_storage.itemsize
        return self.layers * self.kv_heads * (keys + values + 2 * self.scales * torch.float32.itemsize)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens


class PageStore(Protocol):
    """The pages of one layer group; the order of bytes inside belongs to the backend."""

    @property
    def shape(self) -> PageShape: ...


@dataclass(frozen=True, slots=True)
class RowLengths:
    """How the tokens of a step divide into rows, and how many keys each row has, its new ones included."""

    starts: tuple[int, ...]  # rows + 1 offsets: the tokens of row r are starts[r]:starts[r + 1]
    cu_seqlens: Tensor  # [rows + 1] int64, the same on the device
    seq_lens: Tensor  # [rows] int64
    max_query: int  # the most tokens of a row
    max_seq: int  # the most keys of a row
    dense: bool = False  # the tokens of each row are the last ones of its keys, none left out between them
    ends: tuple[int, ...] = ()  # `seq_lens` as plain ints, of the step as it was made

    @staticmethod
    def of(
        starts: tuple[int, ...], positions: Sequence[int], tensors: tuple[Tensor, Tensor] | None = None
    ) -> RowLengths:
        """From the plain positions of all tokens, which ascend in each row.

        `tensors` are `cu_seqlens` and `seq_lens` where they are on the device already.
        """
        ends = row_ends(starts, positions)
        cu_seqlens, seq_lens = tensors or (torch.tensor(starts), torch.tensor(ends))
        longest, furthest = max(map(int.__sub__, starts[1:], starts), default=0), max(ends, default=0)
        return RowLengths(starts, cu_seqlens, seq_lens, longest, furthest, is_dense(starts, positions), tuple(ends))

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def padded(self, more: int) -> RowLengths:
        """The same with `more` rows behind them, of one token and one key each."""
        last, ones = self.starts[-1], self.seq_lens.new_ones(more)
        return RowLengths(
            self.starts + tuple(range(last + 1, last + more + 1)),
            torch.cat([self.cu_seqlens, last + torch.cumsum(ones, 0)]),
            torch.cat([self.seq_lens, ones]),
            self.max_query,
            self.max_seq,
            self.dense,
            self.ends + (1,) * more,
        )


def row_ends(starts: Sequence[int], positions: Sequence[int]) -> list[int]:
    """How many keys each row has: those up to its last token."""
    return [positions[stop - 1] + 1 for stop in starts[1:]]


def is_dense(starts: Sequence[int], positions: Sequence[int]) -> bool:
    """Whether no row leaves out a position between its first and its last one."""
    return all(positions[b - 1] - positions[a] == b - a - 1 for a, b in pairwise(starts))


@dataclass(frozen=True, slots=True)
class Paging:
    """Where the rows of a step find and put their KV in one layer group."""

    tables: Tensor  # [rows, pages] int64, -1 where a window gave the page back
    slots: Tensor  # [tokens] int64: page * page_tokens + offset that each token writes
    lengths: RowLengths
    positions: Tensor  # [tokens] int64, each token's own position

    @property
    def starts(self) -> tuple[int, ...]:
        return self.lengths.starts


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys a query at position p sees: (p - window, p], all of 0..p when window is 0.

    Where it is `chunked`, those from the last multiple of the window on: [p // window * window, p].
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0  # 0: none; otherwise scores become cap * tanh(score / cap)
    sinks: Tensor | None = None  # float32 [heads]: a logit of each head that joins its softmax and has no value
    chunked: bool = False

    def first_seen(self, positions: Tensor) -> Tensor:
        """The oldest keys that queries at `positions` see."""
        if not self.window:
            return torch.zeros_like(positions)
        chunks = positions // self.window * self.window
        return chunks if self.chunked else (positions - self.window + 1).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's positions, shared by all layers with the same rope."""

    cos: Tensor  # [tokens, pairs]
    sin: Tensor  # [tokens, pairs]
    pairing: Pairing


@dataclass(frozen=True, slots=True, eq=False)
class NewKV:
    """Keys, not rotated yet, and values of a step's tokens [tokens, kv_heads, dim]."""

    keys: Tensor
    values: Tensor
    rotation: Rotation
    norms: tuple[RmsNorm, RmsNorm] | None = None  # of queries and keys, before they are rotated


@dataclass(frozen=True, slots=True)
class TemperatureScaling:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Tokens of a text that take a share of the change of others, the anchors, which were computed anew."""

    tokens: Tensor  # [tokens] int64: their numbers in the text
    anchors: Tensor  # [anchors] int64, likewise
    weights: Tensor  # [tokens, anchors] float32: how much each token takes of the change of each anchor


@dataclass(frozen=True, slots=True)
class KeysValues:
    """KV bytes in the canonical order, whatever order the backend keeps."""

    keys: Tensor  # [layers, tokens, kv_heads, key_dim]
    values: Tensor  # [layers, tokens, kv_heads, value_dim]
    key_scales: Tensor = _NO_SCALES  # float32 [layers, tokens, kv_heads], where the dtype has scales
    value_scales: Tensor = _NO_SCALES
