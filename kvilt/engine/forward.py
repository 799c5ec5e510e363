"""Rows through the executor and the sampler: all together, or one by one where together fails.

So one bad row (an exception, logits that are no numbers) fails alone. Refuses to know requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..batch import Batch, Last, Logits, Row, Score, Scores
from ..errors import NumericsError
from ..executor.protocol import Executor
from ..sampling.accept import DraftRun, accept
from ..sampling.pending import PendingSample
from ..sampling.sampler import SamplingState, TokenLogprobs
from .isolation import INTERRUPTS, contained

_log = logging.getLogger(__name__)


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class RowTask:
    """A row, and the samplers that draw the token at `position` from its logits."""

    row: Row
    drawing: Sequence[SamplingState]
    position: int
    drafts: Sequence[int] = ()  # the row's last tokens, which the sampler accepts or rejects
    on_result: Callable[[Row, Logits, int], None] | None = None  # called with all logits and the row's index in them


@dataclass(slots=True)  # not frozen: see docs/decisions.md, "Records of a row"
class RowDone:
    """The row is computed: one token for each sampler; for a row with drafts the accepted ones and one more."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    scores: Scores | None = None  # if the row wanted some


@dataclass(frozen=True, slots=True)
class RowFailed:
    """This row and no other one."""

    error: Exception


