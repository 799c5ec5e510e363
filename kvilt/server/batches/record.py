"""A batch as it is known, shown, and noted on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...kv.file import write_whole
from .counts import BatchCounts

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")
_STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass(slots=True)
class BatchRecord:
    """One batch. What is noted is enough to go on with it after a restart."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    output_ttl_s: int | None
    output: str  # the id that its output will have
    error: str  # the same for failed requests
    status: Status = "validating"
    stamps: dict[str, int] = field(default_factory=dict)  # when it came to each status
    problems: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: BatchCounts = field(default_factory=BatchCounts)
    model: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens."""
        return self.status in ENDED

    def enter(self, status: Status, now_s: float) -> None:
        """Come to a status."""
        self.status = status
        self.stamps[status] = int(now_s)

    def shown(self) -> dict[str, Any]:
        """The batch as clients see it."""
        same = ["id", "endpoint", "input_file_id", "status", "output_file_id", "error_file_id"]
        same += ["created_at", "expires_at", "metadata", "model"]
        errors = {"object": "list", "data": self.problems} if self.problems else None
        counts = {"total": self.total, "completed": self.counts.answered, "failed": self.counts.failed}
        return {
            **{name: getattr(self, name) for name in same},
            **{f"{name}_at": self.stamps.get(name) for name in _STAMPS},
            "object": "batch",
            "completion_window": "24h",
            "errors": errors,
            "request_counts": counts,
            "usage": self.counts.usage(),
        }

    def note(self, folder: Path) -> None:
        """Write it down."""
        write_whole(folder / f"{self.id}.json", json.dumps(asdict(self)).encode())


def read_record(path: Path) -> BatchRecord:
    """A batch that an earlier server has noted."""
    fields = json.loads(path.read_bytes())
    return BatchRecord(**{**fields, "counts": BatchCounts(**fields["counts"])})
