"""Latency and throughput from the times of requests. Pure arithmetic: it knows no clock and no server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .serve_client import RequestTrace


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a request must meet to count for goodput; None is no limit."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """All numbers of a run. Rates are over `seconds`, from the first request to the last answer."""

    requests: int
    answered: int
    skipped: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    counted_by: str  # "usage", or "chunks" where a server does not say how many tokens it wrote
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float | None
    good: int | None
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None


def summary(traces: Sequence[RequestTrace], slo: SLO, skipped: int = 0) -> LoadSummary:
    """The numbers of these requests; interrupted answers count as errors only."""
    fine = [trace for trace in traces if trace.error is None]
    seconds = max((t.ended_s for t in traces), default=0.0) - min((t.started_s for t in traces), default=0.0)
    tokens = sum(map(output_tokens, fine))
    good = sum(is_good(trace, slo) for trace in fine) if slo.given else None
    gaps = [later - earlier for trace in fine for earlier, later in pairwise(trace.stamps_s)]
    return LoadSummary(
        requests=len(traces),
        answered=len(fine),
        skipped=skipped,
        errors=dict(Counter(trace.error for trace in traces if trace.error is not None).most_common()),
        seconds=seconds,
        prompt_tokens=_total([trace.prompt_tokens for trace in fine]),
        cached_tokens=_total([trace.cached_tokens for trace in fine]),
        output_tokens=tokens,
        counted_by="usage" if all(trace.output_tokens is not None for trace in fine) else "chunks",
        output_tokens_per_s=_rate(tokens, seconds),
        requests_per_s=_rate(len(fine), seconds),
        good_requests_per_s=None if good is None else _rate(good, seconds),
        good=good,
        ttft_ms=spread([t for trace in fine if (t := ttft_s(trace)) is not None]),
        itl_ms=spread(gaps),
        tpot_ms=spread([t for trace in fine if (t := tpot_s(trace)) is not None]),
        e2e_ms=spread([trace.ended_s - trace.started_s for trace in fine]),
    )


def ttft_s(trace: RequestTrace) -> float | None:
    """Seconds to the first text."""
    return trace.stamps_s[0] - trace.started_s if trace.stamps_s else None


def output_tokens(trace: RequestTrace) -> int:
    """Output tokens as the server counts them, else the number of events with text, which may hold several tokens."""
    return len(trace.stamps_s) if trace.output_tokens is None else trace.output_tokens


def tpot_s(trace: RequestTrace) -> float | None:
    """Seconds per token after the first one, over a whole answer."""
    tokens = output_tokens(trace)
    if len(trace.stamps_s) < 2 or tokens < 2:
        return None
    return (trace.stamps_s[-1] - trace.stamps_s[0]) / (tokens - 1)


def is_good(trace: RequestTrace, slo: SLO) -> bool:
    """Whether an answer meets the SLO: its first text in time, and later tokens fast enough on average."""
    first, each = ttft_s(trace), tpot_s(trace)
    late = slo.ttft_ms is not None and (first is None or first * 1000 > slo.ttft_ms)
    slow = slo.itl_ms is not None and each is not None and each * 1000 > slo.itl_ms
    return trace.error is None and not late and not slow


def spread(seconds: Sequence[float]) -> Percentiles | None:
    """Mean, percentiles and maximum; None without values."""
    if not seconds:
        return None
    ms = np.asarray(seconds, np.float64) * 1000
    p50, p90, p99 = (float(value) for value in np.percentile(ms, (50, 90, 99)))
    return Percentiles(float(ms.mean()), p50, p90, p99, float(ms.max()))


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
