"""What a server counts besides its engine."""

from __future__ import annotations

from ..metrics import Counter, Gauge, Histogram

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
