"""The operations a backend provides, and the few values they exchange.

Refuses to know models, caches and requests: an operation sees tensors, page ids and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ..quant.formats import Format
from ..quant.tensor import Weight
from .kv_dtypes import KVDtype
from .lowrank import AdapterSlots, LowRank, LowRankTable

Activation = Literal["silu", "gelu_tanh", "gelu"]
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
    value_dim: int  # 0 where values are part of the keys (latent attention)
    dtype: KVDtype

    @property
    def scales(self) -> int:
        """Scales that a token has in each head, for its keys and again for its values."""
        return self.dtype.scales

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in all layers of the group."""
        numbers = (self.key_dim + self.value_dim) * self.dtype.storage.itemsize
        return self.layers * self.kv_heads * (numbers + 2 * self.scales * torch.float32.itemsize)

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
    def of(starts: tuple[int, ...], positions: Sequence[int], device: torch.device | None = None) -> RowLengths:
        """From the plain positions of all tokens, which ascend in each row."""
        seq_lens = [positions[stop - 1] + 1 for stop in starts[1:]]
        return RowLengths(
            starts,
            torch.tensor(starts, device=device),
            torch.tensor(seq_lens, device=device),
            max(map(int.__sub__, starts[1:], starts)),
            max(seq_lens),
            is_dense(starts, positions),
            tuple(seq_lens),
        )

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
    """Which keys a query at position p sees: (p - window, p], all of 0..p when window is 0."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0  # 0: none; otherwise scores become cap * tanh(score / cap)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's positions, shared by all layers with the same rope."""

    cos: Tensor  # [tokens, pairs]
    sin: Tensor  # [tokens, pairs]
    pairing: Pairing


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


class Recorded(Protocol):
    """A step that can be run again: the same operations on the same tensors, whose contents may have changed."""

    @property
    def result(self) -> Tensor:
        """What the step returned; each run writes it anew, and so may runs of other recordings."""
        ...

    def run(self) -> bool:
        """Run again; False if it was stopped half way."""
        ...

    def loop(self, steps: int, ids: Tensor, ends: Sequence[Sequence[int]]) -> Tensor:
        """Run up to `steps` times a step that ended with `advance_greedy`; the tokens after each run, [runs, rows].

        Stops after a run in which a row drew one of its `ends` or, as -1, no token at all.
        """
        ...


class Recorder(Protocol):
    """Records steps. What it holds between runs is memory, never state."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest step worth recording: larger ones spend their time in products, not in launches."""
        ...

    def record(self, step: Callable[[], Tensor]) -> Recorded | None:
        """Run `step` and remember what it did; None if it did something that cannot be remembered."""
        ...

    def advance_greedy(self, logits: Tensor, ids: Tensor, paging: Sequence[Paging], page_tokens: int) -> None:
        """Inside a step: put the likeliest token of each row into `ids` and move each row one position on.

        That is its position and its slots, and its length (`seq_lens`) where the backend's kernels read it.
        """
        ...

    def stop(self, stopped: bool) -> None:
        """Stop what runs now, from any thread, and refuse to run until told otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Draws:
    """How some rows draw their tokens; one entry of each for each row. What is off has its neutral value."""

    rows: Sequence[int]  # which rows of the logits
    keys: Sequence[int]  # of each row's noise, signed 64 bits
    temperatures: Sequence[float]
    top_k: Sequence[int]  # 0: off
    top_p: Sequence[float]  # 1: off
    min_p: Sequence[float]  # 0: off
    typical_p: Sequence[float]  # 1: off


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one token a row, and the likeliest ones. NaN and rank 0 where a row has no largest logit."""

    logprobs: Tensor  # [rows] float32
    ranks: Tensor  # [rows] int64, 1 for the likeliest; among equals the lower id comes first
    top_ids: Tensor  # [rows, top] int64, likeliest first
    top_logprobs: Tensor  # [rows, top] float32


