"""Metrics in Prometheus' text format, under our names and under vLLM's; spans through the SDK's own exporter."""

from __future__ import annotations

import re

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running import QUESTION, Running, until

from kvilt.metrics import Counter, Gauge, Histogram, Metrics
from kvilt.server import tracing
from kvilt.server.metrics import prometheus_text

SAMPLE = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-z_]+="(\\.|[^"\\])*",?)+\})? [-+0-9.eInf]+')
THEIRS = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "request_queue_time_seconds_bucket",
    "request_success_total",
    "num_preemptions_total",
]


def test_every_number_is_there_under_both_names(server: Running) -> None:
    server.openai().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    with server.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert all(line.startswith("#") or SAMPLE.fullmatch(line) for line in lines)
    assert int(re.findall(r"^kvilt_computed_tokens_total (\d+)$", answer.text, re.MULTILINE)[0]) > 0  # of the executor
    for name in THEIRS:
        ours = [line for line in lines if re.match(rf"kvilt_{name}[ {{]", line)]
        theirs = [line for line in lines if re.match(rf'vllm:{name}{{.*model_name="tiny"', line)]
        assert ours, name
        assert len(ours) == len(theirs), name
        assert [line.rpartition(" ")[2] for line in ours] == [line.rpartition(" ")[2] for line in theirs]
    for own in ("kvilt_kv_forks_total", "kvilt_kv_handles", "kvilt_kv_bytes", "kvilt_http_requests_total"):
        assert any(line.startswith(own) for line in lines), own


def test_the_text_format() -> None:
    counter, gauge = Counter("a_total", "Of a\nkind.", ("x",)), Gauge("b", "B.")
    histogram = Histogram("c_seconds", "C.", (), (0.5, 1.0))
    metrics = Metrics([counter, gauge, histogram])
    metrics.add(counter, 2, x='q"\\\n')
    for value in (0.25, 0.75, 3):
        metrics.observe(histogram, value)
    assert prometheus_text(metrics, "m").splitlines() == [
        "# HELP a_total Of a\\nkind.",
        "# TYPE a_total counter",
        'a_total{x="q\\"\\\\\\n"} 2',
        "# HELP b B.",
        "# TYPE b gauge",
        "b 0",
        "# HELP c_seconds C.",
        "# TYPE c_seconds histogram",
        'c_seconds_bucket{le="0.5"} 1',
        'c_seconds_bucket{le="1"} 2',
        'c_seconds_bucket{le="+Inf"} 3',
        "c_seconds_sum 4",
        "c_seconds_count 3",
    ]


def test_a_request_is_a_span(server: Running, exported: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = {"messages": QUESTION, "max_tokens": 4, "temperature": 0.5, "seed": 1}
    with server.http() as http:
        http.post("/v1/chat/completions", json=asked, headers={"traceparent": parent, "x-request-id": "me"})
        http.post("/v1/chat/completions", json={**asked, "stream": True})
        http.post("/v1/completions", json={"prompt": "x", "bad": 1})
    until(lambda: len(exported.get_finished_spans()) == 3)
    whole, stream, refused = exported.get_finished_spans()
    assert whole.name == stream.name == "/v1/chat/completions"
    assert whole.attributes is not None
    assert f"{whole.context.trace_id:032x}" in parent  # type: ignore[union-attr]
    assert whole.attributes["kvilt.request_id"] == "me"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.request.max_tokens"] == 4
    for one in (whole, stream):
        assert one.attributes is not None
        assert one.attributes["gen_ai.usage.output_tokens"] == 4
        assert one.attributes["gen_ai.operation.name"] == "chat"
    assert refused.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400


def test_without_opentelemetry_nothing_is_traced(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "traced", False)
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
