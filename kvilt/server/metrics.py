"""What a server counts besides its engine: the counters, pauses of the event loop, and the Prometheus text format."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..metrics import Counter, Declaration, Gauge, Histogram, Metrics

HTTP_REQUESTS = Counter("kvilt_http_requests_total", "HTTP requests that ended.", ("route", "method", "status"))
HTTP_SECONDS = Histogram("kvilt_http_request_seconds", "From a request's headers to its end.", ("route",))
LOOP_PAUSE_SECONDS = Histogram(
    "kvilt_event_loop_pause_seconds",
    "How late the event loop was, looked at every 5 ms.",
    (),
    (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0),
)
LOOP_PAUSE_MAX_SECONDS = Gauge("kvilt_event_loop_pause_max_seconds", "The longest pause of the last minute.")
OFFLOAD_RUNNING = Gauge("kvilt_offload_running", "Work off the event loop that runs.", ("kind",))
OFFLOAD_WAITING = Gauge("kvilt_offload_waiting", "Work off the event loop that waits for a thread.", ("kind",))

SERVER_METRICS = (
    HTTP_REQUESTS,
    HTTP_SECONDS,
    LOOP_PAUSE_SECONDS,
    LOOP_PAUSE_MAX_SECONDS,
    OFFLOAD_RUNNING,
    OFFLOAD_WAITING,
)

TICK_S = 0.005
WINDOW_S = 60.0
_PARTS = 12  # of the window: each part has its own longest pause


class EventLoopMonitor:
    """A task that sleeps and measures how late it wakes: the time for which something blocked the event loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._longest: deque[tuple[float, float]] = deque(maxlen=_PARTS)  # start of a part, its longest pause

    def longest_s(self) -> float:
        """The longest pause of the last minute."""
        since_s = self._clock() - WINDOW_S
        return max((pause_s for began_s, pause_s in self._longest if began_s >= since_s), default=0.0)

    def note(self, pause_s: float) -> None:
        """Record a pause that has just ended."""
        now_s = self._clock()
        self._metrics.observe(LOOP_PAUSE_SECONDS, pause_s)
        if not self._longest or now_s - self._longest[-1][0] >= WINDOW_S / _PARTS:
            self._longest.append((now_s, pause_s))
        elif pause_s > self._longest[-1][1]:
            self._longest[-1] = (self._longest[-1][0], pause_s)

    def publish(self) -> None:
        """Set the gauge to the current value."""
        self._metrics.set(LOOP_PAUSE_MAX_SECONDS, self.longest_s())

    async def run(self) -> None:
        """Watch the event loop that runs this task, until it is cancelled."""
        while True:
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.note(max(0.0, self._clock() - due_s))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS = "kvilt_"
# Metrics that vLLM has too, without its prefix. Each gets an alias as soon as kvilt declares it.
_THEIRS = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_success_total",
        "num_preemptions_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "lora_requests_info",
    }
)


def prometheus_text(metrics: Metrics, model: str) -> str:
    """The Prometheus text format, with aliases under vLLM's names; aliases have vLLM's label `model_name`."""
    values = metrics.snapshot()
    lines: list[str] = []
    for declaration in metrics.declarations:
        name, series = declaration.name, values[declaration.name]["series"]
        if not series and not declaration.labels and not isinstance(declaration, Histogram):
            series = [{"labels": {}, "value": 0}]  # dashboards expect a zero before the first count
        lines += _metric(name, declaration, series, {})
        if (theirs := name.removeprefix(_OURS)) in _THEIRS:
            lines += _metric(f"vllm:{theirs}", declaration, series, {"model_name": model})
    return "\n".join(lines) + "\n"


def _metric(
    name: str, declaration: Declaration, series: Sequence[Mapping[str, Any]], more: Mapping[str, str]
) -> Iterator[str]:
    yield f"# HELP {name} {_escaped(declaration.help)}"
    yield f"# TYPE {name} {type(declaration).__name__.lower()}"
    for one in series:
        labels = {**one["labels"], **more}
        if isinstance(declaration, Histogram):
            yield from _histogram(name, one, labels)
        else:
            yield f"{name}{_labels(labels)} {_number(one['value'])}"


def _histogram(name: str, one: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[str]:
    for bound, count in one["buckets"]:
        yield f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {count}"
    yield f"{name}_sum{_labels(labels)} {_number(one['sum'])}"
    yield f"{name}_count{_labels(labels)} {one['count']}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))


_SERIES = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def labelled(text: str, label: str, value: str) -> str:
    """Metrics of one of several processes, each with a label; without their comments, which would repeat."""
    own = _labels({label: value})[1:-1]
    lines = []
    for line in text.splitlines():
        found = None if line.startswith("#") else _SERIES.fullmatch(line)
        if found is not None:
            lines.append(f"{found['name']}{{{','.join(filter(None, (found['labels'], own)))}}} {found['value']}\n")
    return "".join(lines)
