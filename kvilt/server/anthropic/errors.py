"""Errors in the format of the Messages API."""

from __future__ import annotations

from typing import Any

from ..http.errors import HTTPError, renamed
from ..http.event_stream import StreamFormat, named_event

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Fields of the request that this one is translated to, and their names here.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


def anthropic_error(error: HTTPError) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    message, param = renamed(error, _NAMES)
    if error.code == "context_length_exceeded" and "limit" in error.more:
        # Anthropic's sentence: Claude Code reads the counts in it, and compacts the conversation.
        message = f"prompt is too long: {error.more['tokens']} tokens > {error.more['limit']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message, "param": param, "code": error.code}}


ANTHROPIC_STREAM = StreamFormat(
    "text/event-stream", b"", named_event({"type": "ping"}), lambda error: named_event(anthropic_error(error))
)
