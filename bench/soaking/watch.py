"""What is sampled while the soak runs, and whether it stays flat in the second half."""

from __future__ import annotations

import asyncio
import csv
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from hostile.client import Client
from hostile.serving import Serving


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the server."""

    second: float
    requests: int
    rss_mib: float
    threads: int
    descriptors: int
    files: int  # in its folder
    pages: int  # that are held
    handles: int
    running: int
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Flat:
    """Whether one of these stayed as it was."""

    name: str
    middle: float
    growth: float  # over the second half, by a straight line through it
    allowed: float

    @property
    def holds(self) -> bool:
        return self.growth <= self.allowed


async def look(server: Serving, admin: Client, requests: int, began_s: float) -> Sample:
    text = (await admin.get("/metrics")).body.decode(errors="replace")
    pages = ((await admin.get("/v1/kv/state")).json.get("pages") or {}).get("used", -1)
    return Sample(
        round(time.monotonic() - began_s, 2),
        requests,
        server.rss_bytes() / (1 << 20),
        server.threads(),
        server.files(),
        sum(1 for path in server.folder.rglob("*") if path.is_file()),
        pages,
        _gauge(text, "kvilt_kv_handles"),
        _gauge(text, "kvilt_num_requests_running"),
        server.cpu_s(),
    )


def _gauge(text: str, name: str) -> int:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
    return int(float(found[1])) if found else -1


async def settled(server: Serving, admin: Client, requests: int, began_s: float) -> Sample:
    """A look when nothing runs any more, or after a while."""
    for _ in range(100):
        sample = await look(server, admin, requests, began_s)
        if sample.running <= 0 and sample.handles <= 0:
            break
        await asyncio.sleep(0.2)
    return sample


# What may grow over the second half: a share of what there is, and something on top for steps of an allocator.
_ALLOWED = {"rss_mib": (0.03, 24.0), "threads": (0.0, 2.0), "descriptors": (0.1, 8.0), "files": (0.05, 4.0)}
_ALLOWED |= {"pages": (0.1, 16.0), "handles": (0.1, 4.0)}


def flatness(samples: Sequence[Sample]) -> list[Flat]:
    """A line through the second half of each measure."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return []
    times = [sample.second for sample in half]
    found = []
    for name, (share, more) in _ALLOWED.items():
        values = [float(getattr(sample, name)) for sample in half]
        slope = statistics.linear_regression(times, values).slope
        middle = statistics.fmean(values)
        found.append(Flat(name, middle, slope * (times[-1] - times[0]), share * middle + more))
    return found


def quarters(ordinary: Sequence[tuple[float, float]], share: float = 0.99) -> list[float]:
    """A quantile of the latency of ordinary requests in each quarter of the run, in seconds."""
    ordered = sorted(ordinary)
    size = len(ordered) // 4
    if size < 25:
        return []
    parts = [sorted(took for _, took in ordered[i * size : (i + 1) * size]) for i in range(4)]
    return [part[int(share * (len(part) - 1))] for part in parts]


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([one.name for one in fields(Sample)])
        writer.writerows(map(astuple, samples))


def plot(path: Path, samples: Sequence[Sample]) -> None:
    """A small picture of every measure over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(_ALLOWED)
    figure, axes = pyplot.subplots(len(names), 1, sharex=True, figsize=(8, 1.4 * len(names)))
    for axis, name in zip(axes, names, strict=True):
        axis.plot([sample.second / 60 for sample in samples], [getattr(sample, name) for sample in samples], lw=0.8)
        axis.set_ylabel(name, fontsize=8)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
