"""An engine that the waiting callers step: it has no thread of its own, so a step runs only while a caller waits.

When several threads wait, one of them steps for all, and the next takes over when it leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..engine.engine import Engine
from ..executor.protocol import Executor

_POLL_S = 0.05  # a thread that waits for a store looks this often whether another one has a request


class SyncDriver:
    """Decides which of the waiting threads steps."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._executor = executor
        self._wake = engine.wakeup  # set when a store has answered
        self._stepping = threading.Lock()
        self._news = threading.Condition()
        self._waiting = 0

    def drive(self, done: Callable[[], bool]) -> None:
        """Step, or let another thread step, until `done`. A cancel is raised in the thread that steps."""
        while not done():
            if self._stepping.acquire(blocking=False):
                try:
                    self._steps(done)
                finally:
                    self._release()
            else:
                self._wait(done)

    def step_until(self, done: Callable[[], bool]) -> None:
        """Drain the engine's inbox, without a step, until `done`."""
        while not done():
            if self._stepping.acquire(blocking=False):
                self._drain_inbox()
            else:
                self._wait(done)

    def drain(self) -> None:
        """Drain the inbox without waiting; a thread that steps now does it. A finalizer may call this inside a step."""
        while self._engine.has_inbox and self._stepping.acquire(blocking=False):
            self._drain_inbox()

    def _drain_inbox(self) -> None:
        try:
            self._engine.drain_inbox()
        finally:
            self._stepping.release()

    def _steps(self, done: Callable[[], bool]) -> None:
        with self._executor.call():  # one call to `cancel`, however many steps it takes
            while not done():
                self._wake.clear()
                if not self._engine.step() and not done() and not self._engine.ready:
                    assert self._engine.wait_timeout_s is not None, "no sequence wants a row, yet a caller waits"
                    self._wake.wait(min(self._engine.wait_timeout_s, _POLL_S))
                if self._waiting:
                    self._notify()

    def _release(self) -> None:
        self._stepping.release()
        self.drain()  # what came in since the last step
        self._notify()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._news:
            self._waiting += 1
            if self._stepping.locked() and not done():
                self._news.wait(0.1)  # not forever: the other thread may stop between the check and the wait
            self._waiting -= 1

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()
