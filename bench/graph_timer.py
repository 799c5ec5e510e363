"""How long the card takes for what is launched, replayed as a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def graph_us(work: Callable[..., Any], *args: Any, launches: int = 1, repeat: int = 5) -> float:
    """Microseconds of one of the `launches` of `work(*args)`: the median of some replays."""
    work(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*args)
    graph.replay()
    times = []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / launches)
    return statistics.median(times)
