"""OpenTelemetry spans, one for each request. Without the OpenTelemetry API installed, these functions do nothing.

The SDK is set up outside of kvilt, for example by `opentelemetry-instrument kvilt serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

from ..sampling.params import SamplingParams

try:
    from opentelemetry import propagate, trace
except ImportError:
    traced = False
else:
    traced = True


@contextmanager
def request_span(scope: Scope, headers: Mapping[str, str], request_id: str) -> Iterator[Any]:
    """A span around a request, a child of the client's span if the headers name one. Routes find it as `kvilt.span`."""
    if not traced:
        yield None
        return
    tracer = trace.get_tracer("kvilt.server")
    context = propagate.extract(dict(headers))
    attributes = {"http.request.method": scope["method"], "kvilt.request_id": request_id}
    with tracer.start_as_current_span(
        "kvilt.request", context, trace.SpanKind.SERVER, attributes, record_exception=False
    ) as one:
        scope["kvilt.span"] = one
        yield one


def end_span(one: Any, route: str, status: int) -> None:
    """Set the route and the status of a request that has ended."""
    if one is None:
        return
    one.update_name(route)
    one.set_attribute("http.route", route)
    one.set_attribute("http.response.status_code", status)
    if status >= 500:
        one.set_status(trace.Status(trace.StatusCode.ERROR))


def trace_request(scope: Scope, operation: str, model: str, params: SamplingParams) -> None:
    """Set the model and the sampling params, under the names of OpenTelemetry's conventions for generative AI."""
    one = scope.get("kvilt.span")
    if one is None:
        return
    one.set_attribute("gen_ai.operation.name", operation)
    one.set_attribute("gen_ai.request.model", model)
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if (value := getattr(params, name)) is not None:
            one.set_attribute(f"gen_ai.request.{name}", value)


def trace_usage(scope: Scope, usage: Mapping[str, Any]) -> None:
    """Set the token counts of an answer."""
    one = scope.get("kvilt.span")
    if one is None:
        return
    one.set_attribute("gen_ai.usage.input_tokens", usage["prompt_tokens"])
    one.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
    one.set_attribute("gen_ai.usage.cache_read.input_tokens", usage["prompt_tokens_details"]["cached_tokens"])
