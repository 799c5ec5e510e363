"""Tokens per second of prefill, decode and batched decode, and the limits of the machine for comparison."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ParamError
from ..executor.protocol import Executor
from ..models.recurrent_spec import recurrent_shapes
from ..models.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec
from ..ops.native.limits import MachineLimits
from ..ops.native.limits import measure as measure_limits
from .cold_start import ColdStart, measure_cold_start
from .progress import Track


@dataclass(frozen=True, slots=True)
class Workload:
    """A piece of work to time: `work` computes `tokens` tokens with `ops` operations on weights.

    `read_bytes` is the size of the weights and KV that it reads; None where arithmetic is the limit, not memory.
    """

    name: str
    tokens: int
    ops: int
    read_bytes: int | None
    work: Callable[[], object]


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The medians of several runs."""

    name: str
    tokens_per_s: float
    gigabytes_per_s: float | None
    gigaops_per_s: float
    seconds: float
    runs: int


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The sizes of the workloads, and how often each is run."""

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
class BenchReport:
    """All results."""

    model: str
    backend: str
    threads: int
    results: list[WorkloadResult]
    cold: ColdStart | None
    limits: MachineLimits | None


@dataclass(frozen=True, slots=True)
class MatmulCounts:
    """Multiplications by weights for one token: in all layers, and in the output head."""

    layers: int
    head: int


def matmul_counts(spec: ModelSpec) -> MatmulCounts:
    """The counts for a model; attention between tokens is not included."""
    layers = 0
    for layer in spec.layers:
        if layer.has_attention:
            layers += _attention_products(layer.attention, spec.hidden_size)
        if layer.recurrent is not None:
            shapes = recurrent_shapes(layer.recurrent, spec.hidden_size).values()
            layers += sum(prod(shape) for shape in shapes if len(shape) == 2)
        if layer.blocks != "mixer":
            layers += spec.hidden_size * _feed_forward_width(layer.feed_forward)
    return MatmulCounts(layers, spec.hidden_size * spec.vocab_size)


def _attention_products(a: AttentionSpec, width: int) -> int:
    if (latent := a.latent) is None:
        return width * a.head_dim * 2 * (a.heads + (a.kv_heads if a.shared_with is None else 0))
    per_head = latent.kv_rank * (latent.plain_dim + latent.value_dim) + width * latent.value_dim
    query = latent.q_rank * (width + a.heads * a.head_dim) if latent.q_rank else width * a.heads * a.head_dim
    return query + width * (latent.kv_rank + latent.rope_dim) + a.heads * per_head


def _feed_forward_width(spec: FeedForwardSpec | ExpertsSpec) -> int:
    """Rows of all maps that a token goes through, each as wide as the model."""
    match spec:
        case FeedForwardSpec(hidden, gated=gated):
            return (3 if gated else 2) * hidden
        case ExpertsSpec(experts, top_k, expert, shared=shared):
            of_all = 0 if shared is None else _feed_forward_width(shared.block) + shared.gated
            return experts + top_k * _feed_forward_width(expert) + of_all


def workloads(executor: Executor, plan: BenchPlan) -> Iterator[Workload]:
    """Prefill of several lengths, decode at several contexts, batches of decodes."""
    for tokens in plan.prefill:
        yield _prefill(executor, tokens)
    for context in plan.contexts:
        yield _decode(executor, f"decode at {context}", 1, context, plan.steps)
    for rows in plan.batches:
        yield _decode(executor, f"batch of {rows}", rows, plan.contexts[0] if plan.contexts else 16, plan.steps)


def _prefill(executor: Executor, tokens: int) -> Workload:
    prompt, each = arbitrary_ids(executor, tokens), matmul_counts(executor.spec)

    def work() -> None:
        with executor.create_kv_cache() as kv:
            executor.step(prompt, kv)

    return Workload(f"prefill {tokens}", tokens, 2 * (tokens * each.layers + each.head), None, work)


def _decode(executor: Executor, name: str, rows: int, context: int, steps: int) -> Workload:
    prompt, each = arbitrary_ids(executor, context), matmul_counts(executor.spec)
    read = steps * (executor.weight_bytes + rows * _kv_bytes(executor, context + steps // 2))

    def work() -> float:
        """Seconds of the decode steps, without the prompt."""
        with executor.create_kv_cache() as one, executor.create_kv_cache(rows) as kv:
            executor.prefill(prompt, one)
            kv.broadcast_and_copy_from(one)
            started_s = time.perf_counter()
            executor.sample_tokens(steps, [[prompt[0]]] * rows, kv)
            return time.perf_counter() - started_s

    return Workload(name, rows * steps, 2 * rows * steps * (each.layers + each.head), read, work)


def _kv_bytes(executor: Executor, length: int) -> int:
    """Bytes of KV that a query at position `length` reads."""
    groups = executor.layout.groups
    return sum(group.shape.token_bytes * (length - group.first_needed(length)) for group in groups)


def arbitrary_ids(executor: Executor, tokens: int) -> list[int]:
    """Token ids that are the same in every run."""
    return [(i * 7919 + 13) % executor.spec.vocab_size for i in range(tokens)]


def timed(workload: Workload, runs: int) -> WorkloadResult:
    """The median of `runs`, after one to warm up."""
    workload.work()
    seconds = []
    for _ in range(runs):
        started_s = time.perf_counter()
        own = workload.work()
        seconds.append(own if isinstance(own, float) else time.perf_counter() - started_s)
    middle = statistics.median(seconds)
    read = None if workload.read_bytes is None else workload.read_bytes / middle / 1e9
    return WorkloadResult(workload.name, workload.tokens / middle, read, workload.ops / middle / 1e9, middle, runs)


def measure(model: str, executor: Executor, plan: BenchPlan, config: dict[str, Any], track: Track) -> BenchReport:
    """Run every workload; `config` is what a cold start loads the model with."""
    todo, results, threads = [*workloads(executor, plan)], [], torch.get_num_threads()
    with track("measuring", len(todo) + plan.cold + 2) as show:
        show(0, "the machine")
        before = measure_limits(threads, executor.weight_bytes)
        for done, workload in enumerate(todo, 1):
            show(done, workload.name)
            results.append(timed(workload, plan.runs))
        after = measure_limits(threads, executor.weight_bytes)
        show(len(todo) + 2, "cold start")
        cold = measure_cold_start(model, config) if plan.cold else None
    return BenchReport(model, executor.pool.ops.numerics, threads, results, cold, _better(before, after))


def _better(before: MachineLimits | None, after: MachineLimits | None) -> MachineLimits | None:
    """The better of two measurements: a host that moves virtual cores changes the limits from minute to minute."""
    if before is None or after is None:
        return None
    ops, read = max(before.ops_per_s, after.ops_per_s), max(before.bytes_per_s, after.bytes_per_s)
    return MachineLimits(before.threads, read, ops)
