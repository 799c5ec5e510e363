"""Work in Python on behalf of a request, off the event loop: bounded threads, bounded queues, and a deadline.

Each kind of work has threads of its own, so that no kind waits for another, and its queue takes turns by owner. Work
that outlives its deadline, or its caller, is ended by an exception at its next bytecode. A call into C cannot be ended:
its input must be bounded. Refuses to know what the work is.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ..errors import QueueFull, WorkTimeout

Result = TypeVar("Result")
Given = ParamSpec("Given")

_OWNERS = 8  # queues of so many owners may be full at a time
_IDLE_S = 10.0  # a thread waits so long for more work: the event loop stands still while a new one starts
_REPEAT_S = 0.1  # between two exceptions for work that has caught the first
_inject = ctypes.pythonapi.PyThreadState_SetAsyncExc
_inject.argtypes = (ctypes.c_ulong, ctypes.py_object)
_here = threading.local()


@dataclass(frozen=True, slots=True)
class Lane:
    """A kind of work."""

    name: str
    threads: int
    waiting: int  # jobs of one owner that may wait
    deadline_s: float | None  # from the call on; None: such work bounds itself, and is never ended


PARSE = Lane("parse", 2, 256, 10.0)  # bodies: JSON and its validation
PROMPT = Lane("prompt", 4, 1024, 30.0)  # what a request asks for: checks, templates, tokens
TOKENIZE = Lane("tokenize", 2, 64, 30.0)  # for callers that only want tokens
ANSWER = Lane("answer", 2, 1024, 30.0)  # large answers
FILES = Lane("files", 4, 256, None)  # disks and stores: ended early, they would leave incomplete files
STORE = Lane("store", 4, 1024, None)  # the KV store, which may be slow or far away
INSPECT = Lane("inspect", 1, 64, None)  # views of the KV memory, which take its lock
OWNER = Lane("owner", 4, 64, None)  # calls of the owner of the process, such as shutdown


class _Ended(SystemExit):
    """Raised inside of work whose caller has gone. As a SystemExit it ends a thread without a message."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    future: asyncio.Future[Any]
    discard: Callable[[Any], None] | None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    thread: int | None = None  # the one that runs it
    left: bool = False  # its caller waits no longer
    kept: bool = False  # it holds something, so it runs to its end
    closed: bool = False  # it has run


@dataclass(slots=True)
class _Queue:
    lane: Lane
    arrived: threading.Condition
    threads: int = 0
    idle: int = 0  # threads that wait for a job
    waiting: OrderedDict[str, deque[_Job]] = field(default_factory=OrderedDict)  # by owner, the next one first

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def add(self, owner: str, job: _Job) -> None:
        own = self.waiting.setdefault(owner, deque())
        if len(own) >= self.lane.waiting or len(self) >= _OWNERS * self.lane.waiting:
            raise QueueFull(len(own), self.lane.waiting)
        own.append(job)

    def pop(self) -> _Job | None:
        while self.waiting:
            owner, own = self.waiting.popitem(last=False)
            job = own.popleft() if own else None
            if own:
                self.waiting[owner] = own
            if job is not None:
                return job
        return None

    def remove(self, job: _Job) -> None:
        for own in self.waiting.values():
            with suppress(ValueError):
                own.remove(job)


