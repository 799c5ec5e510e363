"""One engine, stepped by whoever waits for it: no thread of its own, so a step runs only while somebody wants it.

When several threads wait, one of them steps for all, and the next takes over when it leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..engine.engine import Engine
from ..executor.executor import Executor

_LOOK_UP_S = 0.05  # whoever waits for a store sees this often whether somebody else wants something


class SyncDriver:
    """Whose turn it is to step."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor
        self._wake = engine.wakeup  # set when a store has answered a request that waits for it
        self._turn = threading.Lock()
        self._news = threading.Condition()
        self._waiting = 0

    def drive(self, done: Callable[[], bool]) -> None:
        """Step, or let another thread step, until `done`. A cancel is raised in the thread that steps."""
        while not done():
            if self._turn.acquire(blocking=False):
                try:
                    self._steps(done)
                finally:
                    self._release()
            else:
                self._wait(done)

    def step_until(self, done: Callable[[], bool]) -> None:
        """Let the engine do what it was asked for, without a step of our own, until `done`."""
        while not done():
            if self._turn.acquire(blocking=False):
                self._attend()
            else:
                self._wait(done)

    def settle(self) -> None:
        """The same without waiting: whoever steps now does it. May be called by a finalizer inside a step."""
        while self._engine.asked and self._turn.acquire(blocking=False):
            self._attend()

    def _attend(self) -> None:
        try:
            self._engine.drain_inbox()
        finally:
            self._turn.release()

    def _steps(self, done: Callable[[], bool]) -> None:
        with self._executor.call():  # one call to `cancel`, however many steps it takes
            while not done():
                self._wake.clear()
                if not self._engine.step() and not done() and not self._engine.ready:
                    assert self._engine.patience_s is not None, "nobody wants a row, yet somebody waits"
                    self._wake.wait(min(self._engine.patience_s, _LOOK_UP_S))
                if self._waiting:
                    self._tell()

    def _release(self) -> None:
        self._turn.release()
        self.settle()  # what was asked for since the last step
        self._tell()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._news:
            self._waiting += 1
            if self._turn.locked() and not done():
                self._news.wait(0.1)  # not forever: a turn may end between the question and the wait
            self._waiting -= 1

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()
