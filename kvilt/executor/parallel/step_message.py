"""A step as a message: its tensors, what its rows want, and the adapters of its tokens.

Stored KV that rows bring is sent as far as the heads of the rank that gets it go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...batch import (
    HiddenOut,
    KeyMass,
    Last,
    LayerSpan,
    Nothing,
    PlacedLoad,
    PlacedRepair,
    Pooled,
    Score,
    Segment,
    SegmentOutputs,
    StepInput,
    UnrotatedKV,
    Want,
)
from ...batch.step_input import InputVectors
from ...models.split import ModelSplit
from ...models.step_adapters import StepAdapters
from ...models.tap import DecoderBatch, DecoderPages
from ...ops.contract import Interpolation, Paging, RowLengths, StateSlots
from .message import MessageReader, MessageWriter

_NOTHING, _LAST, _SCORE, _HIDDEN, _MASS, _POOLED = range(6)


@dataclass(frozen=True, slots=True)
class SentRow:
    """What a rank that follows knows of a row."""

    layers: LayerSpan
    want: Want


@dataclass(frozen=True, slots=True)
class SentAdapters:
    """The adapters of a step by slots, which are the same on all ranks."""

    parts: frozenset[str]
    slots: Tensor  # [tokens] int64
    scales: Tensor  # [tokens] float32
    embedded: tuple[tuple[int, float, Tensor], ...]  # slot, scale, tokens


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A step as another rank sent it: all that the decoder needs."""

    rows: tuple[SentRow, ...]
    starts: tuple[int, ...]
    step: StepInput
    pool: DecoderPages


def brings_kv(step: StepInput) -> bool:
    """Whether rows bring stored KV, so that ranks get different messages."""
    return any(segment.loads or segment.repairs for segment in step.segments)


def write_batch(out: MessageWriter, batch: DecoderBatch, adapters: StepAdapters | None, split: ModelSplit) -> None:
    """All of a step, for the rank that has this part of the model."""
    out.numbers(batch.starts)
    for row in batch.rows:
        out.numbers([row.layers.start, row.layers.stop])
        _write_want(out, row.want)
    step = batch.step
    out.tensor(step.ids)
    out.tensor(step.wanted)
    for vectors in (step.vectors, step.hidden):
        out.tensor(None if vectors is None else vectors.values)
        out.tensor(None if vectors is None else vectors.at)
    out.number(len(step.segments))
    for segment in step.segments:
        _write_segment(out, segment, split)
    _write_adapters(out, adapters)


def read_batch(message: MessageReader, pages: DecoderPages) -> tuple[SentBatch, SentAdapters | None]:
    """The inverse of `write_batch`."""
    starts = message.numbers()
    rows = tuple(SentRow(LayerSpan(*message.numbers()), _read_want(message)) for _ in starts[1:])
    ids, wanted = message.tensor(), message.maybe_tensor()
    vectors, hidden = _read_vectors(message), _read_vectors(message)
    segments = tuple(_read_segment(message) for _ in range(message.number()))
    step = StepInput(ids, vectors, segments, wanted, hidden)
    return SentBatch(rows, starts, step, pages), _read_adapters(message)


def _read_vectors(message: MessageReader) -> InputVectors | None:
    values, at = message.maybe_tensor(), message.maybe_tensor()
    return None if values is None else InputVectors(at, values)


def with_own_heads(batch: DecoderBatch, split: ModelSplit) -> DecoderBatch:
    """A step whose stored KV has the heads of one rank only, for the rank that has all of it."""
    if not brings_kv(batch.step):
        return batch
    table = _StoredKV()
    cut: list[UnrotatedKV] = []

    def own(layer: int, stored: UnrotatedKV) -> UnrotatedKV:
        if (index := table.index(layer, stored)) == len(cut):
            keys, values = _own_heads(layer, stored, split)
            cut.append(UnrotatedKV(keys.contiguous(), values.contiguous()))
        return cut[index]

    segments = [
        replace(
            segment,
            repairs=tuple(replace(r, stored={i: own(i, kv) for i, kv in r.stored.items()}) for r in segment.repairs),
            loads=tuple(
                replace(load, stored={i: [own(i, kv) for kv in each] for i, each in load.stored.items()})
                for load in segment.loads
            ),
        )
        for segment in batch.step.segments
    ]
    rows = tuple(SentRow(row.layers, row.want) for row in batch.rows)
    return SentBatch(rows, batch.starts, replace(batch.step, segments=tuple(segments)), batch.pool)


