"""Decode steps that are recorded once for each number of rows and replayed with one call.

A recording reads its tokens, positions and page tables from tensors of its own; a replay fills them in and runs. The
result is the same to the bit as that of the decoder: it is the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ..batch import Batch, Last, Logits, StepInput
from ..kv.pool import PagePool
from ..models.decoder import Decoder
from ..models.step_adapters import StepAdapters
from ..ops.contract import Recorded, Recorder
from ..ops.draw_table import LoopDraws
from ..ops.lowrank import AdapterSlots
from ..sampling.prepare import PreparedSteps

MAX_RECORDINGS = 128  # of steps, and as many of loops; the oldest makes room
REPLAY_STEPS = 128  # the most steps between two returns to Python
MAX_RUN = 33  # tokens of one row with all its logits: a token and its drafts


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded step and the tensors it reads."""

    buffers: StepInput
    dummies: StepInput  # the same with rows that belong to no cache
    step_adapters: StepAdapters | None
    step: Recorded
    draws: LoopDraws | None = None  # of a loop whose rows draw

    def fill(self, step: StepInput, step_adapters: StepAdapters | None) -> None:
        """Put in the tokens, positions, pages and adapters of another step; dummies behind them pad it."""
        fill(self.buffers, step, self.dummies)
        if self.step_adapters is not None and step_adapters is not None:
            copy_picks(step_adapters.adapter_slots, self.step_adapters.adapter_slots)


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """Decode steps that one recording serves."""

    rows: int
    tokens: int  # the fewest of its longest row


