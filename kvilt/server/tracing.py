"""OpenTelemetry spans, one for each request. Without the OpenTelemetry API installed, these functions do nothing.

The SDK is set up outside of kvilt, for example by `opentelemetry-instrument kvilt serve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

USAGE = "kvilt.usage"  # in the scope of a request: the usage of its answer
_LONGEST = 256  # characters of what a client names


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
    if status >= 400:
        one.set_attribute("error.type", str(status))
    if status >= 500:
        one.set_status(trace.Status(trace.StatusCode.ERROR))


@contextmanager
def batch_span(route: str, custom_id: str) -> Iterator[Any]:
    """A span around one request of a batch, a child of what runs the batch, if that is traced."""
    if not traced:
        yield None
        return
    attributes = {"http.route": route[:_LONGEST], "kvilt.batch.custom_id": custom_id}
    kind = trace.SpanKind.INTERNAL
    with trace.get_tracer("kvilt.server").start_as_current_span("kvilt.batch.request", None, kind, attributes) as one:
        yield one


def trace_request(
    scope: Scope, operation: str, model: str | None, params: SamplingParams | None = None, stream: bool | None = None
) -> None:
    """Set what was asked for, under the names of OpenTelemetry's conventions for generative AI: the operation, the
    model as the request names it, and how tokens are sampled."""
    one = scope.get("kvilt.span")
    if one is None:
        return
    _set_request(one, operation, model)
    if stream is not None:
        one.set_attribute("gen_ai.request.stream", stream)
    if params is not None:
        _set_params(one, params)


def _set_request(one: Any, operation: str, model: str | None) -> None:
    one.set_attribute("gen_ai.operation.name", operation)
    one.set_attribute("gen_ai.provider.name", "kvilt")
    if model is not None:
        one.set_attribute("gen_ai.request.model", model[:_LONGEST])


def _set_params(one: Any, params: SamplingParams) -> None:
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if (value := getattr(params, name)) is not None:
            one.set_attribute(f"gen_ai.request.{name}", value)
    for name in ("top_k", "frequency_penalty", "presence_penalty"):
        if value := getattr(params, name):
            one.set_attribute(f"gen_ai.request.{name}", value)
    if params.n > 1:
        one.set_attribute("gen_ai.request.choice.count", params.n)
    if params.stop:
        one.set_attribute("gen_ai.request.stop_sequences", list(params.stop))


def trace_response(scope: Scope, model: str, name: str | None = None) -> None:
    """Set which model answers, and the id of the answer."""
    one = scope.get("kvilt.span")
    if one is None:
        return
    one.set_attribute("gen_ai.response.model", model)
    if name is not None:
        one.set_attribute("gen_ai.response.id", name)


def trace_usage(scope: Scope, usage: Mapping[str, Any], reasons: Sequence[str] = ()) -> None:
    """Set the token counts of an answer, in OpenAI's shape, and why each of its samples ended.

    The access log shows the counts, too.
    """
    scope[USAGE] = usage
    if (one := scope.get("kvilt.span")) is not None:
        _set_usage(one, usage, reasons)


def trace_batch_answer(one: Any, operation: str, body: Mapping[str, Any]) -> None:
    """Set all of this from the answer to a request of a batch."""
    if one is None:
        return
    _set_request(one, operation, None)
    for name in ("id", "model"):
        if name in body:
            one.set_attribute(f"gen_ai.response.{name}", body[name])
    reasons = [choice["finish_reason"] for choice in body.get("choices", ())]
    _set_usage(one, body.get("usage") or {}, reasons)


def _set_usage(one: Any, usage: Mapping[str, Any], reasons: Sequence[str]) -> None:
    read = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counts = {
        "input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "cache_read.input_tokens": read.get("cached_tokens"),
        "cache_creation.input_tokens": read.get("cache_write_tokens"),
    }
    for name, count in counts.items():
        if count is not None:
            one.set_attribute(f"gen_ai.usage.{name}", count)
    if reasons:
        one.set_attribute("gen_ai.response.finish_reasons", list(reasons))
