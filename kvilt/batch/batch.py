"""Batch: the rows of one step, checked against each other and their caches, and laid out for the device.

`Batch.of(rows)` is the only constructor and leaves nothing to fill in later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import InputError
from ..kv.pool import PagePool
from ..kv.row import CacheRow
from ..kv.row_states import RowStates, StateFold, check_fold
from .build_step import row_starts, step_input
from .decode_step import decode_step, plain_decodes
from .row import (
    TOKENS,
    Embeds,
    Hidden,
    HiddenOut,
    KeyMass,
    KVLoad,
    Last,
    LayerSpan,
    Nothing,
    Pooled,
    Repair,
    Row,
    SampledIds,
    Score,
    Source,
    is_plain_row,
    token_count,
)
from .step_input import StepInput


@dataclass(frozen=True, slots=True)
class CacheSnapshots:
    """The cache rows of a batch, and how they were when it was made."""

    rows: tuple[CacheRow, ...]
    versions: tuple[int, ...]

    @property
    def changed(self) -> bool:
        """Whether the tables of some row are others by now."""
        return any(row.version != version for row, version in zip(self.rows, self.versions, strict=True))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, and `step`, their tensors."""

    rows: tuple[Row, ...]
    starts: tuple[int, ...]  # rows + 1 offsets into the token axis
    step: StepInput
    pool: PagePool
    held: CacheSnapshots  # what the page tables above were read from

    @staticmethod
    def of(rows: Sequence[Row]) -> Batch:
        """Check the rows against each other and their caches, and lay out the step."""
        if not rows:
            raise InputError("a batch needs at least one row")
        pool = rows[0].cache.pool
        layers = pool.layout.num_layers
        with pool.lock:  # what is checked here must still be so when the tables are read
            if (decodes := plain_decodes(rows, pool)) is not None:
                held = CacheSnapshots(tuple(decodes), tuple([one.version for one in decodes]))
                return Batch(tuple(rows), tuple(range(len(rows) + 1)), decode_step(rows, decodes, pool), pool, held)
            _check_sampled([row.source for row in rows if type(row.source) is SampledIds])
            for row in rows:
                _check_row(row, pool, layers)
            own = [row.cache.row(row.cache_row) for row in rows]
            if len({id(one) for one in own}) < len(rows):
                raise InputError("two rows of a batch write to the same row of a cache")
            held = CacheSnapshots(tuple(own), tuple([one.version for one in own]))
            starts, folds = row_starts(rows), None if pool.layout.recurrent is None else _folds(rows, own)
            return Batch(tuple(rows), starts, step_input(rows, starts, pool, folds), pool, held)

    @contextmanager
    def lease(self) -> Iterator[None]:
        """For the length of a step: the pages of this batch go to no other cache, whatever happens to its own."""
        with self.pool.lease():
            if self.held.changed:
                raise InputError("a cache was changed after this batch was made; make it again with Batch.of")
            yield

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


def _folds(rows: Sequence[Row], own: Sequence[CacheRow]) -> list[StateFold]:
    """Where the recurrent state of each row comes from and goes to; one with drafts leaves a state after each."""
    folds = []
    for row, cache_row in zip(rows, own, strict=True):
        assert cache_row.states is not None
        last = row.want.k if isinstance(row.want, Last) else 1
        folds.append(cache_row.states.fold(range(row.positions[0], row.positions[-1] + 1), last))
    return folds


def _check_tensors(source: Source) -> None:
    """Tensors that a caller brings: their kinds and dimensions. How wide they must be, the model knows."""
    match source:
        case Hidden(states):
            _check_vectors("hidden states", states)
        case Embeds(vectors=vectors):
            _check_vectors("embedding rows", vectors)


def _check_sampled(sources: Sequence[SampledIds]) -> None:
    """Ids on a device; most rows have theirs from the same tensor, which is asked once."""
    sizes: dict[int, int] = {}
    for source in sources:
        ids, at = source.ids, source.at
        if (size := sizes.get(id(ids))) is None:
            if ids.dim() != 1 or ids.dtype != torch.int64:
                raise InputError(f"sampled ids are int64 [tokens], not {ids.dtype} {list(ids.shape)}")
            size = sizes[id(ids)] = len(ids)
        if at is not None and not 0 <= at < size:
            raise InputError(f"{size} sampled ids have none at {at}")


