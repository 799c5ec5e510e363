"""`kvilt bench`: tokens per second of prefill, decode and batches, and the bytes that moved for them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import ParamError
from ..executor.executor import Executor
from ..llm import load
from .progress import bars, tracked


@dataclass(frozen=True, slots=True)
class Workload:
    """Something to time: `work` computes `tokens` tokens and reads `read_bytes` bytes of weights and KV at least."""

    name: str
    tokens: int
    read_bytes: int
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of several runs."""

    name: str
    tokens_per_s: float
    gigabytes_per_s: float
    seconds: float
    runs: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of each workload."""

    prefill: tuple[int, ...] = (128, 512)
    contexts: tuple[int, ...] = (16, 1024)
    batches: tuple[int, ...] = (4, 8)
    steps: int = 32
    runs: int = 3

    def __post_init__(self) -> None:
        for name in ("prefill", "contexts", "batches"):
            if any(value < 1 for value in getattr(self, name)):
                raise ParamError(name, "must be positive whole numbers")
        for name in ("steps", "runs"):
            if getattr(self, name) < 1:
                raise ParamError(name, f"must be at least 1, not {getattr(self, name)}")


def workloads(executor: Executor, shape: Shape) -> Iterator[Workload]:
    """Prefill of several lengths, decode at several contexts, batches of decodes."""
    weights = executor.weight_bytes
    for tokens in shape.prefill:
        yield Workload(f"prefill {tokens}", tokens, weights, lambda n=tokens: _prefill(executor, n))  # type: ignore[misc]
    for context in shape.contexts:
        yield _decode(executor, f"decode at {context}", 1, context, shape.steps)
    for rows in shape.batches:
        yield _decode(executor, f"batch of {rows}", rows, shape.contexts[0] if shape.contexts else 16, shape.steps)


def _prefill(executor: Executor, tokens: int) -> None:
    with executor.create_kv_cache() as kv:
        executor.step(_ids(executor, tokens), kv)


def _decode(executor: Executor, name: str, rows: int, context: int, steps: int) -> Workload:
    token_bytes = sum(group.shape.token_bytes for group in executor.layout.groups)
    read = steps * (executor.weight_bytes + rows * token_bytes * (context + steps // 2))
    prompt = _ids(executor, context)

    def work() -> float:
        """Seconds of the steps alone; the prompt is not counted."""
        with executor.create_kv_cache() as one, executor.create_kv_cache(rows) as kv:
            executor.prefill(prompt, one)
            kv.broadcast_and_copy_from(one)
            started_s = time.perf_counter()
            executor.sample_tokens(steps, [[prompt[0]]] * rows, kv)
            return time.perf_counter() - started_s

    return Workload(name, rows * steps, read, work)


def _ids(executor: Executor, tokens: int) -> list[int]:
    """Arbitrary tokens, the same ones every time."""
    return [(i * 7919 + 13) % executor.spec.vocab_size for i in range(tokens)]


def timed(workload: Workload, runs: int) -> Result:
    """The median of `runs`, after one to warm up."""
    workload.work()
    seconds = []
    for _ in range(runs):
        started_s = time.perf_counter()
        own = workload.work()
        seconds.append(own if isinstance(own, float) else time.perf_counter() - started_s)
    middle = statistics.median(seconds)
    return Result(workload.name, workload.tokens / middle, workload.read_bytes / middle / 1e9, middle, runs)


def bench(model: str, shape: Shape, as_json: bool, config: dict[str, Any]) -> None:
    """Load a model, run the workloads, print a table."""
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    with llm:
        todo = [*workloads(llm.executor, shape)]
        results = []
        with tracked("measuring", len(todo)) as show:
            for done, workload in enumerate(todo, 1):
                results.append(timed(workload, shape.runs))
                show(done, workload.name)
        backend = llm.executor.pool.ops.numerics
    if as_json:
        print(json.dumps({"model": model, "backend": backend, "results": [asdict(result) for result in results]}))
        return
    table = Table(title=f"{model} · {backend} · median of {shape.runs}", title_justify="left")
    table.add_column("workload")
    for column in ("tokens/s", "GB/s", "seconds"):
        table.add_column(column, justify="right")
    for result in results:
        row = (f"{result.tokens_per_s:.1f}", f"{result.gigabytes_per_s:.1f}", f"{result.seconds:.3f}")
        table.add_row(result.name, *row)
    Console().print(table)
