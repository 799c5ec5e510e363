"""Row, Batch and Logits: one step of the executor as complete, frozen values.

A row is one sequence's share of a step. `Batch.of(rows)` is the only constructor and leaves nothing to fill in later.
Refuses to know requests, models and sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from .errors import InputError
from .kv.cache import KVCache
from .kv.pool import PagePool
from .kv.row import CacheRow
from .ops.contract import Interpolation, Paging

# Where a row's hidden states come from.


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Embeds:
    """Token ids with embedding rows in some places: `vectors[i]` stands at index `at[i]`."""

    ids: Sequence[int]  # the id at an embedded place is not looked at
    at: Sequence[int]
    vectors: Tensor  # [len(at), hidden]


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of a row that starts at a later layer."""

    states: Tensor  # [tokens, hidden]


@dataclass(frozen=True, slots=True)
class SampledIds:
    """Ids still on the device, so that a step can be prepared before the last one is read."""

    ids: Tensor  # [tokens] int64


Source = Ids | Embeds | Hidden | SampledIds

# What a row wants back.


@dataclass(frozen=True, slots=True)
class Nothing:
    """Only the KV."""


@dataclass(frozen=True, slots=True)
class Last:
    """Logits of the last `k` positions."""

    k: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of `targets[i]` as the token after position i, and the `top` likeliest ones."""

    targets: Sequence[int]
    top: int = 0
    ranks: bool = False  # also how many are likelier; takes a while longer


@dataclass(frozen=True, slots=True)
class HiddenOut:
    """The hidden states after the last layer of the span, and what some of its layers write, before rotation."""

    kv_layers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KeyMass:
    """Attention that each key receives from the row's tokens, for query-driven selection."""

    layers: Sequence[int] = ()  # averaged over these; over all of the span if there are none
    last: int = 0  # so many of the row's last tokens count as queries; all of them if 0


Want = Nothing | Last | Score | HiddenOut | KeyMass

# Which weights a row runs on.


