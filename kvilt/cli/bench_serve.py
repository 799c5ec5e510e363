"""`kvilt bench serve`: latency and throughput that the clients of a server see."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ..bench.serve import LoadRun, measure
from ..bench.serve_client import ServerTarget
from ..bench.serve_load import LoadPlan
from ..bench.serve_plot import check_plot, plot
from ..bench.serve_stats import SLO, LoadSummary, Percentiles, summary
from .progress import tracked


def bench_serve(
    target: ServerTarget, plan: LoadPlan, slo: SLO, model: str | None, as_json: bool, picture: str | None
) -> None:
    """Measure a server and print what was found."""
    if picture is not None:
        check_plot()
    with tracked("asking", plan.requests) as show:
        run = asyncio.run(measure(target, plan, model, show))
    found = summary(run.traces, slo, run.skipped)
    if picture is not None:
        plot(run.traces, f"{run.model} · {plan.workload} · {plan.arrivals}", picture)
    if as_json:
        report = {"url": target.url, "model": run.model, "chat": target.chat, "left_out": run.left_out}
        print(json.dumps({**report, "shape": asdict(plan), "goal": asdict(slo), "result": asdict(found)}))
    else:
        _show(run, plan, slo, found)


def _show(run: LoadRun, plan: LoadPlan, slo: SLO, found: LoadSummary) -> None:
    console = Console()
    title = f"{run.model} · {plan.workload} · {plan.arrivals} · {found.requests} requests in {found.seconds:.1f} s"
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
    for line in _lines(run, slo, found):
        console.print(line, highlight=False)


def _cells(values: Percentiles | None) -> list[str]:
    if values is None:
        return ["-"] * 5
    return [f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p99, values.most)]


def _lines(run: LoadRun, slo: SLO, found: LoadSummary) -> list[str]:
    """The rest of what there is to say, one sentence a line."""
    lines = [
        f"output {found.output_tokens_per_s:.1f} tokens/s, {found.requests_per_s:.2f} requests/s, "
        f"{found.output_tokens} tokens out, {_known(found.prompt_tokens)} in ({_known(found.cached_tokens)} cached)"
    ]
    if found.good is not None:
        limits = [f"{name} {ms:g} ms" for name, ms in (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms)) if ms is not None]
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
