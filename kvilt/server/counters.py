"""What a server counts besides its engine."""

from __future__ import annotations

from ..metrics import Counter, Histogram

HTTP_REQUESTS = Counter("kvilt_http_requests_total", "HTTP requests that ended.", ("route", "method", "status"))
HTTP_SECONDS = Histogram("kvilt_http_request_seconds", "From a request's headers to its end.", ("route",))

SERVER_METRICS = (HTTP_REQUESTS, HTTP_SECONDS)
