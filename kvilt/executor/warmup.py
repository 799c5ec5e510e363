"""Steps of many sizes before the first request, so that no request waits for kernels.

A device compiles and loads a kernel when a step first needs it, and captures a decode step when its number of rows is
new: seconds, in the middle of a stream. Here that happens once, on caches of its own, and nothing of it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import Batch, Ids, Last, Row
from ..errors import PoolExhausted
from ..sampling.params import SamplingParams
from ..sampling.state import SamplingState
from .protocol import OnWarmup
from .step_executor import StepExecutor

_PARAMS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=0))
_LEAST_TOKENS = 16


def warm_up(executor: StepExecutor, step_tokens: int, max_rows: int, on_progress: OnWarmup | None = None) -> None:
    """Run prompts of up to `step_tokens` tokens and decode steps of up to `max_rows` rows, size after size."""
    room = min(executor.max_context, executor.pool.tokens)
    prompts = [(lengths, lengths[0]) for lengths in prompt_steps(step_tokens, max_rows, room)]
    steps = [*prompts, *(([1] * size.rows, size.tokens) for size in executor.decode_sizes(max_rows))]
    for done, step in enumerate(steps):
        _run(executor, *step)
        if on_progress is not None:
            on_progress(done + 1, len(steps))


def prompt_steps(step_tokens: int, max_rows: int, room: int) -> list[list[int]]:
    """Tokens of the rows of each step: powers of two and the middles between them, as one prompt and as several."""
    sizes, power = [], _LEAST_TOKENS
    while power <= step_tokens:
        sizes += [power, *([power + power // 2] if power + power // 2 <= step_tokens else [])]
        power *= 2
    widths = [(size, most) for size in sizes for most in (room, min(room, size // 4))]
    return [_rows(size, most) for size, most in widths if size <= max_rows * most]


def _rows(tokens: int, most: int) -> list[int]:
    """So many tokens as rows of at most `most`."""
    return [most] * (tokens // most) + ([tokens % most] if tokens % most else [])


def _run(executor: StepExecutor, lengths: Sequence[int], longest: int) -> None:
    """One step of rows with so many tokens each, and a draw; not where the pool is too small for it.

    The first row has room for `longest` tokens: a step is recorded by the room of its longest row.
    """
    with executor.create_kv_cache(len(lengths), capacity=longest) as kv:
        try:
            kv.reserve([longest, *lengths[1:]])
        except PoolExhausted:
            return
        rows = [Row(Ids([0] * length), range(length), kv, i, want=Last(1)) for i, length in enumerate(lengths)]
        logits = executor.forward(Batch.of(rows)).values
        for params in _PARAMS:
            states = [SamplingState(params, [0] * length) for length in lengths]
            executor.start_sample(logits, states, list(lengths)).wait()
