"""The samples of a run, and how they are shown: medians, ratios, and what disturbed them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from .workloads import FRESH

TORCH, BEYOND = "import torch", "kvilt beyond torch"


@dataclass(slots=True)
class Series:
    """All samples of one run: values by workload and engine, and what disturbed them."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    disturbed: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    noise: list[dict[str, float]] = field(default_factory=list)
    again: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    limits: list[dict[str, float] | None] = field(default_factory=list)  # of the machine, before and after

    def add(self, workload: str, engine: str, value: float, answer: dict[str, Any]) -> None:
        """A sample with the noise around it. A disturbed one is kept apart: it counts only where there is no other."""
        kept = self.disturbed if answer["disturbed"] else self.values
        kept.setdefault(workload, {}).setdefault(engine, []).append(value)
        self.noise.append(answer["noise"])
        self.again += answer["tries"] - 1
        if len(tokens := answer.get("tokens", [])) > len(self.tokens.get(engine, [])):
            self.tokens[engine] = tokens

    def median(self, workload: str, engine: str) -> float | None:
        values = self.values.get(workload, {}).get(engine) or self.disturbed.get(workload, {}).get(engine)
        return statistics.median(values) if values else None

    def beyond_torch(self, workload: str) -> float | None:
        """What kvilt takes more than importing torch alone."""
        ours, torch = self.median(workload, "kvilt"), self.median(workload, TORCH)
        return None if ours is None or torch is None else ours - torch

    def doubtful(self, workload: str, engine: str) -> bool:
        """Whether every sample was disturbed."""
        return not self.values.get(workload, {}).get(engine) and engine in self.disturbed.get(workload, {})


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(series: Series, workload: str, engine: str) -> str:
    value = series.beyond_torch(workload) if engine == BEYOND else series.median(workload, engine)
    if value is None or (engine == BEYOND and workload not in FRESH):
        return "-"
    doubt = " ?" if any(series.doubtful(workload, one) for one in _behind(engine)) else ""
    shown = f"{value:.2f} s" if workload == "cold" else f"{value:.0f} MB" if workload == "memory" else f"{value:.1f}"
    return shown + doubt


def _behind(engine: str) -> tuple[str, ...]:
    return ("kvilt", TORCH) if engine == BEYOND else (engine,)


def _ratio(series: Series, name: str, peers: list[str]) -> str:
    """kvilt against the best of some peers; with a mark where it rests on disturbed samples alone."""
    ours, theirs = _ours(series, name), _best(series, name, peers)
    doubt = " ?" if any(series.doubtful(name, one) for one in ("kvilt", *peers)) else ""
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}x{doubt}"


def report(series: Series, names: list[str], engines: list[str]) -> str:
    """Both tables: what each reached, and kvilt against each and against the best."""
    head = ["", *names]
    extra = [BEYOND, TORCH] if any(name in FRESH for name in names) else []
    shown = [[engine, *[_number(series, name, engine) for name in names]] for engine in engines + extra]
    parts = [table(head, shown)]
    peers = [engine for engine in engines if engine != "kvilt"]
    if "kvilt" in engines and peers:
        rows = [[f"kvilt / {peer}", *[_ratio(series, name, [peer]) for name in names]] for peer in peers]
        if len(peers) > 1:
            rows.append(["kvilt / best", *[_ratio(series, name, peers) for name in names]])
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def _ours(series: Series, name: str) -> float | None:
    """kvilt's figure for the ratios: without what importing torch costs, where that counts."""
    return series.beyond_torch(name) if name in FRESH else series.median(name, "kvilt")


def _best(series: Series, name: str, peers: list[str]) -> float | None:
    found = [value for peer in peers if (value := series.median(name, peer)) is not None]
    return (min if name in FRESH else max)(found, default=None)


def _count(samples: dict[str, dict[str, list[float]]]) -> int:
    return sum(len(values) for engines in samples.values() for values in engines.values())


def noise_line(series: Series, busy: float) -> str:
    others = [noise["others"] for noise in series.noise] or [0.0]
    steal = [noise["steal"] for noise in series.noise] or [0.0]
    return (
        f"noise: {busy:.0%} busy before; other processes used {statistics.mean(others):.2f} cores on average, at most "
        f"{max(others):.2f}; the host took {statistics.mean(steal):.2f}, at most {max(steal):.2f}; "
        f"{series.again} samples taken again, {_count(series.disturbed)} disturbed to the end and left out "
        "(where nothing else was left: ?)"
    )


def limits_line(series: Series) -> str:
    shown = [f"{one['bytes_per_s'] / 1e9:.1f} GB/s, {one['ops_per_s'] / 1e9:.0f} GOP/s" for one in series.limits if one]
    return f"limits of the machine before and after: {'; '.join(shown)}" if shown else "limits: no extension to measure"
