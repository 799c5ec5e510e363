"""Log records as lines of text or of JSON. Each record is exactly one line, whatever a client has sent."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ..errors import ParamError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error", "critical")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FIELDS = "kvilt_fields"  # of a record: what JSON shows beside the message


def configure_logs(level: str, form: str) -> None:
    """Send the process's logs to stderr, in this form."""
    if level.lower() not in LEVELS:
        raise ParamError("log_level", f"must be debug, info, warning, error or critical, not {level!r}")
    if form not in FORMATS:
        raise ParamError("log_format", f"must be text or json, not {form!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if form == "json" else TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def one_line(text: str) -> str:
    """Text without characters that could begin a line, or steer a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class TextLines(logging.Formatter):
    """A record as a line of text; a traceback follows it on lines of its own, each of them indented."""

    def format(self, record: logging.LogRecord) -> str:
        line, *more = super().format(_without_breaks(record)).split("\n")
        return "\n".join([line, *(f"    {one_line(each)}" for each in more)])


class JSONLines(logging.Formatter):
    """A record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _without_breaks(record: logging.LogRecord) -> logging.LogRecord:
    message = record.getMessage()
    if message.isprintable():
        return record
    copy = logging.makeLogRecord(record.__dict__)
    copy.msg, copy.args = one_line(message), None
    return copy


def usage_fields(usage: Mapping[str, Any] | None) -> dict[str, int]:
    """The token counts of an answer, from a usage in the shape of any API; none where there is no usage."""
    if not usage:
        return {}
    read = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counts = {
        "prompt_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "completion_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "reused_tokens": read.get("cached_tokens"),
    }
    return {name: count for name, count in counts.items() if count is not None}
