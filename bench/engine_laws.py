"""A row does not see its neighbours, on real weights: random days through the engine, each request against itself.

python bench/engine_laws.py [--model smollm2] [--runs 100] [--requests 32] [--threads 2]

Every run draws arrivals, budgets, priorities, a pool that is too small and aborts for 30 % of the requests; half
of them are greedy, half seeded at temperature 0.8. Exits with 1 at the first token that differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.config import EngineConfig
from kvilt.engine.counters import PREEMPTIONS, PREFIX_HITS
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended, Event, TokenEvent
from kvilt.engine.request import Request

STORY = (
    "Once upon a time there was a king who had three daughters, and each of them wanted something else from life. "
    "The first wanted to see the sea, the second to read every book in the library, and the third to know why the "
    "moon follows us. "
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how to continue it, and what it says alone."""

    prompt: list[int]
    params: SamplingParams
    alone: list[int]


class Ear:
    """Hears one sample."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: Ended | None = None

    def on_event(self, event: Event) -> bool:
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
        elif isinstance(event, Ended):
            assert self.end is None, "a sample ends once"
            self.end = event
        return False


def crowd(llm: LLM, count: int, temperature: float) -> list[Ask]:
    """Requests that share beginnings, with what each says by the executor's own loop."""
    dice = random.Random(count + int(10 * temperature))
    stem = llm.tokenizer.encode(STORY * 4)
    made = []
    for index in range(count):
        shared = stem[: dice.choice([0, 40, 90, 160])]
        own = [dice.randrange(llm.executor.spec.vocab_size) for _ in range(dice.randrange(1, 60))]
        params = SamplingParams(max_tokens=dice.randrange(1, 40), temperature=temperature, seed=index)
        prompt = [*shared, *own]
        with llm.executor.create_kv_cache() as kv:
            if prompt[:-1]:
                llm.executor.prefill(prompt[:-1], kv)
            assert params.max_tokens is not None
            alone = llm.executor.sample_tokens(params.max_tokens, prompt[-1:], kv, params=params)[0]
        made.append(Ask(prompt, params, alone))
    return made


def day(llm: LLM, asks: Sequence[Ask], seed: int) -> Counter[str]:
    """One random day; what happened on it. Raises at the first difference."""
    dice, executor = random.Random(seed), llm.executor
    executor.prefixes.clear()
    engine = Engine(
        executor, EngineConfig(step_tokens=dice.choice([32, 64, 200, 512]), max_rows=dice.choice([8, 16, 32]))
    )
    order, ears = dice.sample(range(len(asks)), len(asks)), {}
    doomed = sorted(dice.sample(order, len(asks) * 3 // 10))
    spare = dice.choice([0, executor.pool.pages - 20, executor.pool.pages - 14])
    taken = executor.pool.take([spare] * len(executor.layout.groups))
    try:
        while order or engine.ready:
            for at in [order.pop() for _ in range(min(len(order), dice.choice([0, 1, 4, 16])))]:
                ears[at] = Ear()
                request = Request(asks[at].prompt, asks[at].params, id=str(at), priority=dice.choice([0, 0, 1]))
                engine.add(engine.prepare(request, ears[at]))
            for at in doomed:
                if at in ears and dice.random() < 0.06:
                    engine.abort(str(at))
            engine.step()
    finally:
        for group, pages in enumerate(taken):
            executor.pool.drop(group, pages)
    for at, ear in ears.items():
        said = asks[at].alone[: len(ear.tokens)] if ear.end and ear.end.reason == "cancelled" else asks[at].alone
        if ear.end is None or ear.end.reason not in ("length", "cancelled") or ear.tokens != said:
            sys.exit(f"day {seed}, request {at}: {ear.end and ear.end.reason}, {ear.tokens} instead of {said}")
    if executor.pool.usage().used:
        sys.exit(f"day {seed} left {executor.pool.usage().used} pages behind")
    numbers = engine.metrics.snapshot()
    seen = {
        name: int(sum(one["value"] for one in numbers[name]["series"])) for name in (PREEMPTIONS.name, PREFIX_HITS.name)
    }
    aborted = sum(ear.end is not None and ear.end.reason == "cancelled" for ear in ears.values())
    return Counter({**seen, "aborted": aborted, "requests": len(ears)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first day's seed")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    with kvilt.load(arguments.model, threads=arguments.threads, kv_memory="512M", max_context=512) as llm:
        asks = [ask for heat in (0.0, 0.8) for ask in crowd(llm, arguments.requests, heat)]
        started_s = time.perf_counter()
        for seed in range(arguments.first, arguments.first + arguments.runs):
            total += day(llm, asks, seed)
        seconds = time.perf_counter() - started_s
        backend = llm.executor.pool.ops.numerics
    print(f"{arguments.model} · {backend} · {arguments.runs} days in {seconds:.0f} s, no difference")
    print(" · ".join(f"{name} {number:,}" for name, number in sorted(total.items())))


if __name__ == "__main__":
    main()
