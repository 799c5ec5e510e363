"""From the rows of a batch to a StepInput: all whole numbers of a step travel to the device in one copy."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import InputError
from ..kv.pool import PagePool
from ..kv.row_states import StateFold
from ..ops.contract import Interpolation, Paging, RowLengths, StateSlots, row_ends
from .row import Embeds, Hidden, HiddenOut, Ids, KeyMass, KVLoad, Last, Nothing, Pooled, Repair, Row, SampledIds, Score
from .step_input import InputVectors, PlacedLoad, PlacedRepair, Segment, SegmentOutputs, StepInput


class StepNumbers:
    """The whole numbers of a step, gathered into one tensor: one copy takes all of them to the device.

    Each part begins at a multiple of 16 bytes: Triton compiles a kernel again for a pointer that does not.
    """

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("q")

    def add(self, values: Iterable[int]) -> slice:
        """Where these will be."""
        start = len(self.values)
        try:
            self.values.extend(values)
        except (TypeError, OverflowError) as error:
            raise InputError(f"a token id or a position is a whole number of 64 bits ({error})") from None
        return self._since(start)

    def add_array(self, values: npt.NDArray[np.int64]) -> slice:
        """Where these will be."""
        return self.add_bytes(values.tobytes())

    def add_bytes(self, values: bytes) -> slice:
        """Where these will be, which are int64."""
        start = len(self.values)
        self.values.frombytes(values)
        return self._since(start)

    def _since(self, start: int) -> slice:
        stop = len(self.values)
        if stop % 2:
            self.values.append(0)
        return slice(start, stop)

    def to(self, device: torch.device) -> Tensor:
        host = torch.frombuffer(self.values, dtype=torch.int64) if self.values else torch.empty(0, dtype=torch.int64)
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def step_input(
    rows: Sequence[Row], starts: tuple[int, ...], pool: PagePool, folds: Sequence[StateFold] | None = None
) -> StepInput:
    """Lay out a step; the caller holds the pool's lock, so that the page tables are those it has checked.

    `folds`: for each row of a model with recurrent state, where that comes from and goes to.
    """
    layers, device, numbers = pool.layout.num_layers, pool.device, StepNumbers()
    ids, wanted = numbers.add(_plain_ids(rows)), _wanted(rows, starts, numbers)
    sampled = _sampled(rows, starts, numbers)
    spans = [(row.layers.start, min(row.layers.stop, layers)) for row in rows]
    segments = []
    for start, stop in pairwise(sorted({cut for span in spans for cut in span})):
        # Between two cuts, where some row enters or leaves, the set of rows is fixed.
        inside = [i for i, (a, b) in enumerate(spans) if a <= start and stop <= b]
        if inside:
            segments.append(_segment(start, stop, inside, rows, starts, pool, numbers, folds))
    flat = numbers.to(device)
    for source, places, origins in sampled:
        flat[ids][flat[places]] = source[flat[origins]]
    return StepInput(
        flat[ids],
        _vectors(rows, starts, device, Embeds),
        tuple(build(flat) for build in segments),
        None if wanted is None else flat[wanted],
        _vectors(rows, starts, device, Hidden),
    )


def _plain_ids(rows: Sequence[Row]) -> list[int]:
    """All ids that are plain numbers; 0 in the place of others."""
    flat: list[int] = []
    for row in rows:
        match row.source:
            case Ids(ids):
                flat += ids
            case Embeds(ids, at):
                vectors = set(at)
                flat += [0 if i in vectors else token for i, token in enumerate(ids)]
            case Hidden() | SampledIds():
                flat += [0] * len(row.positions)
    return flat


def _sampled(rows: Sequence[Row], starts: tuple[int, ...], numbers: StepNumbers) -> list[tuple[Tensor, slice, slice]]:
    """Ids that are on the device already: each tensor of them, the places in the step, and where in it they come from.

    Rows of one tensor are put in together, without reading them.
    """
    found: dict[int, tuple[Tensor, list[int], list[int]]] = {}
    for row, start, stop in zip(rows, starts, starts[1:], strict=False):
        if type(row.source) is SampledIds:
            source, at = row.source.ids, row.source.at
            _, places, origins = found.setdefault(id(source), (source, [], []))
            places += range(start, stop)
            origins += range(len(source)) if at is None else [at]
    return [(source, numbers.add(places), numbers.add(origins)) for source, places, origins in found.values()]


def _vectors(
    rows: Sequence[Row], starts: tuple[int, ...], device: torch.device, kind: type[Embeds | Hidden]
) -> InputVectors | None:
    """The vectors that sources of one kind bring."""
    if not any(type(row.source) is kind for row in rows):
        return None
    at: list[int] = []
    values: list[Tensor] = []
    for row, start, stop in zip(rows, starts, starts[1:], strict=False):
        match row.source:
            case Hidden(states) if kind is Hidden:
                at += range(start, stop)
                values.append(states.to(device))
            case Embeds(at=places, vectors=vectors) if kind is Embeds:
                at += (start + place for place in places)
                values.append(vectors.to(device))
    return InputVectors(None if at == list(range(starts[-1])) else torch.tensor(at, device=device), torch.cat(values))


def _wanted(rows: Sequence[Row], starts: tuple[int, ...], numbers: StepNumbers) -> slice | None:
    if all(type(row.want) is Last and row.want.k == len(row.positions) for row in rows):
        return None
    wanted: list[int] = []
    for row, stop in zip(rows, starts[1:], strict=True):
        if isinstance(row.want, Last):
            wanted += range(stop - row.want.k, stop)
    return numbers.add(wanted)


def _segment(
    start: int,
    stop: int,
    inside: list[int],
    rows: Sequence[Row],
    offsets: tuple[int, ...],
    pool: PagePool,
    numbers: StepNumbers,
    folds: Sequence[StateFold] | None,
) -> Callable[[Tensor], Segment]:
    """Add the numbers of a segment; what is returned makes it, once they are on the device."""
    chosen, everyone = [rows[i] for i in inside], len(inside) == len(rows)
    starts = offsets if everyone else row_starts(chosen)
    tokens = None if everyone else numbers.add(t for i in inside for t in range(offsets[i], offsets[i + 1]))
    everywhere = [p for row in chosen for p in row.positions]
    positions, own_starts = numbers.add(everywhere), numbers.add(starts)
    own_lens = numbers.add(row_ends(starts, everywhere))
    groups = [_paging(g, chosen, pool, numbers) for g in range(len(pool.layout.groups))]
    repairs = tuple(_placed(one, row, at, pool) for row, at in zip(chosen, starts, strict=False) for one in row.repairs)
    loads = [_placed_load(one, row, pool, numbers) for row in chosen for one in row.loads]
    states = None if folds is None else _state_slots(chosen, [folds[i] for i in inside], numbers)
    outputs = _outputs(chosen, starts, numbers) if stop == pool.layout.num_layers else None

    def build(flat: Tensor) -> Segment:
        lengths = RowLengths.of(starts, everywhere, (flat[own_starts], flat[own_lens]))
        at, table_rows = flat[positions], len(chosen)
        paging = tuple(Paging(flat[t].view(table_rows, -1), flat[slots], lengths, at) for t, slots in groups)
        own = None if tokens is None else flat[tokens]
        axes, placed = _rope_positions(chosen, pool.device), tuple(one(flat) for one in loads)
        folded = None if states is None else StateSlots(flat[states[0]], flat[states[1]], starts, flat[own_starts])
        wanted = None if outputs is None else outputs(flat)
        return Segment(start, stop, own, at, paging, repairs, axes, placed, folded, wanted)

    return build


def _outputs(
    rows: Sequence[Row], starts: tuple[int, ...], numbers: StepNumbers
) -> Callable[[Tensor], SegmentOutputs] | None:
    """The tokens whose outputs are used; None if all are, or if a row reads what happens inside the last layers."""
    if any(isinstance(row.want, HiddenOut | KeyMass) for row in rows):
        return None
    counts = [_wanted_tokens(row) for row in rows]
    if sum(counts) == starts[-1]:
        return None
    own = [(i, row, count) for i, (row, count) in enumerate(zip(rows, counts, strict=True)) if count]
    tokens = numbers.add(t for i, _, count in own for t in range(starts[i + 1] - count, starts[i + 1]))
    positions = [p for _, row, count in own for p in row.positions[-count:]]
    own_starts = (0, *accumulate(count for *_, count in own))
    kept, cu_seqlens = numbers.add(i for i, *_ in own), numbers.add(own_starts)
    own_lens = numbers.add(row_ends(own_starts, positions))

    def build(flat: Tensor) -> SegmentOutputs:
        lengths = RowLengths.of(own_starts, positions, (flat[cu_seqlens], flat[own_lens]))
        return SegmentOutputs(flat[tokens], flat[kept], lengths)

    return build


def _wanted_tokens(row: Row) -> int:
    """How many of a row's last tokens need the output of the last layer."""
    match row.want:
        case Nothing():
            return 0
        case Last(k):
            return k
        case Pooled(last=True):
            return 1
        case Pooled(first=first):
            return len(row.positions) - first
        case Score() | HiddenOut() | KeyMass():
            return len(row.positions)