Result = RowDone | RowFailed


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A forward that the device may still compute."""

    results: Callable[[], Sequence[Result]]  # the result of each task, once they are there
    sampled: Tensor | None = None  # [drawing tasks] int64 on the device; None where the results are there already

    @staticmethod
    def done(results: Sequence[Result]) -> LaunchedForward:
        """One that is computed."""
        return LaunchedForward(lambda: results)


def forward(executor: Executor, tasks: Sequence[RowTask]) -> Sequence[Result]:
    """The result of each task. Raises only a cancel or an interrupt, which are not errors of a row."""
    return launch(executor, tasks).results()


def launch(executor: Executor, tasks: Sequence[RowTask], overlap: bool = False) -> LaunchedForward:
    """Compute the tasks, and draw their tokens. With `overlap` the tokens may stay on the device until they are read.

    That is so where no task needs its token for the next one, and no task wants more than tokens.
    """
    try:
        logits = executor.run(Batch.of([task.row for task in tasks]))
    except INTERRUPTS:
        raise
    except BaseException as error:
        if len(tasks) == 1:
            return LaunchedForward.done([RowFailed(contained(error))])
        _log.warning("a step of %d rows failed (%s); they are run one by one", len(tasks), type(error).__name__)
        return LaunchedForward.done([result for task in tasks for result in forward(executor, [task])])
    if not overlap or not all(map(_may_overlap, tasks)):
        return LaunchedForward.done(_results(executor, tasks, logits))
    drawing = [task for task in tasks if task.drawing]
    try:
        pending = executor.start_sample(
            logits.values, [task.drawing[0] for task in drawing], [task.position for task in drawing]
        )
    except INTERRUPTS:
        raise
    except BaseException:  # an error of some row: it is found by drawing them apart
        return LaunchedForward.done(_results(executor, tasks, logits))
    return LaunchedForward(partial(_read, executor, tasks, logits, pending), pending.tokens)


def _may_overlap(task: RowTask) -> bool:
    """Whether the next row of the same sequence can be computed before the token of this one is read."""
    if task.drafts or task.on_result is not None or isinstance(task.row.want, Score) or len(task.drawing) > 1:
        return False
    return not task.drawing or not task.drawing[0].reads_history


def _read(executor: Executor, tasks: Sequence[RowTask], logits: Logits, pending: PendingSample) -> Sequence[Result]:
    """The results of tasks whose tokens were left on the device."""
    try:
        drawn = pending.wait()
    except INTERRUPTS:
        raise
    except BaseException:
        return _results(executor, tasks, logits)
    tokens = iter(zip(drawn.tokens.tolist(), drawn.logprobs, strict=True))
    results: list[Result] = []
    for task in tasks:
        if task.drawing:
            token, logprobs = next(tokens)
            results.append(RowDone((token,), (logprobs,)))
        else:
            results.append(RowDone())
    return results


def _results(executor: Executor, tasks: Sequence[RowTask], logits: Logits) -> list[Result]:
    """Draw the tokens of computed tasks, and call their callbacks."""
    drawing = [i for i, task in enumerate(tasks) if task.drawing]
    draw = _verify if any(task.drafts for task in tasks) else _draw
    values = logits.values
    if any(isinstance(task.row.want, Last) and not task.drawing for task in tasks):  # wanted, but not drawn from
        values = torch.cat([values[:0], *(logits.of_row(i) for i in drawing)])
    drawn = dict(zip(drawing, draw(executor, [tasks[i] for i in drawing], values), strict=True))
    results = [drawn.get(i) or _scored(logits.scores.get(i)) for i in range(len(tasks))]
    return [_call_back(task, logits, i, result) for i, (task, result) in enumerate(zip(tasks, results, strict=True))]


def _call_back(task: RowTask, logits: Logits, index: int, result: Result) -> Result:
    """The result of a task, after its callback."""
    try:
        if task.on_result is not None:
            task.on_result(task.row, logits, index)
    except BaseException as error:
        return RowFailed(contained(error))
    return result


def _scored(scores: Scores | None) -> Result:
    if scores is not None and bool(scores.logprobs.isnan().any()):
        return RowFailed(NumericsError([0]))
    return RowDone(scores=scores)


def _draw(executor: Executor, tasks: Sequence[RowTask], logits: Tensor) -> list[Result]:
    """Tokens from logits [tasks, vocab]."""
    if not tasks:
        return []
    owners = [i for i, task in enumerate(tasks) for _ in task.drawing]
    states = [state for task in tasks for state in task.drawing]
    wide = logits if len(owners) == len(tasks) else logits[owners]
    try:
        drawn = executor.sample(wide, states, [tasks[i].position for i in owners])
    except INTERRUPTS:
        raise
    except BaseException as error:
        if len(tasks) == 1:
            return [RowFailed(contained(error))]
        return _draw_apart(executor, tasks, logits, {owners[row] for row in getattr(error, "rows", range(len(owners)))})
    tokens, results, at = drawn.tokens.tolist(), [], 0
    for task in tasks:
        stop = at + len(task.drawing)
        results.append(RowDone(tokens[at:stop], drawn.logprobs[at:stop]))
        at = stop
    return [*results]


def _verify(executor: Executor, tasks: Sequence[RowTask], logits: Tensor) -> list[Result]:
    """Tokens from logits in which each task has a row for each of its drafts, and one more."""
    runs: list[list[DraftRun]] = []
    row = 0
    for task in tasks:
        runs.append([DraftRun(state, task.position, row, task.drafts) for state in task.drawing])
        row += 1 + len(task.drafts)
    try:
        drawn = iter(accept(logits, [run for own in runs for run in own], executor.sample))
    except INTERRUPTS:
        raise
    except BaseException:  # perhaps after a rejected draft, from where nothing would have been drawn
        return [_verify_alone(executor, own, logits) for own in runs]
    results: list[Result] = []
    for own in runs:
        each = [next(drawn) for _ in own]
        results.append(RowDone([t for one in each for t in one.tokens], [p for one in each for p in one.logprobs]))
    return results


def _verify_alone(executor: Executor, runs: Sequence[DraftRun], logits: Tensor) -> Result:
    try:
        each = [one for run in runs for one in accept(logits, [run], executor.sample, at_once=False)]
    except BaseException as error:
        return RowFailed(contained(error))
    return RowDone([t for one in each for t in one.tokens], [p for one in each for p in one.logprobs])


def _draw_apart(executor: Executor, tasks: Sequence[RowTask], logits: Tensor, bad: set[int]) -> list[Result]:
    """Draw the rows that an error named one by one, the others together."""
    good = [i for i in range(len(tasks)) if i not in bad]
    results = dict(zip(good, _draw(executor, [tasks[i] for i in good], logits[good]), strict=True))
    results |= {i: _draw(executor, [tasks[i]], logits[[i]])[0] for i in sorted(bad)}
    return [results[i] for i in range(len(tasks))]
