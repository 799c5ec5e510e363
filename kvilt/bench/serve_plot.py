"""Plots a run of `kvilt bench serve`. It needs matplotlib, which is the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Unsupported
from .serve_client import RequestTrace
from .serve_stats import output_tokens, ttft_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_plot() -> None:
    """Refuse a plot without matplotlib, before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise Unsupported("--plot needs matplotlib; install it with: pip install 'kvilt[plot]'") from None


def plot(traces: Sequence[RequestTrace], title: str, path: str) -> None:
    """Plot the distribution of latencies, and tokens over time; the suffix of the file gives the format."""
    from matplotlib.figure import Figure

    fine = [trace for trace in traces if trace.error is None]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    first, gap, flow = figure.subplots(1, 3)
    _shares(first, [t for trace in fine if (t := ttft_s(trace)) is not None], "time to first token, ms")
    _shares(gap, [b - a for trace in fine for a, b in pairwise(trace.stamps_s)], "inter-token latency, ms")
    _flow(flow, fine)
    save(figure, path)


def save(figure: Figure, path: str) -> None:
    """Write a figure; the suffix of the file gives the format."""
    try:
        figure.savefig(path)
    except ValueError as error:  # an ending that names no format
        raise Unsupported(f"--plot {path}: {str(error)[:120]}") from None


def _shares(axes: Axes, seconds: Sequence[float], label: str) -> None:
    """The cumulative distribution."""
    values = np.sort(np.asarray(seconds, np.float64)) * 1000
    axes.step(values, (np.arange(len(values)) + 1) / max(1, len(values)), where="post")
    for share in (0.5, 0.9, 0.99):
        axes.axhline(share, linewidth=0.5, color="gray")
    axes.set(xlabel=label, ylabel="share of values", ylim=(0, 1.01))


def _flow(axes: Axes, traces: Sequence[RequestTrace]) -> None:
    """Tokens per second over time; a piece of text counts as its share of the answer's tokens."""
    started_s = min((trace.started_s for trace in traces), default=0.0)
    times = [stamp - started_s for trace in traces for stamp in trace.stamps_s]
    weights = [output_tokens(trace) / len(trace.stamps_s) for trace in traces for _ in trace.stamps_s]
    seconds = max(1, int(max(times, default=0.0)) + 1)
    counts, edges = np.histogram(times, bins=seconds, range=(0, seconds), weights=weights)
    axes.stairs(counts, edges)
    axes.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