def _check_vectors(what: str, vectors: Tensor) -> None:
    if vectors.dim() != 2 or not vectors.is_floating_point():
        raise InputError(f"{what} are floats [tokens, hidden], not {vectors.dtype} {list(vectors.shape)}")


def _check_row(row: Row, pool: PagePool, layers: int) -> None:
    if row.cache.pool is not pool:
        raise InputError("the caches of a batch must belong to one executor")
    if type(row.source) not in TOKENS:
        _check_tensors(row.source)
    tokens = 1 if type(row.source) is SampledIds and row.source.at is not None else token_count(row.source)
    if tokens == 0 or tokens != len(row.positions):
        raise InputError(f"a row of {tokens} tokens cannot stand at {len(row.positions)} positions")
    if type(row.source) is Embeds:
        _check_places(row.source, tokens)
    if tokens > 1 and any(b <= a for a, b in pairwise(row.positions)):
        raise InputError("the positions of a row must ascend")
    cache_row = row.cache.row(row.cache_row)
    if cache_row.states is not None:
        _check_fold(row, cache_row.states, cache_row.length)
    elif not cache_row.writable(row.positions):
        raise InputError("a row may write only at or above its cache's length, in room that reserve() has made")
    if row.rope_positions and any(len(axis) != tokens for axis in row.rope_positions):
        raise InputError(f"a row of {tokens} tokens needs as many positions on each axis of its rotation")
    if pool.layout.bare and (row.repairs or row.loads):
        raise InputError("stored KV is not placed in a model with layers that keep none of their own")
    if tokens == 1 and is_plain_row(row):
        return  # a decode: nothing else can be wrong with it
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
        case HiddenOut(wanted, more):
            _check_seen([*wanted, *more], span, layers)
        case KeyMass(wanted):
            _check_seen(wanted, span, layers)
        case Pooled(first=first) if not 0 <= first < tokens:
            raise InputError(f"{tokens} tokens have none from {first} on")
    for repair in row.repairs:
        _check_repair(repair, row, layers)
    for load in row.loads:
        _check_load(load, row, layers)


def _check_fold(row: Row, states: RowStates, length: int) -> None:
    """A row of a model with recurrent state begins where a state is, perhaps below its cache's length."""
    check_fold(states, row.positions, length)
    if row.repairs or row.loads:
        raise InputError(
            "a model with recurrent state computes every token; stored KV of documents is not placed in it"
        )
    if not row.cache.row(row.cache_row).writable([p for p in row.positions if p >= length]):
        raise InputError("a row may write only in room that reserve() has made")


def _check_places(source: Embeds, tokens: int) -> None:
    if len(source.at) != len(source.vectors):
        raise InputError(f"{len(source.vectors)} embedding rows were given for {len(source.at)} places")
    if any(not 0 <= i < tokens for i in source.at):
        raise InputError("the places of embedding rows must lie inside the ids")


def _check_seen(wanted: Sequence[int], span: LayerSpan, layers: int) -> None:
    if any(not span.start <= i < min(span.stop, layers) for i in wanted):
        raise InputError(f"a row through layers {span.start} to {span.stop} sees nothing of layers {list(wanted)}")


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


def _check_load(load: KVLoad, row: Row, layers: int) -> None:
    cache_row = row.cache.row(row.cache_row)
    if not all(len(span) and cache_row.writable(span) for span in load.spans):
        raise InputError("stored KV is placed at or above its cache's length, in room that reserve() has made")
    if any(not row.layers.start <= i < min(row.layers.stop, layers) for i in load.stored):
        raise InputError(f"a row through layers {row.layers.start} to {row.layers.stop} loads KV of its own layers")
    sizes = [len(span) for span in load.spans]
    if any([len(one.keys) for one in stored] != sizes for stored in load.stored.values()):
        raise InputError("a load needs stored KV for each of its spans, of as many tokens")