def _own_heads(layer: int, stored: UnrotatedKV, split: ModelSplit) -> tuple[Tensor, Tensor]:
    heads = split.heads.get(layer)
    own = slice(None) if heads is None else slice(heads.kv.start, heads.kv.stop)
    return stored.keys[:, own], stored.values[:, own]


# What rows want.


def _write_want(out: MessageWriter, want: Want) -> None:
    match want:
        case Nothing():
            out.numbers([_NOTHING])
        case Last(k):
            out.numbers([_LAST, k])
        case Score(targets):  # ranks that follow only compute the logits
            out.numbers([_SCORE, len(targets)])
        case HiddenOut(kv_layers, query_layers):
            out.numbers([_HIDDEN, len(kv_layers), *kv_layers, *query_layers])
        case KeyMass(layers, last):
            out.numbers([_MASS, last, *layers])
        case Pooled(last, first):
            out.numbers([_POOLED, int(last), first])


def _read_want(message: MessageReader) -> Want:
    kind, *rest = message.numbers()
    match kind:
        case 1:
            return Last(rest[0])
        case 2:
            return Score([0] * rest[0])
        case 3:
            return HiddenOut(rest[1 : 1 + rest[0]], rest[1 + rest[0] :])
        case 4:
            return KeyMass(rest[1:], rest[0])
        case 5:
            return Pooled(bool(rest[0]), rest[1])
        case _:
            return Nothing()


# Segments.


def _write_segment(out: MessageWriter, segment: Segment, split: ModelSplit) -> None:
    out.numbers([segment.start, segment.stop, len(segment.paging)])
    _write_lengths(out, segment.lengths)
    for tensor in (segment.tokens, segment.positions, segment.rope_positions):
        out.tensor(tensor)
    for paging in segment.paging:
        out.tensor(paging.tables)
        out.tensor(paging.slots)
    states = segment.states
    for tensor in (None, None, None) if states is None else (states.reads, states.writes, states.cu_seqlens):
        out.tensor(tensor)
    if states is not None:
        out.numbers(states.starts)
    _write_outputs(out, segment.outputs)
    _write_stored(out, segment, split)


def _read_segment(message: MessageReader) -> Segment:
    start, stop, groups = message.numbers()
    lengths = _read_lengths(message)
    tokens, positions, axes = message.maybe_tensor(), message.tensor(), message.maybe_tensor()
    paging = tuple(Paging(message.tensor(), message.tensor(), lengths, positions) for _ in range(groups))
    reads, writes, state_lens = (message.maybe_tensor() for _ in range(3))
    states = None
    if reads is not None and writes is not None:
        states = StateSlots(reads, writes, message.numbers(), state_lens)
    outputs = _read_outputs(message)
    repairs, loads = _read_stored(message, groups)
    return Segment(start, stop, tokens, positions, paging, repairs, axes, loads, states, outputs)


def _write_lengths(out: MessageWriter, lengths: RowLengths) -> None:
    out.numbers(lengths.starts)
    out.numbers(lengths.ends)
    out.numbers([lengths.max_query, lengths.max_seq, int(lengths.dense)])
    out.tensor(lengths.cu_seqlens)
    out.tensor(lengths.seq_lens)


def _read_lengths(message: MessageReader) -> RowLengths:
    starts, ends = message.numbers(), message.numbers()
    max_query, max_seq, dense = message.numbers()
    return RowLengths(starts, message.tensor(), message.tensor(), max_query, max_seq, bool(dense), ends)


def _write_outputs(out: MessageWriter, outputs: SegmentOutputs | None) -> None:
    out.tensor(None if outputs is None else outputs.tokens)
    if outputs is not None:
        out.tensor(outputs.rows)
        _write_lengths(out, outputs.lengths)


