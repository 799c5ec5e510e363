"""A tiny model with a page pool of any size, requests over it, and what each of them says alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiny import VOCAB, write_tiny, write_tiny_hybrid, write_tiny_mixed

from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.admission import BorrowedKV
from kvilt.engine.engine import Engine
from kvilt.engine.event import Ended, Event, PromptProgress, Scored, TokenEvent
from kvilt.engine.request import Request
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.kv.pool import PagePool
from kvilt.sampling.params import SamplingParams

CONTEXT = 512
PAGES = 40  # of the executor that most files share
WINDOW = 40  # four pages at most, so a group of nine has room for two windows and a step


def load_small(folder: Path, pages: int, window: int | None = None, backend: str = "auto") -> Executor:
    """An executor of the tiny model whose pool has this many pages."""
    write_tiny(folder, sliding_window=window, max_position_embeddings=CONTEXT)
    page_bytes = load_executor(folder, RunConfig(kv_memory=1 << 20, backend=backend, threads=1)).layout.page_bytes
    return load_executor(folder, RunConfig(kv_memory=pages * page_bytes, backend=backend, threads=1))


def load_mixed(folder: Path, pages: Sequence[int], context: int = CONTEXT, backend: str = "auto") -> ModelExecutor:
    """An executor of a model with a full and a window group whose pool has so many pages of each."""
    loaded = load_executor(
        write_tiny_mixed(folder, WINDOW, context), RunConfig(kv_memory=1 << 22, backend=backend, threads=1)
    )
    pool = loaded.pool
    return ModelExecutor(
        loaded._decoder, PagePool(pool.layout, pages, pool.ops, pool.identity, token_limit=VOCAB), context
    )


def load_hybrid(
    folder: Path, pages: int, states: int, every: int = 64, context: int = CONTEXT, backend: str = "auto"
) -> ModelExecutor:
    """An executor of a model with recurrent state whose pool has so many pages, and slots for states."""
    config = RunConfig(kv_memory=1 << 22, backend=backend, threads=1)
    loaded = load_executor(write_tiny_hybrid(folder, context), config)
    old = loaded.pool
    pool = PagePool(old.layout, pages, old.ops, old.identity, token_limit=VOCAB, states=states, checkpoints=every)
    return ModelExecutor(loaded._decoder, pool, context)


@dataclass(eq=False)
class Ear:
    """Hears a request, and remembers."""

    samples: int = 1
    tokens: list[list[int]] = field(default_factory=list)
    ends: list[Ended | None] = field(default_factory=list)
    enough: int | None = None  # content after so many tokens
    progress: list[PromptProgress] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.samples)]
        self.ends = [None] * self.samples

    def on_event(self, event: Event) -> bool:
        assert self.ends[event.index] is None, "nothing is heard after the end"
        match event:
            case TokenEvent(index, token):
                self.tokens[index].append(token)
                return len(self.tokens[index]) == self.enough
            case Ended():
                self.ends[event.index] = event
            case PromptProgress():
                self.progress.append(event)
            case Scored():
                self.scored.append(event)
        return False

    @property
    def over(self) -> bool:
        return all(end is not None for end in self.ends)

    @property
    def reasons(self) -> list[str]:
        return [end.reason if end else "" for end in self.ends]

    @property
    def error(self) -> BaseException | None:
        end = self.ends[0]
        return end.error if end else None


@dataclass(frozen=True)
class Ask:
    """A prompt and how to continue it."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def alone(self, executor: Executor) -> list[int]:
        """What it says with nobody else there: by the executor's own loop, without any engine."""
        with executor.create_kv_cache() as kv:
            if self.prompt[:-1]:
                executor.prefill(self.prompt[:-1], kv)
            assert self.params.max_tokens is not None
            return executor.sample_tokens(self.params.max_tokens, self.prompt[-1:], kv, params=self.params)[0]


def asks(count: int, seed: int, temperature: float = 0.0, longest: int = 150) -> list[Ask]:
    """Random requests, most of which share beginnings."""
    dice = random.Random(seed)
    stems = [[dice.randrange(VOCAB) for _ in range(size)] for size in (40, 70, 100)]
    made = []
    for index in range(count):
        stem = dice.choice([*stems, *stems, []])
        own = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 40))]
        params = SamplingParams(max_tokens=dice.randrange(1, 60), temperature=temperature, seed=index)
        made.append(Ask(tuple([*stem, *own][:longest]), params))
    return made


def start(
    engine: Engine, ask: Ask, *, ear: Ear | None = None, borrowed: BorrowedKV | None = None, **fields: object
) -> Ear:
    """Ask an engine; the ear hears the answer."""
    ear = ear or Ear(ask.params.n)
    request = Request(ask.prompt, ask.params, **fields)  # type: ignore[arg-type]
    engine.add(engine.prepare(request, ear, borrowed))
    return ear


def finish(engine: Engine, most: int = 10_000) -> int:
    """Step until nobody wants a row; how many steps that took."""
    for count in range(most):
        if not engine.step():
            return count
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, done: Callable[[], bool]) -> None:
    """Step until done, and sleep while everybody waits for a store; nobody waits for ever."""
    wake, end_s = engine.wakeup, time.monotonic() + 600
    while not done():
        wake.clear()
        if not engine.step() and not done() and not engine.ready:
            assert engine.wait_timeout_s is not None, "nobody waits, and nobody goes on"
            wake.wait(engine.wait_timeout_s)
        assert time.monotonic() < end_s, "this takes too long to be only slow"


def together(executor: Executor, many: Sequence[Ask], config: EngineConfig | None = None) -> list[Ear]:
    """All at once through one engine."""
    engine = Engine(executor, config)
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    return ears
