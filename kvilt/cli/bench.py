"""`kvilt bench`: tokens per second of prefill, decode and batches, beside what the machine could do at most."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..errors import ParamError
from ..executor.executor import Executor
from ..llm import load
from ..models.spec import ModelSpec
from ..ops.native.limits import Limits
from ..ops.native.limits import measure as measure_limits
from .bench_cold import Cold, measure_cold
from .progress import bars, tracked


@dataclass(frozen=True, slots=True)
class Workload:
    """Something to time: `work` computes `tokens` tokens with `ops` operations on weights.

    `read_bytes` of weights and KV have to be read for it; None where arithmetic and not memory is the limit.
    """

    name: str
    tokens: int
    ops: int
    read_bytes: int | None
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of several runs."""

    name: str
    tokens_per_s: float
    gigabytes_per_s: float | None
    gigaops_per_s: float
    seconds: float
    runs: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of each workload."""

    prefill: tuple[int, ...] = (128, 512, 1024)
    contexts: tuple[int, ...] = (16, 1024)
    batches: tuple[int, ...] = (4, 8, 16, 32)
    steps: int = 32
    runs: int = 3
    cold: bool = True

    def __post_init__(self) -> None:
        for name in ("prefill", "contexts", "batches"):
            if any(value < 1 for value in getattr(self, name)):
                raise ParamError(name, "must be positive whole numbers")
        for name in ("steps", "runs"):
            if getattr(self, name) < 1:
                raise ParamError(name, f"must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Report:
    """All that was measured."""

    model: str
    backend: str
    threads: int
    results: list[Result]
    cold: Cold | None
    limits: Limits | None


@dataclass(frozen=True, slots=True)
class Products:
    """Multiplications by weights that one token takes: in all layers, and in the head."""

    layers: int
    head: int


def products(spec: ModelSpec) -> Products:
    """Counted from the spec; attention between tokens is not in it."""
    layers = 0
    for layer in spec.layers:
        a = layer.attention
        layers += spec.hidden_size * a.head_dim * 2 * (a.heads + a.kv_heads)
        layers += 3 * spec.hidden_size * layer.feed_forward.hidden
    return Products(layers, spec.hidden_size * spec.vocab_size)


def workloads(executor: Executor, shape: Shape) -> Iterator[Workload]:
    """Prefill of several lengths, decode at several contexts, batches of decodes."""
    for tokens in shape.prefill:
        yield _prefill(executor, tokens)
    for context in shape.contexts:
        yield _decode(executor, f"decode at {context}", 1, context, shape.steps)
    for rows in shape.batches:
        yield _decode(executor, f"batch of {rows}", rows, shape.contexts[0] if shape.contexts else 16, shape.steps)


def _prefill(executor: Executor, tokens: int) -> Workload:
    prompt, each = arbitrary_ids(executor, tokens), products(executor.spec)

    def work() -> None:
        with executor.create_kv_cache() as kv:
            executor.step(prompt, kv)

    return Workload(f"prefill {tokens}", tokens, 2 * (tokens * each.layers + each.head), None, work)


def _decode(executor: Executor, name: str, rows: int, context: int, steps: int) -> Workload:
    prompt, each = arbitrary_ids(executor, context), products(executor.spec)
    read = steps * (executor.weight_bytes + rows * _kv_bytes(executor, context + steps // 2))

    def work() -> float:
        """Seconds of the steps alone; the prompt is not counted."""
        with executor.create_kv_cache() as one, executor.create_kv_cache(rows) as kv:
            executor.prefill(prompt, one)
            kv.broadcast_and_copy_from(one)
            started_s = time.perf_counter()
            executor.sample_tokens(steps, [[prompt[0]]] * rows, kv)
            return time.perf_counter() - started_s

    return Workload(name, rows * steps, 2 * rows * steps * (each.layers + each.head), read, work)


def _kv_bytes(executor: Executor, length: int) -> int:
    """Bytes of KV that a query at `length` looks at."""
    groups = executor.layout.groups
    return sum(group.shape.token_bytes * (length - group.first_needed(length)) for group in groups)


def arbitrary_ids(executor: Executor, tokens: int) -> list[int]:
    """The same ones every time."""
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
    read = None if workload.read_bytes is None else workload.read_bytes / middle / 1e9
    return Result(workload.name, workload.tokens / middle, read, workload.ops / middle / 1e9, middle, runs)


def bench(model: str, shape: Shape, as_json: bool, config: dict[str, Any]) -> None:
    """Load a model, run the workloads, print what was found."""
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    with llm:
        report = _measure(model, llm.executor, shape, config)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _show(report, shape)


def _measure(model: str, executor: Executor, shape: Shape, config: dict[str, Any]) -> Report:
    todo, results, threads = [*workloads(executor, shape)], [], torch.get_num_threads()
    with tracked("measuring", len(todo) + shape.cold + 2) as show:
        show(0, "the machine")
        before = measure_limits(threads, executor.weight_bytes)
        for done, workload in enumerate(todo, 1):
            show(done, workload.name)
            results.append(timed(workload, shape.runs))
        after = measure_limits(threads, executor.weight_bytes)
        show(len(todo) + 2, "cold start")
        cold = measure_cold(model, config) if shape.cold else None
    return Report(model, executor.pool.ops.numerics, threads, results, cold, _better(before, after))


def _better(before: Limits | None, after: Limits | None) -> Limits | None:
    """The best of two: a host that moves virtual cores about changes what a machine can do from minute to minute."""
    if before is None or after is None:
        return None
    ops, read = max(before.ops_per_s, after.ops_per_s), max(before.bytes_per_s, after.bytes_per_s)
    return Limits(before.threads, read, ops)


def _show(report: Report, shape: Shape) -> None:
    title = f"{report.model} · {report.backend} · {report.threads} threads · median of {shape.runs}"
    table = Table(title=title, title_justify="left")
    table.add_column("workload")
    for column in ("tokens/s", "GB/s", "GOP/s", "seconds"):
        table.add_column(column, justify="right")
    limits = report.limits
    for result in report.results:
        read = _share(result.gigabytes_per_s, limits.bytes_per_s if limits else None)
        ops = _share(result.gigaops_per_s, limits.ops_per_s if limits else None)
        table.add_row(result.name, f"{result.tokens_per_s:.1f}", read, ops, f"{result.seconds:.3f}")
    if limits:
        table.add_section()
        table.add_row("the machine", "", f"{limits.bytes_per_s / 1e9:.1f}", f"{limits.ops_per_s / 1e9:.0f}", "")
    console = Console()
    console.print(table)
    if limits:
        console.print("the machine: reading a working set of the weights' size; int8 products. In brackets the share.")
    if cold := report.cold:
        beyond_s = cold.first_token_s - cold.torch_s
        console.print(f"cold start to first token {cold.first_token_s:.2f} s, {beyond_s:.2f} s beyond importing torch")
        if cold.peak_bytes:
            beyond = (cold.peak_bytes - cold.torch_bytes) / 1e6
            console.print(f"peak memory {cold.peak_bytes / 1e6:.0f} MB, {beyond:.0f} MB beyond importing torch")


def _share(value: float | None, limit: float | None) -> str:
    """A rate in billions, with its share of the limit."""
    if value is None:
        return ""
    return f"{value:.1f}" if limit is None else f"{value:.1f} ({value * 1e9 / limit:.0%})"
