"""One attack with everything around it: calm before, the attack, what remains; and the table of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .client import Answer, Client
from .serving import ADMIN, Serving

CALM_S, LEAST_S, AFTER_S = 5.0, 5.0, 6.0
ATTACKER, VICTIM = "sk-attacker", "sk-victim"
FILL_REQUESTS = 60
MIB = 1 << 20


@dataclass
class Site:
    """A server under attack, as the attacker and the victim reach it."""

    server: Serving
    attacker: Client
    victim: Client
    seconds: float  # that an attack may last
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, server: Serving, seconds: float) -> Site:
        def client(key: str) -> Client:
            return Client(server.host, server.port, key)

        return cls(server, client(ATTACKER), client(VICTIM), seconds)


Run = Callable[[Site], Awaitable[str]]  # says how the server answered


@dataclass(frozen=True, slots=True)
class Attack:
    """One item of the list of attacks."""

    name: str
    item: str  # its number in the list
    what: str
    run: Run
    options: tuple[str, ...] = ()  # more of them for the server


@dataclass(frozen=True, slots=True)
class Result:
    """What one attack did."""

    attack: Attack
    outcome: str
    calm_pause_ms: float
    pause_ms: float
    own_pause_ms: float | None  # by the server's own gauge
    median_ratio: float
    worst_ratio: float
    victim_failed: int
    victim_asked: int
    before_mib: float
    peak_mib: float
    after_mib: float

    @property
    def remaining(self) -> float:
        """Memory that stays, in percent of before."""
        return 100 * (self.after_mib / self.before_mib - 1)


async def measured(server: Serving, attack: Attack, seconds: float) -> Result:
    """Run one attack against a fresh server."""
    site = Site.of(server, seconds)
    asked: list[tuple[float, Answer]] = []
    with polled(server) as pauses, sampled(server) as memory:
        await _warm(site)
        await _fill(site)
        victim = asyncio.create_task(_ordinary(site.victim, asked))
        began_s = time.monotonic()
        await asyncio.sleep(CALM_S)
        attack_s, before = time.monotonic(), server.rss_bytes()
        try:
            async with asyncio.timeout(seconds + 60):
                outcome = await attack.run(site)
        except TimeoutError:
            outcome = "not over in time"
        await asyncio.sleep(max(0.0, attack_s + LEAST_S - time.monotonic()))
        over_s = time.monotonic()
        await asyncio.sleep(AFTER_S)
        victim.cancel()
        gauge = await _gauge(site)
        after = server.rss_bytes()
        outcome = outcome if server.alive else f"the server died; {outcome}"
    peak = max([before, *(size for at, size in memory if attack_s <= at)])
    calm = [answer.seconds for at, answer in asked if began_s <= at < attack_s and answer.status == 200]
    during = [answer for at, answer in asked if at + answer.seconds > attack_s and at < over_s]
    times = [answer.seconds for answer in during] or [over_s - attack_s]  # none was answered at all
    base = statistics.median(calm) if calm else float("nan")
    site.attacker.close(), site.victim.close()
    return Result(
        attack,
        "; ".join([outcome, *site.notes]),
        1000 * _worst(pauses, began_s, attack_s),
        1000 * _worst(pauses, attack_s, over_s),
        gauge,
        statistics.median(times) / base,
        max(times) / base,
        sum(answer.status != 200 for answer in during),
        len(during),
        before / MIB,
        peak / MIB,
        after / MIB,
    )


async def _warm(site: Site) -> None:
    for client in (site.victim, site.attacker):
        for _ in range(3):
            await client.post("/v1/completions", body("Warm up", 8))


async def _fill(site: Site) -> None:
    """Use every page of KV once: memory that is mapped and was never touched is not there yet."""
    for number in range(FILL_REQUESTS):
        pages = (await site.victim.get("/v1/kv/state")).json.get("pages") or {}
        if pages.get("used", 0) + pages.get("kept", 0) >= 0.97 * pages.get("total", 0):
            return
        ids = [100 + (number * 7919 + i * 31) % 200 for i in range(768)]
        await (site.victim, site.attacker)[number % 2].post("/v1/completions", {"prompt": ids, "max_tokens": 1})


def body(prompt: str, tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


async def _ordinary(client: Client, asked: list[tuple[float, Answer]]) -> None:
    """One small request after the other, as fast as they are answered."""
    while True:
        at = time.monotonic()
        asking = asyncio.ensure_future(
            client.post("/v1/completions", body(f"Question {len(asked)}: what is the sum of", 12))
        )
        try:
            asked.append((at, await asyncio.shield(asking)))
        except asyncio.CancelledError:  # the last one counts as long as it took until now
            asking.cancel()
            asked.append((at, Answer(0, b"", time.monotonic() - at)))
            raise
        if asked[-1][1].status != 200:
            await asyncio.sleep(0.1)


async def _gauge(site: Site) -> float | None:
    """The longest pause that the server itself has seen, in milliseconds, if it says so."""
    client = Client(site.server.host, site.server.port, ADMIN, timeout_s=5)
    text = (await client.get("/metrics")).body.decode(errors="replace")
    client.close()
    found = re.findall(r"^kvilt_\w*loop\w*(?:pause|lag|block)\w*(?:max|longest)\w*(?:\{[^}]*\})? (\S+)$", text, re.M)
    return 1000 * max(map(float, found)) if found else None


@contextlib.contextmanager
def polled(server: Serving) -> Iterator[Path]:
    """The file in which another process notes how long `/health` took."""
    path = server.folder / "pauses"
    command = [sys.executable, str(Path(__file__).with_name("poll.py")), server.host, str(server.port), str(path)]
    poller = subprocess.Popen(command)
    try:
        yield path
    finally:
        poller.kill()
        poller.wait()


def _worst(path: Path, start_s: float, stop_s: float) -> float:
    """The longest that an answer of `/health` took which was asked for in a span of time."""
    worst, last_s = 0.0, start_s
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            at, took = map(float, line.split())
            last_s = max(last_s, at + took) if at < stop_s else last_s
            if at + took > start_s and at < stop_s:
                worst = max(worst, took)
    return max(worst, stop_s - last_s)  # the last one may still be waited for


@contextlib.contextmanager
def sampled(server: Serving, every_s: float = 0.1) -> Iterator[list[tuple[float, int]]]:
    """Memory of the server, noted as long as the loop turns."""
    found: list[tuple[float, int]] = []

    async def note() -> None:
        while True:
            found.append((time.monotonic(), server.rss_bytes()))
            await asyncio.sleep(every_s)

    task = asyncio.ensure_future(note())
    try:
        yield found
    finally:
        task.cancel()


_TITLES = ("attack", "worst pause (calm)", "victim p50, worst", "failed", "RSS before, peak, after", "stays", "outcome")


def cells(result: Result) -> tuple[str, ...]:
    own = f", own {result.own_pause_ms:.0f}" if result.own_pause_ms is not None else ""
    return (
        f"{result.attack.item} {result.attack.what}",
        f"{result.pause_ms:.0f} ms ({result.calm_pause_ms:.0f}{own})",
        f"{result.median_ratio:.1f}x, {result.worst_ratio:.1f}x",
        f"{result.victim_failed} of {result.victim_asked}",
        f"{result.before_mib:.0f}, {result.peak_mib:.0f}, {result.after_mib:.0f} MiB",
        f"{result.remaining:+.0f} %",
        result.outcome,
    )


def table(results: list[Result], markdown: bool) -> str:
    rows = [_TITLES, *map(cells, results)]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([lines[0], "|" + "---|" * len(_TITLES), *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(_TITLES))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
