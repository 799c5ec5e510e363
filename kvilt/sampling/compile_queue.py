"""A queue of grammars that wait to be compiled, a few at a time, each by a thread with a worker process of its own.

Owners take turns, and each may have so many waiting: one that queues many slow grammars delays another by one of them.
The same constraint is compiled once, however many callers wait for it. When the last caller of a grammar cancels, the
grammar is removed or its worker is ended. Refuses to know what compiling is: the function is given.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import GrammarQueueFull, ModelClosed
from .compile_worker import CompileWorker
from .constraint import Constraint

Made = TypeVar("Made")

_OWNERS = 8  # owners that may have all of their grammars waiting at a time


@dataclass(eq=False, slots=True)
class _Job(Generic[Made]):
    constraint: Constraint
    future: Future[Made] = field(default_factory=Future)
    callers: Counter[str] = field(default_factory=Counter)  # that wait for it, by owner
    worker: CompileWorker | None = None  # that has it


class _OwnerQueues(Generic[Made]):
    """The jobs that no worker has yet: a queue for each owner, and owners take turns.

    A job that callers of several owners wait for stands in the queue of each of them.
    """

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting` is the limit for one owner."""
        self._most_waiting = most_waiting
        self._queues: OrderedDict[str, deque[_Job[Made]]] = OrderedDict()  # the owner whose turn is next comes first

    def __len__(self) -> int:
        return len({id(job) for own in self._queues.values() for job in own})

    def __contains__(self, job: _Job[Made]) -> bool:
        return any(job in own for own in self._queues.values())

    def add_new(self, owner: str, job: _Job[Made]) -> None:
        """Queue a job for its first owner; GrammarQueueFull if too many wait already."""
        waiting = len(self._queues.get(owner, ()))
        if waiting >= self._most_waiting or len(self) >= _OWNERS * self._most_waiting:
            raise GrammarQueueFull(waiting, self._most_waiting)
        self._queues.setdefault(owner, deque()).append(job)

    def join(self, owner: str, job: _Job[Made]) -> None:
        """Let a job that waits already be taken at this owner's turn too. No limit: it adds no work."""
        if job in self and job not in self._queues.get(owner, ()):
            self._queues.setdefault(owner, deque()).append(job)

    def pop(self) -> _Job[Made]:
        """The job whose turn it is; its owner's next turn comes after those of all others."""
        owner, own = next(iter(self._queues.items()))
        job = own[0]
        self._queues.move_to_end(owner)
        for each in list(self._queues):
            self.remove(each, job)
        return job

    def remove(self, owner: str, job: _Job[Made]) -> None:
        """Take a job out of an owner's queue, if it is there."""
        own = self._queues.get(owner, deque())
        if job in own:
            own.remove(job)
            if not own:
                del self._queues[owner]

    def clear(self) -> list[_Job[Made]]:
        """Remove all jobs, and return them."""
        jobs = {id(job): job for own in self._queues.values() for job in own}
        self._queues.clear()
        return list(jobs.values())


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
        self._queue: _OwnerQueues[Made] = _OwnerQueues(self._most_waiting)
        self._pending: dict[Constraint, _Job[Made]] = {}
        self._workers: list[CompileWorker] = []
        self._idle = 0  # threads that have no grammar, or will not once their future is set

    def submit(self, constraint: Constraint, owner: str = "") -> PendingGrammar[Made]:
        """Queue a grammar; GrammarQueueFull if too many of its owner's wait already."""
        with self._changed:
            if self._closed:
                raise ModelClosed
            job = self._pending.get(constraint)
            if job is None:
                job = _Job(constraint)
                self._queue.add_new(owner, job)
                self._pending[constraint] = job
                self._find_thread()
            else:
                self._queue.join(owner, job)
            job.callers[owner] += 1
        return PendingGrammar(job.future, lambda: self._leave(job, owner))

    def close(self) -> None:
        """End all threads and processes; waiting callers get an error."""
        with self._changed:
            self._closed = True
            jobs = self._queue.clear()
            self._pending.clear()
            self._changed.notify_all()
            workers = list(self._workers)
        for worker in workers:
            worker.cancel()
        for job in jobs:
            job.future.set_exception(ModelClosed())

    def _leave(self, job: _Job[Made], owner: str) -> None:
        with self._changed:
            job.callers[owner] -= 1
            if not job.callers[owner]:
                self._queue.remove(owner, job)
            if job.callers.total() or job.future.done():
                return
            if self._pending.get(job.constraint) is job:
                del self._pending[job.constraint]
            if job.worker is not None:
                job.worker.cancel()

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
            job = self._queue.pop()
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
