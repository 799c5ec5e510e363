"""The load of a server benchmark: prompts and arrival times, made from a seed before the first request is sent.

This module knows no HTTP: the caller passes a function that sends a request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import ParamError

WORKLOADS = ("random", "shared-prefix", "multi-turn")
# Common words: each is one token of most vocabularies, with the blank before it.
_TEXT = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man me even most made after also did many before must through back years where much your way well down
    should because each just those people how too little state good very make world still own see men work long
    get here between both life being under never day same another know while last might us great old year off come
    since against go came right used take
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The workload, its size and its arrival process; checked on construction."""

    workload: str = "random"
    requests: int = 100
    prompt_tokens: int = 128
    max_tokens: int = 64
    clients: int | None = None
    rate: float | None = None
    turns: int = 4
    groups: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ParamError("workload", f"must be one of {', '.join(WORKLOADS)}, not {self.workload[:40]!r}")
        for name in ("requests", "prompt_tokens", "max_tokens", "turns", "groups"):
            if getattr(self, name) < 1:
                raise ParamError(name, f"must be at least 1, not {getattr(self, name)}")
        if self.clients is not None and self.rate is not None:
            raise ParamError("rate", "is for requests that do not wait for each other; give it or clients, not both")
        if self.clients is not None and self.clients < 1:
            raise ParamError("clients", f"must be at least 1, not {self.clients}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ParamError("rate", f"must be requests per second above 0, not {self.rate}")

    @property
    def arrivals(self) -> str:
        return f"{self.rate:g} requests/s (Poisson)" if self.rate is not None else f"{self.clients or 1} clients"


@dataclass(frozen=True, slots=True)
class ScriptedConversation:
    """The turns of one user; each turn is sent after the answer to the one before."""

    turns: tuple[str, ...]


def conversations(plan: LoadPlan) -> list[ScriptedConversation]:
    """All conversations, `requests` turns in total; the same for the same plan."""
    dice = random.Random(f"prompts {plan.seed}")
    match plan.workload:
        case "shared-prefix":
            shared = max(1, plan.prompt_tokens * 3 // 4)
            prefixes = [_words(dice, shared) for _ in range(plan.groups)]
            own = max(1, plan.prompt_tokens - shared)
            texts = [f"{dice.choice(prefixes)} {_words(dice, own)}" for _ in range(plan.requests)]
            return [ScriptedConversation((text,)) for text in texts]
        case "multi-turn":
            counts = [min(plan.turns, plan.requests - i) for i in range(0, plan.requests, plan.turns)]
            return [
                ScriptedConversation(tuple(_words(dice, plan.prompt_tokens) for _ in range(count))) for count in counts
            ]
        case _:
            return [ScriptedConversation((_words(dice, plan.prompt_tokens),)) for _ in range(plan.requests)]


def arrival_times(plan: LoadPlan, count: int) -> list[float]:
    """Start times of conversations in seconds: a Poisson process with `rate` requests a second."""
    assert plan.rate is not None
    dice = random.Random(f"arrivals {plan.seed}")
    per_conversation = plan.turns if plan.workload == "multi-turn" else 1
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += dice.expovariate(plan.rate / per_conversation)
        times.append(now_s)
    return times


class SendTurn(Protocol):
    """Sends one turn after the earlier ones (question and answer each); returns the answer, None after an error."""

    def __call__(self, before: Sequence[tuple[str, str]], said: str, due_s: float | None) -> Awaitable[str | None]: ...


async def drive(plan: LoadPlan, turn: SendTurn, skipped: Callable[[int], None]) -> None:
    """Send the whole load. `skipped` gets the number of turns that were not sent because an earlier turn failed."""
    todo = conversations(plan)
    if plan.rate is None:
        await _closed(todo, turn, skipped, plan.clients or 1)
    else:
        await _open(todo, turn, skipped, arrival_times(plan, len(todo)))


async def _closed(
    todo: list[ScriptedConversation], turn: SendTurn, skipped: Callable[[int], None], clients: int
) -> None:
    """Closed loop: each client sends its next turn when the last one was answered."""
    waiting = iter(todo)

    async def client(questions: Iterator[ScriptedConversation]) -> None:
        for each in questions:
            await _talk(each, turn, skipped, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(todo))):
            group.create_task(client(waiting))


async def _open(
    todo: list[ScriptedConversation], turn: SendTurn, skipped: Callable[[int], None], times: Sequence[float]
) -> None:
    """Open loop: conversations start at their times, independent of how many are unanswered."""
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for each, at_s in zip(todo, times, strict=True):
            due_s = started_s + at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            group.create_task(_talk(each, turn, skipped, due_s))


async def _talk(
    each: ScriptedConversation, turn: SendTurn, skipped: Callable[[int], None], due_s: float | None
) -> None:
    before: list[tuple[str, str]] = []
    for i, said in enumerate(each.turns):
        answer = await turn(tuple(before), said, due_s if i == 0 else None)
        if answer is None:
            skipped(len(each.turns) - i - 1)
            return
        before.append((said, answer))


def _words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choices(_WORDS, k=count))