def _read_outputs(message: MessageReader) -> SegmentOutputs | None:
    if (tokens := message.maybe_tensor()) is None:
        return None
    return SegmentOutputs(tokens, message.tensor(), _read_lengths(message))


# Stored KV. Several repairs of a row read the same text, which is sent once.


class _StoredKV:
    """Each stored text of a layer once, in the order it is first met."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, int, int], int] = {}
        self.texts: list[tuple[int, UnrotatedKV]] = []

    def index(self, layer: int, stored: UnrotatedKV) -> int:
        key = (layer, stored.keys.data_ptr(), stored.values.data_ptr())
        if key not in self._at:
            self._at[key] = len(self.texts)
            self.texts.append((layer, stored))
        return self._at[key]


def _write_stored(out: MessageWriter, segment: Segment, split: ModelSplit) -> None:
    out.numbers([len(segment.repairs), len(segment.loads)])
    if not segment.repairs and not segment.loads:
        return
    table, layers = _StoredKV(), range(segment.start, segment.stop)
    # Of each repair and load: layer, how many texts, which.
    uses = [[n for i in layers for n in (i, 1, table.index(i, one.stored[i]))] for one in segment.repairs]
    for load in segment.loads:
        own = [(i, load.stored[i]) for i in layers if i in load.stored]
        uses.append([n for i, texts in own for n in (i, len(texts), *(table.index(i, one) for one in texts))])
    out.number(len(table.texts))
    for layer, stored in table.texts:
        for tensor in _own_heads(layer, stored, split):
            out.tensor(tensor)
    placed: list[PlacedRepair | PlacedLoad] = [*segment.repairs, *segment.loads]
    for one, use in zip(placed, uses, strict=True):
        out.numbers(use)
        out.tensor(one.positions)
        for slots in one.slots:
            out.tensor(slots)
    for repair in segment.repairs:
        out.numbers([repair.first, repair.stop])
        for tensor in (repair.interpolation.tokens, repair.interpolation.anchors, repair.interpolation.weights):
            out.tensor(tensor)


def _read_stored(message: MessageReader, groups: int) -> tuple[tuple[PlacedRepair, ...], tuple[PlacedLoad, ...]]:
    repairs, loads = message.numbers()
    if not repairs and not loads:
        return (), ()
    texts = [UnrotatedKV(message.tensor(), message.tensor()) for _ in range(message.number())]
    placed = [
        (_uses(message.numbers(), texts), message.tensor(), tuple(message.tensor() for _ in range(groups)))
        for _ in range(repairs + loads)
    ]
    read = []
    for stored, positions, slots in placed[:repairs]:
        first, stop = message.numbers()
        how = Interpolation(message.tensor(), message.tensor(), message.tensor())
        own = {layer: one for layer, (one,) in stored.items()}
        read.append(PlacedRepair(first, stop, positions, slots, how, own))
    return tuple(read), tuple(PlacedLoad(positions, slots, stored) for stored, positions, slots in placed[repairs:])


def _uses(numbers: Iterable[int], texts: Sequence[UnrotatedKV]) -> dict[int, list[UnrotatedKV]]:
    rest, found = iter(numbers), {}
    for layer in rest:
        found[layer] = [texts[next(rest)] for _ in range(next(rest))]
    return found


# Adapters.


def _write_adapters(out: MessageWriter, adapters: StepAdapters | None) -> None:
    out.number(0 if adapters is None else 1)
    if adapters is None:
        return
    out.text("\n".join(sorted(adapters.parts)))
    out.tensor(adapters.adapter_slots.slots)
    out.tensor(adapters.adapter_slots.scales)
    out.number(len(adapters.embedded))
    for one in adapters.embedded:
        out.number(int(adapters.adapter_slots.slots[one.tokens[0]]))
        out.real(one.scale)
        out.tensor(one.tokens)


def _read_adapters(message: MessageReader) -> SentAdapters | None:
    if not message.number():
        return None
    parts = frozenset(part for part in message.text().split("\n") if part)
    slots, scales = message.tensor(), message.tensor()
    embedded = tuple((message.number(), message.real(), message.tensor()) for _ in range(message.number()))
    return SentAdapters(parts, slots, scales, embedded)
