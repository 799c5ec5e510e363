"""The requests of a file: where each line is, and in which order they are asked. Bodies are read when asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lines import BatchLine, parse_line

MAX_PROBLEMS = 64  # that are told of; the batch fails anyway
_SLICE = 1 << 20  # bytes that are looked at in one turn


@dataclass(frozen=True, slots=True)
class LineSpan:
    """A line of the file."""

    number: int
    custom_id: str
    offset: int
    length: int
    order: bytes


class BatchIndex:
    """The lines of a file, read in slices so that the work of other requests goes on between them."""

    def __init__(self, path: Path, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self.spans: list[LineSpan] = []
        self.problems: list[dict[str, Any]] = []
        self._path = path
        self._endpoint = endpoint
        self._max_lines, self._max_line_bytes = max_lines, max_line_bytes
        self._seen: set[str] = set()
        self._offset = self._number = 0

    def read_slice(self) -> bool:
        """Look at some more lines; False when there are no more."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            until = self._offset + _SLICE
            while self._offset < until and not self._full:
                text = file.readline(self._max_line_bytes + 1)
                if not text:
                    return False
                self._number += 1
                if len(text) > self._max_line_bytes:
                    self._refuse("line_too_long", f"it is longer than {self._max_line_bytes} bytes")
                    return False
                if text.strip():
                    self._add(text)
                self._offset += len(text)
        return not self._full

    @property
    def _full(self) -> bool:
        return len(self.problems) >= MAX_PROBLEMS or len(self.spans) > self._max_lines

    def _add(self, text: bytes) -> None:
        line = parse_line(self._number, text)
        if line.problem:
            self._refuse("invalid_line", line.problem)
        elif line.url != self._endpoint:
            self._refuse("mismatched_endpoint", f"its url is not the endpoint of the batch, {self._endpoint}", "url")
        elif line.custom_id in self._seen:
            self._refuse("duplicate_custom_id", f"the custom_id {line.custom_id!r} was used before", "custom_id")
        elif len(self.spans) >= self._max_lines:
            self.spans.append(LineSpan(self._number, "", 0, 0, b""))  # one too many
            self._refuse("too_many_requests", f"a batch has at most {self._max_lines} requests")
        else:
            self._seen.add(line.custom_id)
            self.spans.append(LineSpan(self._number, line.custom_id, self._offset, len(text), line.short_order))

    def _refuse(self, code: str, message: str, param: str | None = None) -> None:
        self.problems.append({"code": code, "line": self._number, "message": message, "param": param})

    def in_order(self, done: set[str]) -> list[LineSpan]:
        """The lines that have no answer, with those neighbours whose prompts begin alike."""
        return sorted((one for one in self.spans if one.custom_id not in done), key=lambda one: one.order)

    def line(self, span: LineSpan) -> BatchLine:
        """A line as it is."""
        with self._path.open("rb") as file:
            file.seek(span.offset)
            return parse_line(span.number, file.read(span.length))
