"""What some rows want to see of the layers they go through: keys and values before rotation, attention on keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from ..batch import HiddenOut, KeyMass, LayerSpan, Segment, StepInput, UnrotatedKV, Want
from ..ops.contract import AttentionMask, Ops, PageStore, Paging, StateStore
from .split import ModelShare


class DecoderRow(Protocol):
    """What the decoder needs to know of a row besides its tensors."""

    @property
    def layers(self) -> LayerSpan: ...

    @property
    def want(self) -> Want: ...


class DecoderPages(Protocol):
    """Where KV and states are."""

    @property
    def stores(self) -> tuple[PageStore, ...]: ...

    @property
    def state_store(self) -> StateStore | None: ...


class DecoderBatch(Protocol):
    """A step as the decoder takes it: a `Batch`, or what another rank sent of one."""

    @property
    def rows(self) -> Sequence[DecoderRow]: ...

    @property
    def starts(self) -> tuple[int, ...]: ...

    @property
    def step(self) -> StepInput: ...

    @property
    def pool(self) -> DecoderPages: ...


@dataclass(slots=True)
class TapResults:
    """All that was seen in one forward."""

    kv: dict[int, dict[int, UnrotatedKV]] = field(default_factory=dict)  # by row and layer
    mass: dict[int, Tensor] = field(default_factory=dict)  # by row
    queries: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by row and layer


@dataclass(frozen=True, slots=True)
class TappedRow:
    """A row that wants to see a layer: its place in the batch and in the segment, and its share of an average."""

    row: int
    place: int
    share: float = 1.0
    last: int = 0  # tokens that count, from its end; all if 0


@dataclass(frozen=True, slots=True)
class LayerTap:
    """The rows that want to see one layer."""

    layer: int
    writing: Sequence[TappedRow]
    querying: Sequence[TappedRow]
    attending: Sequence[TappedRow]
    starts: tuple[int, ...]  # of the segment's rows
    seen: TapResults
    share: ModelShare | None = None  # where ranks have parts of the heads

    def written(self, keys: Tensor, values: Tensor) -> None:
        for one in self.writing:
            span = slice(self.starts[one.place], self.starts[one.place + 1])
            own_keys, own_values = (self._heads(part[span], "kv") for part in (keys, values))
            self.seen.kv.setdefault(one.row, {})[self.layer] = UnrotatedKV(own_keys, own_values)

    def _heads(self, own: Tensor, kind: Literal["query", "kv"]) -> Tensor:
        """A copy, since the backend uses this memory again: of all heads, whichever rank has them."""
        return own.clone() if self.share is None else self.share.gather_heads(own.clone(), self.layer, kind)

    def attended(
        self, ops: Ops, query: Tensor, store: PageStore, layer: int, paging: Paging, mask: AttentionMask
    ) -> None:
        for one in self.querying:
            span = slice(self.starts[one.place], self.starts[one.place + 1])
            self.seen.queries.setdefault(one.row, {})[self.layer] = self._heads(query[span], "query")
        for one in self.attending:
            start, stop = self.starts[one.place], self.starts[one.place + 1]
            span = slice(max(start, stop - one.last) if one.last else start, stop)
            mass = ops.key_mass(query[span], store, layer, paging.tables[one.place], paging.positions[span], mask)
            if self.share is not None:
                mass = self.share.mean_over_heads(mass, self.layer)
            mass *= one.share
            self.seen.mass[one.row] = self.seen.mass[one.row] + mass if one.row in self.seen.mass else mass


def layer_taps(
    batch: DecoderBatch, layers: int, seen: TapResults, share: ModelShare | None = None
) -> list[dict[int, LayerTap]]:
    """For each layer of each segment, the rows that want to see it; layers without such rows are left out."""
    if not any(isinstance(row.want, HiddenOut | KeyMass) for row in batch.rows):
        return []
    return [_segment_taps(batch, segment, layers, seen, share) for segment in batch.step.segments]


def _segment_taps(
    batch: DecoderBatch, segment: Segment, layers: int, seen: TapResults, share: ModelShare | None
) -> dict[int, LayerTap]:
    inside = [
        i
        for i, row in enumerate(batch.rows)
        if row.layers.start <= segment.start and segment.stop <= min(row.layers.stop, layers)
    ]
    taps = {}
    for layer in range(segment.start, segment.stop):
        writing = [TappedRow(i, n) for n, i in enumerate(inside) if layer in _written(batch.rows[i])]
        querying = [TappedRow(i, n) for n, i in enumerate(inside) if layer in _queried(batch.rows[i])]
        wanted = [(i, n, _attended(batch.rows[i], layers)) for n, i in enumerate(inside)]
        attending = [TappedRow(i, n, 1 / len(span), _last(batch.rows[i])) for i, n, span in wanted if layer in span]
        if writing or querying or attending:
            taps[layer] = LayerTap(layer, writing, querying, attending, segment.lengths.starts, seen, share)
    return taps


def _written(row: DecoderRow) -> Sequence[int]:
    return row.want.kv_layers if isinstance(row.want, HiddenOut) else ()


def _queried(row: DecoderRow) -> Sequence[int]:
    return row.want.query_layers if isinstance(row.want, HiddenOut) else ()


def _last(row: DecoderRow) -> int:
    return row.want.last if isinstance(row.want, KeyMass) else 0


def _attended(row: DecoderRow, layers: int) -> Sequence[int]:
    match row.want:
        case KeyMass(wanted):
            return wanted or range(row.layers.start, min(row.layers.stop, layers))
        case _:
            return ()
