"""Metrics as Prometheus reads them, each also under the name that dashboards for vLLM look for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..metrics import Declaration, Histogram, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OURS = "kvilt_"
# What vLLM counts too, less its prefix; some come with later parts of kvilt, and are told as soon as they are counted.
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


def rendered(metrics: Metrics, model: str) -> str:
    """The text format; aliases carry the model's name, as they do there."""
    values = metrics.snapshot()
    lines: list[str] = []
    for declaration in metrics.declarations:
        name, series = declaration.name, values[declaration.name]["series"]
        if not series and not declaration.labels and not isinstance(declaration, Histogram):
            series = [{"labels": {}, "value": 0}]  # nothing was counted, and dashboards want to see that
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
