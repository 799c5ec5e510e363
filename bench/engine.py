"""Offline throughput through the engine: what it costs beside its steps, and what a shared prefix saves.

python bench/engine.py [--model smollm2] [--threads 2] [--requests 64] [--new 64] [--runs 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.engine.engine import Engine
from kvilt.engine.sequence import Job
from kvilt.llm.answer import Answer


@dataclass(frozen=True, slots=True)
class Result:
    """One workload, medians of several runs."""

    name: str
    seconds: float
    tokens_per_s: float  # generated
    step_s: float  # inside executor.run
    sample_s: float  # inside executor.sample
    overhead: float  # seconds beyond the steps and their sampling, of those
    beyond_steps: float  # the same with sampling counted as overhead
    cached_tokens: int
    steps: int


class Clocked:
    """Stands before a method and adds up its time."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.seconds, self.calls = inner, 0.0, 0

    def __call__(self, *given: Any, **more: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return self.inner(*given, **more)
        finally:
            self.seconds += time.perf_counter() - started_s
            self.calls += 1


def once(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, reuse: bool) -> Result:
    """All prompts at once through an engine of their own, with text made of every token."""
    executor = llm.executor
    executor.prefixes.clear()
    run, sample = Clocked(executor.run), Clocked(executor.sample)
    vars(executor).update(run=run, sample=sample)
    try:
        engine, answers = Engine(executor), []
        started_s = time.perf_counter()
        for ids in prompts:
            job, answer = _job(llm, engine, ids, params, reuse)
            engine.add(job)
            answers.append(answer)
        with executor.call():
            while engine.step():
                pass
        seconds = time.perf_counter() - started_s
    finally:
        del executor.run, executor.sample
    done = [answer.completion() for answer in answers]
    generated = sum(len(one.token_ids) for one in done)
    return Result(
        name="",
        seconds=seconds,
        tokens_per_s=generated / seconds,
        step_s=run.seconds,
        sample_s=sample.seconds,
        overhead=(seconds - run.seconds - sample.seconds) / (run.seconds + sample.seconds),
        beyond_steps=(seconds - run.seconds) / run.seconds,
        cached_tokens=sum(one.usage.cached_tokens for one in done),
        steps=run.calls,
    )


def _job(llm: LLM, engine: Engine, ids: Sequence[int], params: SamplingParams, reuse: bool) -> tuple[Job, Answer]:
    request, asked = llm.request(ids, params, reuse=reuse)
    answer = Answer(asked)
    return engine.prepare(request, answer), answer


def measured(name: str, runs: int, work: Callable[[], Result]) -> Result:
    """The run whose time is the median."""
    results = sorted((work() for _ in range(runs)), key=lambda result: result.seconds)
    middle = asdict(results[len(results) // 2])
    middle["overhead"] = statistics.median(result.overhead for result in results)
    middle["beyond_steps"] = statistics.median(result.beyond_steps for result in results)
    return Result(**{**middle, "name": name})


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and whether they may begin with what others left."""

    name: str
    prompts: Sequence[Sequence[int]]
    reuse: bool = True


def workloads(vocab: int, requests: int) -> dict[str, list[Workload]]:
    """The same prompts every time, of tokens that mean nothing: what they say does not matter here."""
    dice = random.Random(7)

    def text(tokens: int) -> list[int]:
        return [dice.randrange(vocab) for _ in range(tokens)]

    stem = text(400)
    mixed = [text(dice.randrange(100, 501)) for _ in range(requests)]
    shared = [[*stem, *text(dice.randrange(10, 51))] for _ in range(requests)]
    return {
        "mixed": [Workload("prompts of 100 to 500", mixed)],
        "one": [Workload("one request", mixed[:1])],
        "shared": [Workload("400 shared, no reuse", shared, reuse=False), Workload("400 shared, reuse", shared)],
    }


def table(results: Sequence[Result]) -> None:
    """One line for each workload; times in seconds, shares in percent of the steps."""
    columns = ("seconds", "new tok/s", "steps", "in steps", "sampling", "engine %", "+ sampling %", "cached")
    print(f"{'':<24}" + "".join(f"{column:>13}" for column in columns))
    for one in results:
        cells = (
            f"{one.seconds:.2f}",
            f"{one.tokens_per_s:.1f}",
            f"{one.steps}",
            f"{one.step_s:.2f}",
            f"{one.sample_s:.2f}",
            f"{100 * one.overhead:.2f}",
            f"{100 * one.beyond_steps:.2f}",
            f"{one.cached_tokens}",
        )
        print(f"{one.name:<24}" + "".join(f"{cell:>13}" for cell in cells))


def verdicts(results: Sequence[Result]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was reached."""
    by_name = {one.name: one for one in results}
    said = []
    if (mixed := by_name.get("prompts of 100 to 500")) is not None:
        text = f"engine beside its steps: {100 * mixed.beyond_steps:.2f} % with sampling (aim: under 5 %)"
        said.append((text, mixed.beyond_steps < 0.05))
    if (shared := by_name.get("400 shared, reuse")) is not None:
        gain = shared.tokens_per_s / by_name["400 shared, no reuse"].tokens_per_s
        said.append((f"a shared prefix of 400 tokens: {gain:.2f}x the throughput (aim: 3x)", gain >= 3))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["mixed", "one", "shared"], default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.new, ignore_eos=True)
    with kvilt.load(arguments.model, threads=arguments.threads, kv_memory="4G") as llm:
        todo = workloads(llm.executor.spec.vocab_size, arguments.requests)
        chosen = [one for key, some in todo.items() if arguments.only in (None, key) for one in some]
        once(llm, todo["mixed"][0].prompts[:2], params, True)  # warm
        results = [
            measured(one.name, arguments.runs, partial(once, llm, one.prompts, params, one.reuse)) for one in chosen
        ]
        backend = llm.executor.pool.ops.numerics
    if arguments.json:
        print(json.dumps({"backend": backend, "results": [asdict(result) for result in results]}))
        return
    print(f"{arguments.model} · {backend} · {arguments.requests} requests, {arguments.new} new tokens each, ", end="")
    print(f"medians of {arguments.runs}")
    table(results)
    for text, reached in verdicts(results):
        print(f"{text}: {'reached' if reached else 'MISSED'}")


if __name__ == "__main__":
    main()
