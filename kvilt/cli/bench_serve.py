"""`kvilt bench serve`: what a server that speaks the OpenAI API gives its clients, kvilt's or anybody's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import KviltError
from .bench_serve_http import Failure, Target, Trace, ask, first_model
from .bench_serve_load import Shape, drive
from .bench_serve_plot import check_plot, plot
from .bench_serve_stats import Goal, Spread, Summary, summary
from .progress import tracked

# What servers may not know; each is left out, with a note, when a server refuses a request that has it.
_OPTIONAL: Mapping[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class ServerUnusable(KviltError):
    """The server at an address cannot be measured."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The body of a request but for what is said in it."""

    model: str
    chat: bool
    max_tokens: int
    seed: int
    extra: Mapping[str, Any]

    def body(self, before: Sequence[tuple[str, str]], said: str) -> dict[str, Any]:
        """A turn behind those before it."""
        common = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": self.seed,
            "stream": True,
            **self.extra,
        }
        if not self.chat:
            return {**common, "prompt": "".join(f"{asked}{answer}\n" for asked, answer in before) + said}
        spoken = [(role, text) for pair in before for role, text in zip(("user", "assistant"), pair, strict=True)]
        return {**common, "messages": [{"role": role, "content": text} for role, text in (*spoken, ("user", said))]}


@dataclass(frozen=True, slots=True)
class Run:
    """A finished measurement."""

    model: str
    traces: list[Trace]
    skipped: int
    left_out: list[str]


async def measure(
    target: Target,
    shape: Shape,
    model: str | None,
    show: Callable[[int, str], None],
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Run:
    """Find out how the server wants to be asked, then ask it everything; `extra` are fields of its own."""
    optional = {**_OPTIONAL, **extra}
    try:
        name = model or await first_model(target)
    except (Failure, OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as failure:
        raise ServerUnusable(f"{target.url}: {failure}; is a server running there?") from None
    dialect = await _agree(target, Dialect(name, target.chat, shape.max_tokens, shape.seed, optional))
    traces: list[Trace] = []
    skipped = 0

    async def turn(before: Sequence[tuple[str, str]], said: str, due_s: float | None) -> str | None:
        trace = await ask(target, dialect.body(before, said), due_s)
        traces.append(trace)
        show(len(traces) + skipped, trace.error or "")
        return trace.text if trace.error is None else None

    def give_up(turns: int) -> None:
        nonlocal skipped
        skipped += turns

    await drive(shape, turn, give_up)
    return Run(name, traces, skipped, [key for key in optional if key not in dialect.extra])


async def _agree(target: Target, dialect: Dialect) -> Dialect:
    """Ask a short question, which also warms the server up, without whatever optional field it refuses."""
    while True:
        short = replace(dialect, max_tokens=2)
        trace = await ask(target, short.body((), "Hello"))
        if trace.error is None or trace.error == "empty answer":
            return dialect
        unknown = trace.error in ("HTTP 400", "HTTP 422")
        named = [key for key in dialect.extra if key in trace.message] or list(dialect.extra)
        if not unknown or not named:
            raise ServerUnusable(f"{target.url} refuses a first request ({trace.error}): {trace.message}")
        dialect = replace(dialect, extra={k: v for k, v in dialect.extra.items() if k != named[0]})


def bench_serve(
    target: Target, shape: Shape, goal: Goal, model: str | None, as_json: bool, picture: str | None
) -> None:
    """Measure a server and print what was found."""
    if picture is not None:
        check_plot()
    with tracked("asking", shape.requests) as show:
        run = asyncio.run(measure(target, shape, model, show))
    found = summary(run.traces, goal, run.skipped)
    if picture is not None:
        plot(run.traces, f"{run.model} · {shape.workload} · {shape.arrivals}", picture)
    if as_json:
        report = {"url": target.url, "model": run.model, "chat": target.chat, "left_out": run.left_out}
        print(json.dumps({**report, "shape": asdict(shape), "goal": asdict(goal), "result": asdict(found)}))
    else:
        _show(run, shape, goal, found)


def _show(run: Run, shape: Shape, goal: Goal, found: Summary) -> None:
    console = Console()
    title = f"{run.model} · {shape.workload} · {shape.arrivals} · {found.requests} requests in {found.seconds:.1f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("milliseconds")
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    for name, values in (
        ("time to first token", found.ttft_ms),
        ("inter-token latency", found.itl_ms),
        ("time per output token", found.tpot_ms),
        ("end to end", found.e2e_ms),
    ):
        table.add_row(name, *_cells(values))
    console.print(table)
    for line in _lines(run, goal, found):
        console.print(line, highlight=False)


def _cells(values: Spread | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p99, values.most)]


def _lines(run: Run, goal: Goal, found: Summary) -> list[str]:
    """The rest of what there is to say, one sentence a line."""
    lines = [
        f"output {found.output_tokens_per_s:.1f} tokens/s, {found.requests_per_s:.2f} requests/s, "
        f"{found.output_tokens} tokens out, {_known(found.prompt_tokens)} in ({_known(found.cached_tokens)} cached)"
    ]
    if found.good is not None:
        limits = [f"{name} {ms:g} ms" for name, ms in (("TTFT", goal.ttft_ms), ("ITL", goal.itl_ms)) if ms is not None]
        share = f"{found.good} of {found.requests}"
        lines.append(f"goodput {found.good_requests_per_s or 0:.2f} requests/s: {share} within {', '.join(limits)}")
    if found.counted_by == "chunks":
        lines.append("the server does not say how many tokens it wrote: pieces of text were counted instead")
    if run.left_out:
        lines.append(f"left out because the server refuses it: {', '.join(run.left_out)}")
    if found.errors:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in found.errors.items())
        lines.append(
            f"errors: {kinds}" + (f"; {found.skipped} turns behind them were not asked" if found.skipped else "")
        )
        message = next(trace.message for trace in run.traces if trace.error is not None)
        lines.append(f"the first one: {message}")
    return lines


def _known(count: int | None) -> str:
    return "unknown" if count is None else str(count)
