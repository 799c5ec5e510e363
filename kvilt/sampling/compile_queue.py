"""A queue of grammars that wait to be compiled, a few at a time, each by a thread with a worker process of its own.

The same constraint is compiled once, however many callers wait for it. When the last caller of a grammar cancels, the
grammar is removed or its worker is ended. Refuses to know what compiling is: the function is given.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import GrammarQueueFull, ModelClosed
from .compile_worker import CompileWorker
from .constraint import Constraint

Made = TypeVar("Made")


@dataclass(eq=False, slots=True)
class _Job(Generic[Made]):
    constraint: Constraint
    future: Future[Made] = field(default_factory=Future)
    waiting: int = 0  # callers
    worker: CompileWorker | None = None  # that has it


@dataclass(frozen=True, slots=True)
class PendingGrammar(Generic[Made]):
    """A grammar that is being compiled: its future, and how a caller cancels its wait."""

    future: Future[Made]
    leave: Callable[[], None]


class CompileQueue(Generic[Made]):
    """Threads that compile, started when first needed; `close` ends them and their processes."""

    def __init__(
        self,
        new_worker: Callable[[], CompileWorker],
        make: Callable[[Constraint, CompileWorker], Made],
        threads: int,
        most_waiting: int,
    ) -> None:
        self._new_worker = new_worker
        self._make = make
        self._most_threads = threads
        self._most_waiting = most_waiting
        self._closed = False
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_reset, weakref.ref(self)))

    def _reset(self) -> None:
        """Start empty: a forked process has none of the threads, and the workers belong to its parent."""
        self._changed = threading.Condition()
        self._queue: deque[_Job[Made]] = deque()
        self._pending: dict[Constraint, _Job[Made]] = {}
        self._workers: list[CompileWorker] = []
        self._idle = 0  # threads that have no grammar, or will not once their future is set

    def submit(self, constraint: Constraint) -> PendingGrammar[Made]:
        """Queue a grammar; GrammarQueueFull if too many wait already."""
        with self._changed:
            if self._closed:
                raise ModelClosed
            job = self._pending.get(constraint)
            if job is None:
                if len(self._queue) >= self._most_waiting:
                    raise GrammarQueueFull(len(self._queue), self._most_waiting)
                job = self._pending[constraint] = _Job(constraint)
                self._queue.append(job)
                self._find_thread()
            job.waiting += 1
        return PendingGrammar(job.future, lambda: self._leave(job))

    def close(self) -> None:
        """End all threads and processes; waiting callers get an error."""
        with self._changed:
            self._closed = True
            jobs = list(self._queue)
            self._queue.clear()
            self._pending.clear()
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        for job in jobs:
            job.future.set_exception(ModelClosed())

    def _leave(self, job: _Job[Made]) -> None:
        with self._changed:
            job.waiting -= 1
            if job.waiting or job.future.done():
                return
            if self._pending.get(job.constraint) is job:
                del self._pending[job.constraint]
            if job.worker is not None:
                job.worker.cancel()
            elif job in self._queue:
                self._queue.remove(job)

    def _find_thread(self) -> None:
        if self._idle >= len(self._queue):
            self._changed.notify()
        elif len(self._workers) < self._most_threads:
            worker = self._new_worker()
            self._workers.append(worker)
            self._idle += 1
            threading.Thread(target=self._run, args=(worker,), name="kvilt compile", daemon=True).start()

    def _run(self, worker: CompileWorker) -> None:
        while (job := self._next(worker)) is not None:
            try:
                made = self._make(job.constraint, worker)
            except BaseException as error:
                self._done(job)
                job.future.set_exception(ModelClosed() if self._closed else error)
            else:
                self._done(job)
                job.future.set_result(made)
            del job  # no grammar is held by a thread that waits
        worker.close()

    def _next(self, worker: CompileWorker) -> _Job[Made] | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            self._idle -= 1
            job = self._queue.popleft()
            job.worker = worker
            return job

    def _done(self, job: _Job[Made]) -> None:
        with self._changed:
            job.worker = None
            self._idle += 1
            if self._pending.get(job.constraint) is job:
                del self._pending[job.constraint]


def _reset(queue: weakref.ref[CompileQueue[Any]]) -> None:
    """Reset the queue in a forked process."""
    if (own := queue()) is not None:
        own._reset()
