"""One call of an executor at a time: callers wait for each other, and each call has a handle that stops it alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from ..errors import Cancelled


class ExecutorCall:
    """One caller's use of an executor: several runs that stop together. `CallQueue.call` makes it; enter it once."""

    def __init__(self, queue: CallQueue) -> None:
        self._queue = queue
        self._stop = threading.Event()
        self._exits: ExitStack | None = None

    def cancel(self) -> None:
        """Stop this call and no other, from any thread: before its next layer, or before it begins if it still waits.

        Does nothing once the call has ended. A call inside another one of its thread stops with that one.
        """
        self._stop.set()
        self._queue.interrupt(self._stop)

    def __enter__(self) -> threading.Event:
        """Wait until no other thread has a call in progress; the event is set once this one is to stop."""
        assert self._exits is None, "a call is entered once"
        with ExitStack() as exits:
            exits.enter_context(self._queue.lock)
            observe(self._stop)
            self._stop = self._queue.begin(self._stop, exits)
            self._exits = exits.pop_all()
        return self._stop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._exits is not None
        self._exits.__exit__(kind, error, tb)


class CallQueue:
    """The calls of one executor. `check_open` may refuse a call, `alone` is held during one, `interrupt` hurries it."""

    def __init__(
        self,
        check_open: Callable[[], None],
        alone: Callable[[], AbstractContextManager[object]],
        interrupt: Callable[[], None],
    ) -> None:
        self.lock = threading.RLock()  # held by the call in progress
        self._check_open, self._alone, self._interrupt = check_open, alone, interrupt
        self._running: threading.Event | None = None  # set to stop the call in progress

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return self._running is not None

    def call(self) -> ExecutorCall:
        """A call that has not begun."""
        return ExecutorCall(self)

    def cancel(self) -> None:
        """Stop the call in progress; those that wait for it go on."""
        if (running := self._running) is not None:
            running.set()
            self._interrupt()

    def interrupt(self, stop: threading.Event) -> None:
        """Hurry the call in progress if it is the one that `stop` stops."""
        if self._running is stop:
            self._interrupt()

    def begin(self, stop: threading.Event, exits: ExitStack) -> threading.Event:
        """Begin a call under the lock, until `exits`; a call inside a call shares its stop signal."""
        self._check_open()
        if self._running is not None:
            return self._running
        self._running = stop
        exits.callback(self._end)
        exits.enter_context(self._alone())
        return stop

    def _end(self) -> None:
        self._running = None


def observe(stop: threading.Event) -> None:
    """Raise if the call is to stop."""
    if stop.is_set():
        raise Cancelled()