@dataclass(frozen=True, slots=True)
class Base:
    """The model as it was loaded."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """The model with a loaded adapter."""

    adapter_id: int
    scale: float = 1.0
    begins: int = 0  # tokens at earlier positions run on the base model


Adapter = Base | Adapted


@dataclass(frozen=True, slots=True)
class UnrotatedKV:
    """What a layer's attention made of some tokens, before keys were rotated."""

    keys: Tensor  # [tokens, kv_heads, key_dim]
    values: Tensor  # [tokens, kv_heads, value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """KV of tokens that are not computed: what is stored of them, plus a share of the change of computed ones.

    In every layer of the row's span the backend writes it before attention reads the layer. The computed tokens are
    the row's tokens [first, stop); `interpolation` has the weights, by indices into the stored text.
    """

    positions: Sequence[int]  # in the row's cache, above its length, in reserved room, none of them the row's own
    first: int
    stop: int
    interpolation: Interpolation
    stored: Mapping[int, UnrotatedKV]  # the whole stored text, by layer


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers [start, stop); a stop past the model's end means its end."""

    start: int = 0
    stop: int = sys.maxsize


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: what enters, where it stands, how far it runs, what comes back."""

    source: Source
    positions: Sequence[int]  # ascending, at or above the cache's length, in reserved room
    cache: KVCache
    cache_row: int = 0
    layers: LayerSpan = LayerSpan()
    want: Want = Last()
    adapter: Adapter = Base()
    repairs: tuple[Repair, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRepair:
    """A row's repair on the device: where its anchors stand in the segment, and where its tokens go."""

    first: int  # of the anchors, among the segment's tokens
    stop: int
    positions: Tensor  # [tokens] int64
    slots: tuple[Tensor, ...]  # [tokens] int64, one per layer group
    interpolation: Interpolation
    stored: Mapping[int, UnrotatedKV]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of layers through which the same rows go together."""

    start: int
    stop: int
    tokens: Tensor | None  # [n] indices into the batch's tokens; None: all of them
    positions: Tensor  # [n] int64
    paging: tuple[Paging, ...]  # one per layer group
    repairs: tuple[PlacedRepair, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A cache row as it was when the batch was made."""

    row: CacheRow
    version: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, ready for the device."""

    rows: tuple[Row, ...]
    starts: tuple[int, ...]  # rows + 1 offsets into the token axis
    segments: tuple[Segment, ...]
    pool: PagePool
    held: tuple[CacheSnapshot, ...]  # what the page tables above were read from

    @staticmethod
    def of(rows: Sequence[Row]) -> Batch:
        """Check the rows against each other and their caches, and lay out the step."""
        if not rows:
            raise InputError("a batch needs at least one row")
        pool = rows[0].cache.pool
        layers = pool.layout.num_layers
        with pool.lock:  # what is checked here must still be so when the tables are read
            seen: dict[tuple[int, int], None] = {}
            for row in rows:
                _check_row(row, pool, layers)
                if (key := (id(row.cache), row.cache_row)) in seen:
                    raise InputError("two rows of a batch write to the same row of a cache")
                seen[key] = None
            held = tuple(
                CacheSnapshot(cache_row, cache_row.version) for cache_row in (r.cache.row(r.cache_row) for r in rows)
            )
            return Batch(tuple(rows), _starts(rows), _segments(rows, pool, layers), pool, held)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """For the length of a step: the pages of this batch go to no other cache, whatever happens to its own."""
        with self.pool.lease():
            if any(held.row.version != held.version for held in self.held):
                raise InputError("a cache was changed after this batch was made; make it again with Batch.of")
            yield

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class Scores:
    """What a Score row gets back."""

    logprobs: Tensor  # [targets] float32
    top_ids: Tensor  # [targets, top] int64
    top_logprobs: Tensor  # [targets, top] float32
    ranks: Tensor  # [targets] int64, 1 for the likeliest, among equals the lower id first; [0] where not wanted


@dataclass(frozen=True, slots=True)
class Logits:
    """Results of a step. Rows of `values` stand in batch order."""

    values: Tensor  # [n, vocab] float32: the wanted positions of all Last rows
    starts: tuple[int, ...]  # rows + 1 offsets into values
    scores: Mapping[int, Scores]  # by row
    hidden: Mapping[int, Tensor]  # by row, [tokens, hidden]
    kv: Mapping[int, Mapping[int, UnrotatedKV]] = field(default_factory=dict)  # by row and layer
    mass: Mapping[int, Tensor] = field(default_factory=dict)  # by row, [last position + 1] float32

    def of_row(self, row: int) -> Tensor:
        """[k, vocab] of one row."""
        return self.values[self.starts[row] : self.starts[row + 1]]


def token_count(source: Source) -> int:
    """Tokens a source stands for."""
    match source:
        case Ids(ids) | Embeds(ids=ids):
            return len(ids)
        case Hidden(states):
            return int(states.shape[0])
        case SampledIds(tensor):
            return int(tensor.shape[0])


def _check_tensors(source: Source) -> None:
    """Tensors that a caller brings: their kinds and dimensions. How wide they must be, the model knows."""
    match source:
        case Hidden(states):
            _check_vectors("hidden states", states)
        case Embeds(vectors=vectors):
            _check_vectors("embedding rows", vectors)
        case SampledIds(ids) if ids.dim() != 1 or ids.dtype != torch.int64:
            raise InputError(f"sampled ids are int64 [tokens], not {ids.dtype} {list(ids.shape)}")


def _check_vectors(what: str, vectors: Tensor) -> None:
    if vectors.dim() != 2 or not vectors.is_floating_point():
        raise InputError(f"{what} are floats [tokens, hidden], not {vectors.dtype} {list(vectors.shape)}")


def _check_row(row: Row, pool: PagePool, layers: int) -> None:
    if row.cache.pool is not pool:
        raise InputError("the caches of a batch must belong to one executor")
    _check_tensors(row.source)
    tokens = token_count(row.source)
    if tokens == 0 or tokens != len(row.positions):
        raise InputError(f"a row of {tokens} tokens cannot stand at {len(row.positions)} positions")
    if isinstance(row.source, Embeds) and len(row.source.at) != len(row.source.vectors):
        raise InputError(f"{len(row.source.vectors)} embedding rows were given for {len(row.source.at)} places")
    if isinstance(row.source, Embeds) and any(not 0 <= i < tokens for i in row.source.at):
        raise InputError("the places of embedding rows must lie inside the ids")
    if any(b <= a for a, b in pairwise(row.positions)):
        raise InputError("the positions of a row must ascend")
    if not row.cache.row(row.cache_row).writable(row.positions):
        raise InputError("a row may write only at or above its cache's length, in room that reserve() has made")
    span = row.layers
    if not 0 <= span.start < min(span.stop, layers):
        raise InputError(f"layers {span.start} to {span.stop} are not a span of this model's {layers} layers")
    if isinstance(row.source, Hidden) != (span.start > 0):
        raise InputError("a row that starts at a later layer needs Hidden states, and only such a row takes them")
    if span.stop < layers and not isinstance(row.want, Nothing | HiddenOut | KeyMass):
        raise InputError("a row that ends before the last layer has no logits; want HiddenOut, KeyMass or Nothing")
    match row.want:
        case Last(k) if not 0 < k <= tokens:
            raise InputError(f"the last {k} of {tokens} positions do not exist")
        case Score(targets) if len(targets) != tokens:
            raise InputError(f"{len(targets)} targets were given for {tokens} positions")
        case HiddenOut(wanted) | KeyMass(wanted) if any(not span.start <= i < min(span.stop, layers) for i in wanted):
            raise InputError(f"a row through layers {span.start} to {span.stop} sees nothing of layers {list(wanted)}")
    for repair in row.repairs:
        _check_repair(repair, row, layers)


def _check_repair(repair: Repair, row: Row, layers: int) -> None:
    if not 0 <= repair.first < repair.stop <= len(row.positions):
        raise InputError(f"tokens {repair.first} to {repair.stop} are no part of a row of {len(row.positions)} tokens")
    tokens, anchors = len(repair.positions), repair.stop - repair.first
    if len(repair.interpolation.tokens) != tokens or repair.interpolation.weights.shape != (tokens, anchors):
        raise InputError(f"a repair of {tokens} tokens by {anchors} needs a weight for each pair of them")
    if any(b <= a for a, b in pairwise(repair.positions)) or not set(repair.positions).isdisjoint(row.positions):
        raise InputError("the positions of repaired tokens must ascend, and be none of the row's own")
    if not row.cache.row(row.cache_row).writable(repair.positions):
        raise InputError("a row may repair only at or above its cache's length, in room that reserve() has made")
    missing = [i for i in range(row.layers.start, min(row.layers.stop, layers)) if i not in repair.stored]
    if missing:
        raise InputError(f"a repair needs the stored KV of every layer of its row; layers {missing} are missing")


def _starts(rows: Sequence[Row]) -> tuple[int, ...]:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.positions))
    return tuple(starts)


def _segments(rows: Sequence[Row], pool: PagePool, layers: int) -> tuple[Segment, ...]:
    """Cut the layers where some row enters or leaves; between two cuts the set of rows is fixed."""
    spans = [(row.layers.start, min(row.layers.stop, layers)) for row in rows]
    cuts = sorted({cut for span in spans for cut in span})
    segments = []
    for start, stop in pairwise(cuts):
        inside = [i for i, (a, b) in enumerate(spans) if a <= start and stop <= b]
        if inside:
            segments.append(_segment(start, stop, inside, rows, pool))
    return tuple(segments)


def _segment(start: int, stop: int, inside: list[int], rows: Sequence[Row], pool: PagePool) -> Segment:
    chosen = [rows[i] for i in inside]
    positions = torch.tensor([p for row in chosen for p in row.positions], dtype=torch.int64, device=pool.device)
    tokens = None
    if len(inside) < len(rows):
        offsets = _starts(rows)
        tokens = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in inside]).to(pool.device)
    starts = _starts(chosen)
    paging = tuple(_paging(g, chosen, starts, positions, pool) for g in range(len(pool.layout.groups)))
    repairs = tuple(_placed(one, row, at, pool) for row, at in zip(chosen, starts, strict=False) for one in row.repairs)
    return Segment(start, stop, tokens, positions, paging, repairs)


def _placed(repair: Repair, row: Row, start: int, pool: PagePool) -> PlacedRepair:
    tables, size = row.cache.row(row.cache_row).tables, pool.layout.page_tokens
    slots = tuple(
        torch.tensor([table[p // size] * size + p % size for p in repair.positions], device=pool.device)
        for table in tables
    )
    positions = torch.tensor(repair.positions, dtype=torch.int64, device=pool.device)
    own, device = repair.interpolation, pool.device
    moved = Interpolation(own.tokens.to(device), own.anchors.to(device), own.weights.to(device))
    return PlacedRepair(start + repair.first, start + repair.stop, positions, slots, moved, repair.stored)


def _paging(group: int, rows: list[Row], starts: tuple[int, ...], positions: Tensor, pool: PagePool) -> Paging:
    tables = [row.cache.row(row.cache_row).tables[group] for row in rows]
    width, size = max(len(table) for table in tables), pool.layout.page_tokens
    padded = torch.tensor([table + [-1] * (width - len(table)) for table in tables], device=pool.device)
    # In Python rather than in torch: a decode step has a few numbers here, and a dozen operations would take longer.
    slots = [table[p // size] * size + p % size for row, table in zip(rows, tables, strict=True) for p in row.positions]
    return Paging(padded, torch.tensor(slots, device=pool.device), starts, positions)
