"""Decode steps that are recorded once for each number of rows and replayed with one call.

A recording reads its tokens, positions and page tables from tensors of its own; a replay fills them in and runs. The
result is the same to the bit as that of the decoder: it is the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..batch import Batch, Ids, Last, Logits, Segment
from ..kv.pool import PagePool
from ..models.decoder import Decoder
from ..models.step_adapters import StepAdapters
from ..ops.contract import Paging, Recorded, Recorder
from ..ops.lowrank import AdapterSlots

MAX_ROWS = 64  # larger steps spend their time in products, not in Python
MAX_RUN = 33  # tokens of one row with all its logits: a token and its drafts


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step and the tensors it reads."""

    ids: Tensor  # [rows]
    segment: Segment
    step_adapters: StepAdapters | None
    step: Recorded

    def fill(self, ids: Sequence[int], segment: Segment, step_adapters: StepAdapters | None) -> None:
        """Put in the tokens, positions, pages and adapters of another step."""
        self.ids.copy_(torch.tensor(ids, dtype=torch.int64))
        copy_segment(segment, self.segment)
        if self.step_adapters is not None and step_adapters is not None:
            copy_picks(step_adapters.adapter_slots, self.step_adapters.adapter_slots)


class Replay:
    """Recordings of one decoder on one pool."""

    def __init__(self, decoder: Decoder, pool: PagePool, max_context: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._width = pool.layout.pages_for(max_context)
        self._recorder: Recorder | None = decoder.ops.recorder()
        self._steps: dict[Shape, Recording] = {}
        self._greedy: dict[Shape, Recording] = {}

    def run(
        self, batch: Batch, observe: Callable[[], None], step_adapters: StepAdapters | None = None
    ) -> Logits | None:
        """The logits of a plain decode step, or of one row with drafts; None for others, which the decoder has to run.

        `observe` raises if the call was cancelled.
        """
        if (
            self._recorder is None
            or (ids := decoded_ids(batch) or run_ids(batch)) is None
            or not recordable(step_adapters)
        ):
            return None
        recording = self._known(self._steps, batch.starts, step_adapters)
        if recording is None:
            if (recording := self._record(ids, batch.segments[0], self._steps, step_adapters, greedy=False)) is None:
                return None
        else:
            recording.fill(ids, batch.segments[0], step_adapters)
            self._go(observe)
            while not recording.step.run():  # stopped: by this call's cancel, or by one that came late for the last
                self._go(observe)
        return Logits(recording.step.result.clone(), batch.starts, {}, {})

    def sample(
        self,
        batch: Batch,
        steps: int,
        ends: Sequence[Sequence[int]],
        observe: Callable[[], None],
        step_adapters: StepAdapters | None = None,
    ) -> Tensor | None:
        """Up to `steps` greedy tokens of each row, [steps, rows], from a plain decode step on; None as in `run`.

        There must be room for all of them. Stops after the first step in which a row draws one of its `ends`; a
        step without a likeliest token in some row is left out, for the caller to meet it again.
        """
        if self._recorder is None or (ids := decoded_ids(batch)) is None or not recordable(step_adapters):
            return None
        segment = batch.segments[0]
        recording = self._known(self._greedy, batch.starts, step_adapters)
        if recording is None:
            recording = self._record(ids, segment, self._greedy, step_adapters, greedy=True)
        if recording is None:
            return None
        recording.fill(ids, segment, step_adapters)
        self._go(observe)
        drawn = recording.step.loop(steps, recording.ids, ends)
        return drawn[:-1] if len(drawn) and bool((drawn[-1] < 0).any()) else drawn

    def stop(self) -> None:
        """Stop a replay between two operations, from any thread; call it after `observe` has something to raise."""
        if self._recorder is not None:
            self._recorder.stop(True)

    def _go(self, observe: Callable[[], None]) -> None:
        # In this order: a cancel that comes between the two is seen by `observe`, a later one stops the run.
        assert self._recorder is not None
        self._recorder.stop(False)
        observe()

    def _known(
        self, recordings: dict[Shape, Recording], starts: tuple[int, ...], step_adapters: StepAdapters | None
    ) -> Recording | None:
        """The recording of such a step, unless the tables of adapters have moved since."""
        found = recordings.get(shape_of(starts, step_adapters))
        if found is None or step_adapters is None or found.step_adapters is None:
            return found
        return found if found.step_adapters.tables_are(step_adapters) else None

    def _record(
        self,
        ids: Sequence[int],
        segment: Segment,
        recordings: dict[Shape, Recording],
        step_adapters: StepAdapters | None,
        greedy: bool,
    ) -> Recording | None:
        assert self._recorder is not None
        recorder, stores, size = self._recorder, self._pool.stores, self._pool.layout.page_tokens
        own_ids, own = torch.tensor(ids, dtype=torch.int64), blank_segment(segment, self._width)
        copy_segment(segment, own)
        picked = own_picks(step_adapters)

        def step() -> Tensor:
            logits = self._decoder.decode(own_ids, own, stores, picked)
            if greedy:
                recorder.advance_greedy(logits, own_ids, own.paging, size)
            return logits

        recorded = recorder.record(step)
        if recorded is None:
            self._recorder = None  # this model does something that cannot be recorded
            return None
        shape = shape_of(segment.paging[0].starts, step_adapters)
        recording = recordings[shape] = Recording(own_ids, own, picked, recorded)
        return recording


def decoded_ids(batch: Batch) -> list[int] | None:
    """The token of each row if every row is one token through the whole model to its logits."""
    if len(batch.rows) > MAX_ROWS or batch.num_tokens != len(batch.rows) or len(batch.segments) != 1:
        return None
    ids = []
    for row in batch.rows:
        source, want = row.source, row.want
        if not (isinstance(source, Ids) and isinstance(want, Last)) or row.repairs:
            return None
        ids.append(source.ids[0])
    return ids


def run_ids(batch: Batch) -> list[int] | None:
    """The tokens of a single row that wants the logits after each of them."""
    if len(batch.rows) > 1 or batch.num_tokens > MAX_RUN or len(batch.segments) != 1:
        return None
    source, want, repairs = batch.rows[0].source, batch.rows[0].want, batch.rows[0].repairs
    wants_all = isinstance(want, Last) and want.k == batch.num_tokens and not repairs
    return list(source.ids) if isinstance(source, Ids) and wants_all else None


Shape = tuple[tuple[int, ...], frozenset[str]]  # where rows start, and the kinds of maps that adapters change


def shape_of(starts: tuple[int, ...], step_adapters: StepAdapters | None) -> Shape:
    """Steps of one shape are one recording."""
    return starts, frozenset() if step_adapters is None else step_adapters.parts


def recordable(step_adapters: StepAdapters | None) -> bool:
    """Whether a step with these adapters consists of operations of the backend alone."""
    return step_adapters is None or step_adapters.is_recordable


def own_picks(step_adapters: StepAdapters | None) -> StepAdapters | None:
    """The same adapters, picked by tensors of a recording's own."""
    if step_adapters is None:
        return None
    return replace(
        step_adapters,
        adapter_slots=AdapterSlots(
            step_adapters.adapter_slots.slots.clone(), step_adapters.adapter_slots.scales.clone()
        ),
    )


def copy_picks(source: AdapterSlots, target: AdapterSlots) -> None:
    """The adapters of one step into another of the same shape."""
    target.slots.copy_(source.slots)
    target.scales.copy_(source.scales)


def blank_segment(like: Segment, width: int) -> Segment:
    """A segment of the same shape with page tables as wide as they can get."""
    positions = torch.zeros_like(like.positions)
    paging = tuple(
        Paging(torch.full((len(one.tables), width), -1), torch.zeros_like(one.slots), one.starts, positions)
        for one in like.paging
    )
    return Segment(like.start, like.stop, None, positions, paging)


def copy_segment(source: Segment, target: Segment) -> None:
    """The positions and pages of one segment into another of the same shape."""
    target.positions.copy_(source.positions)
    for one, other in zip(source.paging, target.paging, strict=True):
        other.slots.copy_(one.slots)
        other.tables[:, : one.tables.shape[1]] = one.tables