class Reductions(Protocol):
    """What sampling does to whole rows of float32 logits [rows, vocab], contiguous on the CPU; none is written to."""

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's first largest id and its logit; the first NaN where there is one."""
        ...

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """A token for each of the draws, -1 where the largest score is no number [draws]."""
        ...

    def kept(self, logits: Tensor, draws: Draws) -> Tensor:
        """The tokens that each draw chooses among, bool [draws, vocab]."""
        ...

    def logprobs(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> RowLogprobs:
        """Of `tokens` in `rows`, one each, under the raw logits; `top` is at most the vocabulary."""
        ...


class Ops(Protocol):
    """A backend on one device. Every method is pure except those that write pages.

    Activations enter and leave in `dtype`. Norm weights, angles and scales are float32.
    """

    @property
    def name(self) -> str: ...

    @property
    def numerics(self) -> str:
        """Names everything that decides the bits of a result: backend, instruction set, revision."""
        ...

    @property
    def device(self) -> torch.device:
        """Where weights, pages and activations are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What activations are kept in between two operations."""
        ...

    @property
    def kv_dtype(self) -> KVDtype:
        """What this backend keeps KV in unless it is told otherwise."""
        ...

    @property
    def reductions(self) -> Reductions | None:
        """What this backend does for sampling; None where plain torch has to."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Held while a call runs: keeps other pools of threads off the cores this backend uses."""
        ...

    def recorder(self) -> Recorder | None:
        """What records steps of this backend, if it can."""
        ...

    def expands(self, format_: Format) -> bool:
        """Whether `prepare` turns packed weights of this format into float32, since there are no kernels for it."""
        ...

    def prepare(self, weight: Weight) -> Prepared:
        """Bring a weight to this backend's device, in the form it multiplies with, once, at load."""
        ...

    def embed(self, table: Prepared, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of `table` [vocab, hidden] for `ids` [tokens], times `scale`, in this backend's dtype."""
        ...

    def linear(self, x: Tensor, weight: Prepared, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """`x` [tokens, in] times `weight` [out, in] transposed, plus `bias` [out], plus `residual` [tokens, out].

        May use the memory of `residual`, which the caller does not need any more.
        """
        ...

    def linears(self, x: Tensor, maps: Sequence[LinearMap], norm: RmsNorm | None = None) -> list[Tensor]:
        """Several linear maps of the same input, which a backend then has to look at only once.

        With a norm, the input is normalized first, as by `rms_norm`.
        """
        ...

    def gate_up(
        self, x: Tensor, gate: LinearMap, up: LinearMap, activation: Activation, norm: RmsNorm | None = None
    ) -> Tensor:
        """activation(gate(x)) * up(x), of the normalized input where there is a norm."""
        ...

    def act_mul(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, to the same bits as by `gate_up`."""
        ...

    def prepare_low_rank(self, product: LowRank) -> LowRank:
        """Bring an adapter's product into the form this backend multiplies with, once, at load."""
        ...

    def new_table(self, outputs: int, inputs: int, slots: int) -> LowRankTable:
        """Room for the products of one linear map [outputs, inputs]."""
        ...

    def adapt(
        self, x: Tensor, tables: Sequence[LowRankTable], outs: Sequence[Tensor], adapter_slots: AdapterSlots
    ) -> None:
        """Add to each of `outs` [tokens, out], in place, what each token's slot of its table makes of `x` [tokens, in].

        One gathered product for all tokens and adapters; a token with slot -1 keeps its bits.
        """
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of two tensors of one shape."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis, times `weight`."""
        ...

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotary embedding of `x` [tokens, heads, dim]; dims past 2 * pairs pass through."""
        ...

    def rotation(self, positions: Tensor, inv_freq: Tensor, mscale: float, pairing: Pairing) -> Rotation:
        """Cosines and sines of `positions` [tokens] times `inv_freq` [pairs], times `mscale`."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap); may use the memory of `x`."""
        ...

    def attention(self, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask) -> Tensor:
        """Attention of `query` [tokens, heads, dim] over the pages of each token's row, by position."""
        ...

    def key_mass(
        self, query: Tensor, store: PageStore, layer: int, table: Tensor, positions: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attention that each key of one row receives from `query` [tokens, heads, dim] at `positions`.

        Summed over queries, averaged over heads: float32 [last position + 1]. `table` [pages] is the row's.
        """
        ...

    def new_pages(self, shape: PageShape, pages: int, device: torch.device) -> PageStore:
        """Room for `pages` pages; their content is noise until written."""
        ...

    def write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Put `keys` and `values` [tokens, kv_heads, dim] of one layer into `slots`, in the store's dtype.

        With a rotation the keys come unrotated and are rotated here, to the same bits as by `rotate`: this is how a
        stored chunk is placed at any position.
        """
        ...

    def rotate_and_write(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """`rotate` of `query`, and `write` of the others with that rotation."""
        ...

    def interpolate(
        self,
        store: PageStore,
        layer: int,
        slots: Tensor,
        interpolation: Interpolation,
        kept: tuple[Tensor, Tensor],
        fresh: tuple[Tensor, Tensor],
        rotation: Rotation | None = None,
    ) -> None:
        """Put keys and values of its tokens into `slots`, as `write` does: `kept`, plus a share of the anchors' change.

        `kept` are keys and values of the whole text [tokens, kv_heads, dim], `fresh` those of the anchors.
        """
        ...

    def copy_pages(self, source: PageStore, sources: list[int], target: PageStore, targets: list[int]) -> None:
        """Copy whole pages, all layers; the two stores may belong to different pools."""
        ...

    def read_slots(self, store: PageStore, slots: Tensor) -> KeysValues:
        """The KV in `slots`, all layers, in canonical order on the CPU."""
        ...

    def write_slots(self, store: PageStore, slots: Tensor, kv: KeysValues) -> None:
        """The inverse of `read_slots`."""
        ...
