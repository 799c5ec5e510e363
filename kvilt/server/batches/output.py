"""The two files that a batch writes: answers, and requests that failed. Both go on where a stopped server ended."""

from __future__ import annotations

import threading
from typing import Any

import orjson

from ..files.store import FileStore, NewFile
from .counts import BatchCounts, finished_ids
from .record import BatchRecord


class BatchOutput:
    """The output of one batch. Its calls run in threads."""

    def __init__(self, files: FileStore, record: BatchRecord) -> None:
        self.done: set[str] = set()  # custom_ids, also of an earlier run
        self._files = files
        self._record = record
        self._lock = threading.Lock()
        self._closed = False
        record.counts = BatchCounts()
        self._answers, self._errors = (self._open(name) for name in (record.output, record.error))

    def _open(self, name: str) -> NewFile:
        file = self._files.create(self._record.owner, name)
        path = self._files.data_path(name)
        if path.exists():
            self.done |= finished_ids(path, self._record.counts.add)
            file.keep(path.stat().st_size)
        return file

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer to the file where it belongs."""
        failed = answer["response"] is None or answer["response"]["status_code"] != 200
        with self._lock:
            if self._closed or answer["custom_id"] in self.done:
                return
            (self._errors if failed else self._answers).write(orjson.dumps(answer) + b"\n")
            self.done.add(answer["custom_id"])
            self._record.counts.add(answer)

    def finish(self) -> None:
        """Make the files exist, those in which something is."""
        with self._lock:
            self._closed = True
            record, ttl_s = self._record, self._record.output_ttl_s
            for file, kind in ((self._answers, "output"), (self._errors, "error")):
                if not file.bytes:
                    file.discard()
                    continue
                made = file.finish(f"{record.id}_{kind}.jsonl", "batch_output", ttl_s)
                if kind == "output":
                    record.output_file_id = made.id
                else:
                    record.error_file_id = made.id

    def close(self) -> None:
        """Stop, and leave what is written to the next server."""
        with self._lock:
            self._closed = True
            for file in (self._answers, self._errors):
                file.close()
                self._files.forget(file)
