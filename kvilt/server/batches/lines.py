"""Lines of a batch, in OpenAI's format: one request or one answer in each, as JSON."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..http.body import parse_json
from ..http.errors import HTTPError

MAX_ID = 256  # characters of a custom_id
_BLOCK = 1024  # bytes of a prompt


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch, or why it is none."""

    number: int  # in the file, from 1 on
    custom_id: str
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str = ""

    @property
    def order(self) -> str:
        """Requests whose prompts begin alike are neighbours in this order, so that one computes what all share."""
        body = self.body or {}
        prompt = [body.get("tools"), body.get("messages"), body.get("prompt"), body.get("input")]
        return json.dumps([self.url, *prompt], ensure_ascii=False)

    @property
    def short_order(self) -> bytes:
        """The same in a small part of the memory: behind the first block, prompts that share blocks are neighbours."""
        whole = self.order.encode()
        blocks = (whole[at : at + _BLOCK] for at in range(_BLOCK, len(whole), _BLOCK))
        return whole[:_BLOCK] + b"".join(hashlib.blake2b(one, digest_size=8).digest() for one in blocks)


def read_lines(lines: Iterable[str]) -> Iterator[BatchLine]:
    """The requests of a file; a second line with the same custom_id is a problem of its own."""
    seen: set[str] = set()
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = parse_line(number, text.encode())
        if line.custom_id in seen:
            line = BatchLine(number, f"line-{number}", problem=f"the custom_id {line.custom_id!r} was used before")
        seen.add(line.custom_id)
        yield line


def parse_line(number: int, text: bytes) -> BatchLine:
    """One line of a file."""
    try:
        fields = parse_json(text)
    except HTTPError as error:
        return BatchLine(number, f"line-{number}", problem=f"line {number} is not JSON: {error.message}")
    if not isinstance(fields, dict):
        return BatchLine(number, f"line-{number}", problem=f"line {number} is not an object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        what = f"line {number}: custom_id must be a text of 1 to {MAX_ID} characters"
        return BatchLine(number, f"line-{number}", problem=what)
    method, url, body = fields.get("method", "POST"), fields.get("url"), fields.get("body")
    if method != "POST" or not isinstance(url, str) or not isinstance(body, dict):
        return BatchLine(number, custom_id, problem=f"line {number}: method must be POST, url a text, body an object")
    return BatchLine(number, custom_id, url, body)


def answer_line(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    response = {"status_code": status, "request_id": body.get("id", f"req-{secrets.token_hex(8)}"), "body": body}
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None,
    }


def problem_line(line: BatchLine) -> dict[str, Any]:
    """The answer to a line that is no request."""
    return error_line(line.custom_id, "invalid_line", line.problem)


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The answer to a line that was not asked."""
    error = {"code": code, "message": message}
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None, "error": error}
