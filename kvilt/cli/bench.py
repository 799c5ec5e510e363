"""`kvilt bench`: measure a model on this machine and print the numbers beside the limits of the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench.throughput import BenchPlan, BenchReport, measure
from ..llm import load
from .progress import bars, tracked


def bench(model: str, plan: BenchPlan, as_json: bool, config: dict[str, Any]) -> None:
    """Load a model, run the workloads, print what was found."""
    with bars() as shown:
        llm = load(model, on_fetch=shown.fetching, **config)
    with llm:
        report = measure(model, llm.executor, plan, config, tracked)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        _show(report, plan)


def _show(report: BenchReport, plan: BenchPlan) -> None:
    title = f"{report.model} · {report.backend} · {report.threads} threads · median of {plan.runs}"
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
