"""Metrics: what is counted comes out, from many threads, and labels cannot grow without bound."""

from __future__ import annotations

import math
import threading

import pytest

from kvilt.errors import ParamError
from kvilt.metrics import OTHER, Counter, Gauge, Histogram, Metrics

TOKENS = Counter("kvilt_tokens_total", "Tokens generated.")
REQUESTS = Counter("kvilt_requests_total", "Requests by outcome.", labels=("model", "outcome"))
PAGES = Gauge("kvilt_pages_free", "Free pages.")
LATENCY = Histogram("kvilt_step_seconds", "Seconds per step.", buckets=(0.1, 1.0, 10.0))
ALL = (TOKENS, REQUESTS, PAGES, LATENCY)


def only(metrics: Metrics, name: str) -> dict[str, object]:
    (series,) = metrics.snapshot()[name]["series"]
    return dict(series)


def test_a_counter_grows_and_a_gauge_is_what_it_was_last_set_to() -> None:
    metrics = Metrics(ALL)
    metrics.add(TOKENS)
    metrics.add(TOKENS, 4)
    metrics.add(TOKENS, 0)
    metrics.set(PAGES, 7)
    metrics.set(PAGES, 3)
    assert only(metrics, "kvilt_tokens_total") == {"labels": {}, "value": 5}
    assert only(metrics, "kvilt_pages_free") == {"labels": {}, "value": 3}


def test_a_histogram_counts_up_to_each_bound_inclusive() -> None:
    metrics = Metrics(ALL)
    for value in (-1.0, 0.1, 0.5, 1.0, 9.0, 11.0):
        metrics.observe(LATENCY, value)
    entry = only(metrics, "kvilt_step_seconds")
    assert entry["buckets"] == [(0.1, 2), (1.0, 4), (10.0, 5), (math.inf, 6)]
    assert entry["count"] == 6
    assert entry["sum"] == pytest.approx(20.6)


def test_labels_make_separate_series() -> None:
    metrics = Metrics(ALL)
    metrics.add(REQUESTS, model="a", outcome="stop")
    metrics.add(REQUESTS, 2, outcome="stop", model="b")
    metrics.add(REQUESTS, model="a", outcome="stop")
    assert metrics.snapshot()["kvilt_requests_total"]["series"] == [
        {"labels": {"model": "a", "outcome": "stop"}, "value": 2},
        {"labels": {"model": "b", "outcome": "stop"}, "value": 2},
    ]


def test_past_the_cap_new_label_sets_share_one_series_and_nothing_is_lost() -> None:
    metrics = Metrics(ALL, max_label_sets=10)
    for number in range(1_000):
        metrics.add(REQUESTS, model=f"model-{number}", outcome="stop")
    metrics.add(REQUESTS, model="model-3", outcome="stop")
    series = metrics.snapshot()["kvilt_requests_total"]["series"]
    assert len(series) == 11
    assert series[3] == {"labels": {"model": "model-3", "outcome": "stop"}, "value": 2}
    assert series[-1] == {"labels": {"model": OTHER, "outcome": OTHER}, "value": 990}


def test_the_cap_holds_for_histograms_and_gauges_too() -> None:
    wait = Histogram("wait_seconds", "", labels=("user",), buckets=(1.0,))
    load = Gauge("load", "", labels=("user",))
    metrics = Metrics([wait, load], max_label_sets=2)
    for number in range(50):
        metrics.observe(wait, 0.5, user=str(number))
        metrics.set(load, number, user=str(number))
    snapshot = metrics.snapshot()
    assert [series["count"] for series in snapshot["wait_seconds"]["series"]] == [1, 1, 48]
    assert [series["value"] for series in snapshot["load"]["series"]] == [0, 1, 49]


def test_a_snapshot_carries_kind_and_help_and_is_not_touched_by_later_changes() -> None:
    metrics = Metrics(ALL)
    metrics.observe(LATENCY, 0.5)
    before = metrics.snapshot()
    metrics.observe(LATENCY, 0.5)
    metrics.add(TOKENS)
    assert before["kvilt_step_seconds"]["series"][0]["count"] == 1
    assert before["kvilt_tokens_total"] == {"kind": "counter", "help": "Tokens generated.", "series": []}
    assert [before[d.name]["kind"] for d in metrics.declarations] == ["counter", "counter", "gauge", "histogram"]


def test_two_objects_count_for_themselves() -> None:
    first, second = Metrics(ALL), Metrics(ALL)
    first.add(TOKENS)
    assert second.snapshot()["kvilt_tokens_total"]["series"] == []


def test_threads_lose_no_count() -> None:
    metrics = Metrics(ALL)

    def work() -> None:
        for _ in range(2_000):
            metrics.add(TOKENS)
            metrics.observe(LATENCY, 0.5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        entry = metrics.snapshot()["kvilt_step_seconds"]["series"]
        assert not entry or entry[0]["sum"] == entry[0]["count"] * 0.5, "a snapshot is of one moment"
    for thread in threads:
        thread.join()
    assert only(metrics, "kvilt_tokens_total")["value"] == 16_000
    assert only(metrics, "kvilt_step_seconds")["count"] == 16_000


@pytest.mark.parametrize("amount", [-1, math.nan, math.inf])
def test_a_counter_refuses_to_shrink_or_to_become_no_number(amount: float) -> None:
    with pytest.raises(ParamError, match="kvilt_tokens_total: a counter grows"):
        Metrics(ALL).add(TOKENS, amount)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_histogram_refuses_what_has_no_bucket(value: float) -> None:
    with pytest.raises(ParamError, match="finite"):
        Metrics(ALL).observe(LATENCY, value)


def test_wrong_labels_are_refused_and_leave_no_series() -> None:
    metrics = Metrics(ALL)
    for labels in ({}, {"model": "a"}, {"model": "a", "outcome": "b", "extra": "c"}):
        with pytest.raises(ParamError, match="takes the labels model, outcome"):
            metrics.add(REQUESTS, **labels)
    with pytest.raises(ParamError, match="takes the labels none, not model"):
        metrics.add(TOKENS, model="a")
    assert metrics.snapshot()["kvilt_requests_total"]["series"] == []


def test_an_undeclared_metric_and_the_wrong_verb_are_refused() -> None:
    metrics = Metrics(ALL)
    with pytest.raises(ParamError, match="unknown: is not declared here"):
        metrics.add(Counter("unknown", ""))
    with pytest.raises(ParamError, match="add takes a Counter, not a Gauge"):
        metrics.add(PAGES)  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="set takes a Gauge, not a Counter"):
        metrics.set(TOKENS, 1)  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="observe takes a Histogram, not a Gauge"):
        metrics.observe(PAGES, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "declarations",
    [
        [TOKENS, TOKENS],
        [TOKENS, Gauge(TOKENS.name, "")],
        [Counter("9lives", "")],
        [Counter("a b", "")],
        [Counter("ok", "", labels=("bad-label",))],
        [Histogram("h", "", buckets=())],
        [Histogram("h", "", buckets=(2.0, 1.0))],
        [Histogram("h", "", buckets=(1.0, 1.0))],
        [Histogram("h", "", buckets=(1.0, math.inf))],
        [Histogram("h", "", buckets=(math.nan,))],
    ],
)
def test_a_bad_declaration_is_refused(declarations: list[Counter]) -> None:
    with pytest.raises(ParamError):
        Metrics(declarations)
