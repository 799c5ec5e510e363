"""StepInput: a step as the device needs it, and nothing else.

Tensors on the pool's device, and plain ints where a kernel's launch depends on them. It knows no cache and no row's
owner; a captured graph reads only these buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.contract import Interpolation, Paging, RowLengths, StateSlots
from .row import UnrotatedKV


@dataclass(frozen=True, slots=True, eq=False)
class InputVectors:
    """Tokens that enter as vectors instead of ids: embedding rows, or hidden states of rows that start later."""

    at: Tensor | None  # [n] int64, indices into the step's tokens; None: all of them
    values: Tensor  # [n, hidden], or whatever a token has between two layers


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRepair:
    """A row's repair on the device: where its anchors stand in the segment, and where its tokens go."""

    first: int  # of the anchors, among the segment's tokens
    stop: int
    positions: Tensor  # [tokens] int64
    slots: tuple[Tensor, ...]  # [tokens] int64, one per layer group
    interpolation: Interpolation
    stored: Mapping[int, UnrotatedKV]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedLoad:
    """A row's load on the device: where its tokens go. The KV itself is still on the host."""

    positions: Tensor  # [tokens] int64, span after span
    slots: tuple[Tensor, ...]  # [tokens] int64, one per layer group
    stored: Mapping[int, Sequence[UnrotatedKV]]