class Replay:
    """Recordings of one decoder on one pool."""

    def __init__(self, decoder: Decoder, pool: PagePool, max_context: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._most_tokens = max_context  # of a row
        recorder = decoder.ops.recorder()
        self.note = "" if recorder is None else _why_not(recorder, decoder, pool)  # why no step is recorded
        self._recorder: Recorder | None = None if self.note else recorder
        self._steps: dict[Shape, Recording] = {}
        self._loops: dict[Shape, Recording] = {}

    @property
    def draws(self) -> bool:
        """Whether rows of `sample` may draw; otherwise all of them take their likeliest tokens."""
        return self._recorder is not None and self._recorder.draws

    def decode_sizes(self, max_rows: int) -> list[DecodeSize]:
        """The recorded decode steps of up to `max_rows` rows."""
        if self._recorder is None:
            return []
        recorder, most = self._recorder, self._most_tokens
        sizes = sorted({recorder.padded_rows(rows) for rows in range(1, min(max_rows, recorder.max_rows) + 1)})
        rooms = [(rows, recorder.room_tokens(rows, 1, most)) for rows in sizes]
        longer = [DecodeSize(rows, room + 1) for rows, room in rooms if room < most]
        return [*(DecodeSize(rows, 1) for rows in sizes), *longer]

    def run(
        self, batch: Batch, observe: Callable[[], None], step_adapters: StepAdapters | None = None
    ) -> Logits | None:
        """The logits of a plain decode step, or of one row with drafts; None for others, which the decoder has to run.

        `observe` raises if the call was cancelled.
        """
        if (
            self._recorder is None
            or not (is_decode(batch, self._recorder.max_rows) or is_verification(batch))
            or not recordable(step_adapters)
        ):
            return None
        shape = Shape.of(*self._padded(batch), step_adapters)
        recording = self._known(self._steps, shape, step_adapters)
        if recording is None:
            observe()  # recording a step runs it
            if (recording := self._record(batch.step, shape, self._steps, step_adapters)) is None:
                return None
        else:
            recording.fill(batch.step, step_adapters)
            self._go(observe)
            while not recording.step.run():  # stopped: by this call's cancel, or by one that came late for the last
                self._go(observe)
        return Logits(recording.step.result[: batch.num_tokens].clone(), batch.starts, {}, {})

    def sample(
        self,
        batch: Batch,
        steps: int,
        ends: Sequence[Sequence[int]],
        observe: Callable[[], None],
        step_adapters: StepAdapters | None = None,
        draws: PreparedSteps | None = None,
    ) -> Tensor | None:
        """Up to `steps` tokens of each row, [steps, rows], from a plain decode step on; None as in `run`.

        There must be room for all of them. Stops after the first step in which a row draws one of its `ends`; a
        step in which some row has no token to draw is left out, for the caller to meet it again.
        """
        if self._recorder is None or not is_decode(batch, self._recorder.max_rows) or not recordable(step_adapters):
            return None
        shape = Shape.of(*self._padded(batch), step_adapters, "argmax" if draws is None else draws.table.kinds)
        recording = self._known(self._loops, shape, step_adapters)
        if recording is None:
            recording = self._record(batch.step, shape, self._loops, step_adapters, draws)
        if recording is None:
            return None
        recording.fill(batch.step, step_adapters)
        if recording.draws is not None and draws is not None:
            recording.draws.fill(draws.table, draws.keys)
        self._go(observe)
        drawn = recording.step.loop(steps, recording.buffers.ids, ends)
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

    def _padded(self, batch: Batch) -> tuple[tuple[int, ...], int]:
        """Where rows start in the recording for a batch, and the pages of its tables.

        A decode step may have dummy rows behind its own.
        """
        assert self._recorder is not None
        rows, layout, tokens = len(batch.rows), self._pool.layout, self._most_tokens
        if batch.num_tokens > rows:
            return batch.starts, layout.pages_for(tokens)
        padded = self._recorder.padded_rows(rows)
        pages = max(one.tables.shape[1] for one in batch.step.segments[0].paging)
        room = self._recorder.room_tokens(padded, pages * layout.page_tokens, tokens)
        return batch.starts if padded == rows else tuple(range(padded + 1)), layout.pages_for(room)

    def _known(
        self, recordings: dict[Shape, Recording], shape: Shape, step_adapters: StepAdapters | None
    ) -> Recording | None:
        """The recording of such a step, unless the tables of adapters have moved since."""
        found = recordings.get(shape)
        if found is None or step_adapters is None or found.step_adapters is None:
            return found
        return found if found.step_adapters.tables_are(step_adapters) else None

    def _record(
        self,
        step: StepInput,
        shape: Shape,
        recordings: dict[Shape, Recording],
        step_adapters: StepAdapters | None,
        draws: PreparedSteps | None = None,
    ) -> Recording | None:
        assert self._recorder is not None
        starts, recorder, stores, size = shape.starts, self._recorder, self._pool.stores, self._pool.layout.page_tokens
        dummy_pages, own_starts = self._pool.dummy_pages, step.segments[0].lengths.starts
        padded = step if starts == own_starts else step.padded(len(starts) - 1, dummy_pages, size)
        own, dummies = (padded.blank(shape.pages, dummy_pages, size) for _ in range(2))
        picked = own_picks(step_adapters, starts[-1])
        fill(own, step, dummies)
        loop_draws = None
        if draws is not None:
            loop_draws = LoopDraws.blank(draws.table, len(starts) - 1, REPLAY_STEPS, own.ids.device)
            loop_draws.fill(draws.table, draws.keys)

        def recordable_step() -> Tensor:
            logits = self._decoder.decode(own, stores, picked, self._pool.state_store)
            if shape.loop is not None:
                recorder.advance(logits, own.ids, own.segments[0].paging, size, loop_draws)
            return logits

        recorded = recorder.record(recordable_step)
        if recorded is None:
            self._recorder = None  # this model does something that cannot be recorded
            return None
        while len(recordings) >= MAX_RECORDINGS:
            del recordings[next(iter(recordings))]
        recording = recordings[shape] = Recording(own, dummies, picked, recorded, loop_draws)
        return recording


def _why_not(recorder: Recorder, decoder: Decoder, pool: PagePool) -> str:
    """What keeps steps from being recorded.

    A device does not wait for what the host decides. It reads from a step's buffers which slots hold recurrent states;
    kernels of the host take them as plain numbers.
    """
    if decoder.share is not None:
        return "steps of a model that several ranks share are not recorded: ranks wait for each other inside of them"
    if recorder.captures and decoder.asks_the_host:
        return "steps are not captured: the host reads which experts were chosen, and launches them one by one"
    if not recorder.captures and pool.layout.recurrent is not None:
        return "steps of a model with recurrent state are not recorded: each launches its operations one by one"
    return ""


def fill(buffers: StepInput, step: StepInput, dummies: StepInput) -> None:
    """A step into buffers that may have more rows; the rows behind it become dummies."""
    rows = step.segments[0].lengths.rows
    buffers.copy_from(step)
    if rows < buffers.segments[0].lengths.rows:
        buffers.copy_rows(dummies, rows)


def is_decode(batch: Batch, max_rows: int) -> bool:
    """Whether every row is one token through the whole model to its logits."""
    if len(batch.rows) > max_rows or batch.num_tokens != len(batch.rows) or not is_plain(batch):
        return False
    return all(type(row.want) is Last for row in batch.rows)


def is_verification(batch: Batch) -> bool:
    """Whether a single row wants the logits after each of its tokens: one and its drafts."""
    if len(batch.rows) > 1 or batch.num_tokens > MAX_RUN or not is_plain(batch):
        return False
    want = batch.rows[0].want
    return isinstance(want, Last) and want.k == batch.num_tokens


def is_plain(batch: Batch) -> bool:
    """Whether ids go through the whole model, and nothing is repaired or loaded beside them."""
    segments = batch.step.segments
    if len(segments) > 1 or not batch.step.only_ids or segments[0].repairs or segments[0].loads:
        return False
    return segments[0].rope_positions is None


@dataclass(frozen=True, slots=True)
class Shape:
    """Steps of one shape are one recording."""

    starts: tuple[int, ...]  # of the rows
    pages: int  # that a row's table has room for
    adapted: frozenset[str]  # the kinds of maps that adapters change
    loop: tuple[bool, ...] | Literal["argmax"] | None = None  # how the rows of a loop draw

    @staticmethod
    def of(
        starts: tuple[int, ...],
        pages: int,
        step_adapters: StepAdapters | None,
        loop: tuple[bool, ...] | Literal["argmax"] | None = None,
    ) -> Shape:
        return Shape(starts, pages, frozenset() if step_adapters is None else step_adapters.parts, loop)


def recordable(step_adapters: StepAdapters | None) -> bool:
    """Whether a step with these adapters consists of operations of the backend alone."""
    return step_adapters is None or step_adapters.is_recordable


def own_picks(step_adapters: StepAdapters | None, tokens: int) -> StepAdapters | None:
    """The same adapters, picked by tensors of a recording's own, for so many tokens."""
    if step_adapters is None:
        return None
    source = step_adapters.adapter_slots
    own = AdapterSlots(source.slots.new_empty(tokens), source.scales.new_zeros(tokens))
    copy_picks(source, own)
    return replace(step_adapters, adapter_slots=own)


def copy_picks(source: AdapterSlots, target: AdapterSlots) -> None:
    """The adapters of one step into those of a recording; tokens behind it have none."""
    tokens = len(source.slots)
    target.slots[:tokens] = source.slots
    target.scales[:tokens] = source.scales
    if tokens < len(target.slots):
        target.slots[tokens:] = -1
