"""Errors and streams in the format of Ollama's API."""

from __future__ import annotations

from typing import Any

import orjson

from ..http.errors import HTTPError, renamed
from ..http.event_stream import StreamFormat

NDJSON = "application/x-ndjson"
# Fields of the request that this one is translated to, and their names here.
_NAMES = {
    "stop": "options.stop",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
}


def ollama_error(error: HTTPError) -> dict[str, Any]:
    """The body of an error; its text names the part that is wrong."""
    return {"error": renamed(error, _NAMES)[0]}


def json_line(payload: dict[str, Any]) -> bytes:
    """One object of a stream."""
    return orjson.dumps(payload) + b"\n"


OLLAMA_STREAM = StreamFormat(NDJSON, b"", None, lambda error: json_line(ollama_error(error)))