class Offload:
    """The threads of one process's requests. They end when there is no work, and never keep a process alive."""

    def __init__(self, patience: float = 1.0) -> None:
        """Deadlines are so many times as long; tests need it, which may share a machine with anything."""
        self.patience = patience
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}

    async def run(
        self,
        lane: Lane,
        work: Callable[..., Result],
        *given: Any,
        owner: str = "",
        discard: Callable[[Result], None] | None = None,
    ) -> Result:
        """The result of `work`. `discard` gets a result that is made after its caller has stopped waiting."""
        job = _Job(partial(work, *given), asyncio.get_running_loop().create_future(), discard)
        self._submit(lane, owner, job)
        clock = asyncio.timeout(None if lane.deadline_s is None else lane.deadline_s * self.patience)
        try:
            async with clock:
                result: Result = await job.future
                return result
        except BaseException as error:
            if job.future.cancelled():
                self._leave(lane, job)
            elif job.future.exception() is not None:
                raise
            elif discard is not None:  # it was done just when its caller stopped waiting
                discard(job.future.result())
            # A caller whose own time ends just now is cancelled, and must hear of that.
            if isinstance(error, TimeoutError) and clock.expired() and lane.deadline_s is not None:
                raise WorkTimeout(lane.name, lane.deadline_s) from None
            raise

    def load(self) -> dict[str, tuple[int, int]]:
        """For each kind of work that there was: jobs that run, and jobs that wait."""
        with self._lock:
            return {name: (queue.threads - queue.idle, len(queue)) for name, queue in self._queues.items()}

    def _submit(self, lane: Lane, owner: str, job: _Job) -> None:
        with self._lock:
            queue = self._queues.setdefault(lane.name, _Queue(lane, threading.Condition(self._lock)))
            queue.add(owner, job)
            if len(queue) <= queue.idle:
                queue.arrived.notify()
                return
            if queue.threads == lane.threads:
                return
            queue.threads += 1
        try:
            threading.Thread(target=self._serve, args=(queue,), name=f"kvilt-{lane.name}", daemon=True).start()
        except RuntimeError:  # the system has no thread left
            with self._lock:
                queue.threads -= 1
                queue.remove(job)
            raise QueueFull(len(queue), lane.waiting) from None

    def _leave(self, lane: Lane, job: _Job) -> None:
        """End a job for which no caller waits any more."""
        with self._lock:
            job.left = True
            if job.thread is None:
                self._queues[lane.name].remove(job)
                return
            if job.closed or job.kept or lane.deadline_s is None:
                return
            _inject(job.thread, _Ended)
        job.future.get_loop().call_later(_REPEAT_S, self._leave, lane, job)

    # In the threads.

    def _serve(self, queue: _Queue) -> None:
        """One job after the other; the thread ends when none comes for a while."""
        while (job := self._take(queue)) is not None:
            outcome: _Made | _Failed = _Failed(_Ended())
            try:  # noqa: SIM105  (an exception may strike at every call until the job is closed: no calls here)
                outcome = _perform(job)
            except _Ended:
                pass
            try:
                self._close(job)
            except _Ended:
                self._close(job)
            _post_outcome(job, outcome)
            del job, outcome  # an idle thread keeps no request body alive

    def _take(self, queue: _Queue) -> _Job | None:
        with self._lock:
            if (job := queue.pop()) is None:
                queue.idle += 1
                queue.arrived.wait_for(lambda: len(queue) > 0, _IDLE_S)
                queue.idle -= 1
                job = queue.pop()
            if job is None:
                queue.threads -= 1
            else:
                job.thread = threading.get_ident()
                _here.job, _here.lock = job, self._lock
        return job

    def _close(self, job: _Job) -> None:
        """From here on no exception is injected for the job, and none is pending."""
        with self._lock:
            job.closed = True
        _here.job = None
        if job.left:
            _receive_injected()


def _receive_injected() -> None:
    """Raise a pending injected exception in this thread now.

    Withdrawing it would leave the interpreter's flag for it raised for good, and Python 3.11 then hangs under a tracer.
    """
    try:
        _inject(threading.get_ident(), _Ended)
        while True:
            pass
    except _Ended:
        pass


@dataclass(frozen=True, slots=True)
class _Made:
    value: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


def _perform(job: _Job) -> _Made | _Failed:
    try:
        return _Made(job.context.run(job.work))
    except BaseException as error:
        return _Failed(error)


def _post_outcome(job: _Job, outcome: _Made | _Failed) -> None:
    try:
        job.future.get_loop().call_soon_threadsafe(_deliver, job, outcome)
    except RuntimeError:  # the loop is closed
        _discard(job, outcome)


def _deliver(job: _Job, outcome: _Made | _Failed) -> None:
    if job.future.done():
        _discard(job, outcome)
    elif isinstance(outcome, _Made):
        job.future.set_result(outcome.value)
    else:
        job.future.set_exception(outcome.error)


def _discard(job: _Job, outcome: _Made | _Failed) -> None:
    if isinstance(outcome, _Made) and job.discard is not None:
        job.discard(outcome.value)


def uninterruptible() -> None:
    """Say that the work of this thread holds something from here on: it runs to its end, and its result is discarded
    if no caller waits for it."""
    job: _Job | None = getattr(_here, "job", None)
    if job is None:
        return
    with _here.lock:
        if job.left:
            raise _Ended
        job.kept = True