@dataclass(frozen=True, slots=True)
class SegmentOutputs:
    """The tokens whose last hidden states are used: the last few of some rows, or none."""

    tokens: Tensor  # [n] int64, indices into the segment's tokens
    rows: Tensor  # [rows] int64, those of the segment that have such tokens
    lengths: RowLengths  # of these rows, with these tokens alone


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of layers through which the same rows go together."""

    start: int
    stop: int
    tokens: Tensor | None  # [n] indices into the step's tokens; None: all of them
    positions: Tensor  # [n] int64
    paging: tuple[Paging, ...]  # one per layer group
    repairs: tuple[PlacedRepair, ...] = ()
    rope_positions: Tensor | None = None  # [axes, n] int64, where some row rotates by several axes
    loads: tuple[PlacedLoad, ...] = ()
    states: StateSlots | None = None  # of models with recurrent state
    outputs: SegmentOutputs | None = None  # of the last segment, unless the outputs of all tokens are used

    @property
    def rotated_by(self) -> Tensor:
        """The positions that rotation takes: [n], or [axes, n]."""
        return self.positions if self.rope_positions is None else self.rope_positions

    @property
    def lengths(self) -> RowLengths:
        """How the tokens divide into rows; the same in every group."""
        return self.paging[0].lengths

    def wanted(self, outputs: SegmentOutputs) -> Segment:
        """Only the tokens whose outputs are used. They read KV that all tokens have written."""
        tokens, positions = outputs.tokens, self.positions[outputs.tokens]
        paging = [
            Paging(one.tables[outputs.rows], one.slots[tokens], outputs.lengths, positions) for one in self.paging
        ]
        axes = None if self.rope_positions is None else self.rope_positions[:, tokens]
        return Segment(self.start, self.stop, tokens, positions, tuple(paging), rope_positions=axes)


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """All rows of a step, one after the other."""

    ids: Tensor  # [tokens] int64; 0 where a vector enters
    vectors: InputVectors | None  # embedding rows
    segments: tuple[Segment, ...]
    wanted: Tensor | None  # [n] int64: tokens whose logits are wanted; None: all of them
    hidden: InputVectors | None = None  # the same for hidden states

    def blank(self, width: int, dummy_pages: Sequence[int], page_tokens: int) -> StepInput:
        """Buffers for steps of this shape, with page tables of `width` pages. For one segment, without vectors.

        Every row of them stands at position 0 of a page of each group that no cache owns.
        """
        (segment,) = self.segments
        positions = torch.zeros_like(segment.positions)
        lengths = replace(segment.lengths, **{name: getattr(segment.lengths, name).clone() for name in _DEVICE_LENGTHS})
        lengths.seq_lens.fill_(1)
        paging = tuple(
            Paging(
                one.tables.new_full((len(one.tables), width), page),
                torch.full_like(one.slots, page * page_tokens),
                lengths,
                positions,
            )
            for one, page in zip(segment.paging, dummy_pages, strict=True)
        )
        states = None
        if (own := segment.states) is not None:  # such rows start from zeros and leave no state behind
            gone = (torch.full_like(own.reads, -1), torch.full_like(own.writes, -1))
            states = StateSlots(*gone, own.starts, lengths.cu_seqlens)
        ids = torch.zeros_like(self.ids)
        blank = Segment(segment.start, segment.stop, None, positions, paging, states=states)
        return StepInput(ids, None, (blank,), None)

    def copy_from(self, other: StepInput) -> None:
        """Fill these buffers with another step of the same shape, or their first rows with one of fewer rows.

        A step of fewer rows has one token in each.
        """
        (own,), (theirs,) = self.segments, other.segments
        tokens, rows = len(other.ids), theirs.lengths.rows
        self.ids[:tokens] = other.ids
        own.positions[:tokens] = theirs.positions
        own.lengths.cu_seqlens[: rows + 1] = theirs.lengths.cu_seqlens
        own.lengths.seq_lens[:rows] = theirs.lengths.seq_lens
        for mine, one in zip(own.paging, theirs.paging, strict=True):
            mine.slots[:tokens] = one.slots
            mine.tables[:rows, : one.tables.shape[1]] = one.tables
        if own.states is not None and theirs.states is not None:
            own.states.reads[:rows] = theirs.states.reads
            own.states.writes[:tokens] = theirs.states.writes

    def copy_rows(self, other: StepInput, first: int) -> None:
        """Fill the rows from `first` on with those of other buffers of this shape; each has one token."""
        (own,), (theirs,) = self.segments, other.segments
        self.ids[first:] = other.ids[first:]
        own.positions[first:] = theirs.positions[first:]
        own.lengths.seq_lens[first:] = theirs.lengths.seq_lens[first:]
        for mine, one in zip(own.paging, theirs.paging, strict=True):
            mine.slots[first:] = one.slots[first:]
            mine.tables[first:] = one.tables[first:]
        if own.states is not None and theirs.states is not None:
            own.states.reads[first:] = theirs.states.reads[first:]
            own.states.writes[first:] = theirs.states.writes[first:]

    def of_all_tokens(self) -> StepInput:
        """The same step with all tokens through all layers, whether their outputs are used or not."""
        return replace(self, segments=tuple(replace(one, outputs=None) for one in self.segments))

    @property
    def only_ids(self) -> bool:
        """Whether all tokens enter as ids."""
        return self.vectors is None and self.hidden is None

    def padded(self, rows: int, dummy_pages: Sequence[int], page_tokens: int) -> StepInput:
        """The same step with one-token rows behind it, `rows` in all, so that few shapes of graphs serve all steps.

        They stand at position 0 of a page of each group that no cache owns. Results of the own rows do not change.
        For steps of one segment in which every token's logits are wanted.
        """
        (segment,) = self.segments
        more = rows - segment.lengths.rows
        if more < 0 or not self.only_ids or self.wanted is not None or segment.repairs or segment.loads:
            raise InputError(f"this step cannot be padded to {rows} rows")
        positions = _longer(segment.positions, more)
        lengths = segment.lengths.padded(more)
        slots = [
            _longer(one.slots, more, page * page_tokens) for one, page in zip(segment.paging, dummy_pages, strict=True)
        ]
        tables = [_dummy_rows(one.tables, more, page) for one, page in zip(segment.paging, dummy_pages, strict=True)]
        paging = tuple(Paging(*each, lengths, positions) for each in zip(tables, slots, strict=True))
        axes = None if segment.rope_positions is None else _longer(segment.rope_positions, more)
        states = None
        if (own := segment.states) is not None:
            slots_of_states = (_longer(own.reads, more, -1), _longer(own.writes, more, -1))
            states = StateSlots(*slots_of_states, lengths.starts, lengths.cu_seqlens)
        padded = Segment(segment.start, segment.stop, None, positions, paging, (), axes, (), states)
        return StepInput(_longer(self.ids, more), None, (padded,), None)


_DEVICE_LENGTHS = ("cu_seqlens", "seq_lens")


def _longer(x: Tensor, more: int, value: int = 0) -> Tensor:
    """More places at the end of the last axis."""
    return torch.cat([x, x.new_full((*x.shape[:-1], more), value)], dim=-1)


def _dummy_rows(tables: Tensor, more: int, page: int) -> Tensor:
    """More rows, each with one page."""
    extra = tables.new_full((more, tables.shape[1]), -1)
    extra[:, 0] = page
    return torch.cat([tables, extra])