def _state_slots(rows: Sequence[Row], folds: Sequence[StateFold], numbers: StepNumbers) -> tuple[slice, slice]:
    """Where the slots that states are read from and written to will be."""
    writes = [fold.writes.get(p + 1, -1) for row, fold in zip(rows, folds, strict=True) for p in row.positions]
    return numbers.add(fold.read for fold in folds), numbers.add(writes)


def row_starts(rows: Sequence[Row]) -> tuple[int, ...]:
    """rows + 1 offsets into the tokens of a step."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.positions))
    return tuple(starts)


def _rope_positions(rows: Sequence[Row], device: torch.device) -> Tensor | None:
    """A row without axes of its own stands at its positions on each of them."""
    if not any(row.rope_positions for row in rows):
        return None
    axes = max(len(row.rope_positions) for row in rows)
    each = [[p for row in rows for p in (row.rope_positions or [row.positions] * axes)[axis]] for axis in range(axes)]
    return torch.tensor(each, dtype=torch.int64, device=device)


def _paging(group: int, rows: list[Row], pool: PagePool, numbers: StepNumbers) -> tuple[slice, slice]:
    """Where the page tables and the slots of one group will be."""
    own, size = [row.cache.row(row.cache_row) for row in rows], pool.layout.page_tokens
    tables = [one.tables[group] for one in own]
    width = max(len(table) for table in tables)
    padded: list[int] = []
    slots: list[int] = []
    for row, one, table in zip(rows, own, tables, strict=True):
        padded += table
        padded += [-1] * (width - len(table))
        if one.states is not None and row.positions[0] < one.length:
            # Tokens that are only folded into the state again: their KV is there, perhaps in pages that others share.
            again = [p for p in row.positions if p < one.length]
            slots += [pool.dummy_pages[group] * size + p % size for p in again]
            slots += _slots(table, row.positions[len(again) :], size)
        else:
            slots += _slots(table, row.positions, size)
    return numbers.add(padded), numbers.add(slots)


def _placed(repair: Repair, row: Row, start: int, pool: PagePool) -> PlacedRepair:
    tables, device = row.cache.row(row.cache_row).tables, pool.device
    size = pool.layout.page_tokens
    slots = tuple(torch.tensor(_slots(table, repair.positions, size), device=device) for table in tables)
    positions = torch.tensor(repair.positions, dtype=torch.int64, device=device)
    own = repair.interpolation
    moved = Interpolation(own.tokens.to(device), own.anchors.to(device), own.weights.to(device))
    return PlacedRepair(start + repair.first, start + repair.stop, positions, slots, moved, repair.stored)


def _placed_load(load: KVLoad, row: Row, pool: PagePool, numbers: StepNumbers) -> Callable[[Tensor], PlacedLoad]:
    at, size = np.concatenate([np.arange(span.start, span.stop) for span in load.spans]), pool.layout.page_tokens
    tables = [np.array(table, dtype=np.int64) for table in row.cache.row(row.cache_row).tables]
    positions = numbers.add_array(at)
    slots = [numbers.add_array(table[at // size] * size + at % size) for table in tables]
    return lambda flat: PlacedLoad(flat[positions], tuple(flat[one] for one in slots), load.stored)


def _slots(table: Sequence[int], positions: Sequence[int], page_tokens: int) -> list[int]:
    """Where the tokens of one row are kept, by a page table of it."""
    return [table[p // page_tokens] * page_tokens + p % page_tokens for p in positions]
