"""A gate before an executor's steps: a test says how many pass, and what happens happens before the next."""

from __future__ import annotations

import threading

import pytest

from kvilt.batch import Batch, Logits
from kvilt.executor.protocol import Executor


class Gate(threading.Event):
    """Steps wait for this event; it may clear itself before a given step."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.steps, self.last = 0, -1
        self.set()
        honest = executor.run

        def run(batch: Batch) -> Logits:
            if self.steps == self.last:
                self.clear()
            self.wait(300)
            self.steps += 1
            return honest(batch)

        monkeypatch.setattr(executor, "run", run)
