"""Requests through the engine, in the thread of the caller: all answers at once, or one piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..engine.engine import Engine
from ..engine.sequence import Job
from ..errors import Cancelled, InputError, ParamError
from ..executor.protocol import Executor
from ..sampling.params import SamplingParams
from .answer import Answer
from .completion import Completion, Stream, TextPiece
from .sync_driver import SyncDriver


@dataclass(frozen=True, slots=True)
class PendingAnswer:
    """An answer in the making, and the job that makes it."""

    job: Job
    answer: Answer


class SyncRunner:
    """Drives an engine for as long as a caller waits. Several threads may; their requests then share steps."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._sync_driver = SyncDriver(engine, executor)

    def answers(
        self,
        prepare_each: Sequence[Callable[[], PendingAnswer]],
        on_step: Callable[[Sequence[PendingAnswer]], None] = lambda _pending: None,
    ) -> list[Completion]:
        """Submit all requests at once, and wait for every answer; `on_step` is called between steps."""
        pending_answers: list[PendingAnswer] = []

        def done() -> bool:
            on_step(pending_answers)
            return all(pending.answer.over for pending in pending_answers)

        with self._leaving_on_error(pending_answers):
            for prepare in prepare_each:
                pending_answers.append(prepare())  # noqa: PERF401 (see `_leaving_on_error`)
            for pending in pending_answers:
                self._engine.add(pending.job)
            self._drive(pending_answers, done)
            return [pending.answer.completion() for pending in pending_answers]

    def stream(self, prepare: Callable[[], PendingAnswer], params: SamplingParams) -> Stream:
        if params.n > 1:
            raise ParamError("n", f"a stream shows one sample, not {params.n}; use generate or chat for several")
        pending = prepare()
        results: list[Completion] = []
        begun = False

        def result() -> Completion:
            if not results:
                raise InputError("this stream failed or was closed before its end, so it has no completion")
            return results[0]

        def stop() -> None:
            pending.answer.stopped = True

        def leave() -> None:
            if not begun:
                self._leave([pending])

        def pieces() -> Generator[TextPiece, None, None]:
            nonlocal begun
            begun = True
            with self._leaving_on_error([pending]):
                self._engine.add(pending.job, held=True)
                over = False
                while not over:
                    over = pending.answer.over  # what is left is read once more
                    yield from self._next_pieces(pending)
                results.append(pending.answer.completion())

        return Stream(pieces(), result, stop, leave)

    def _next_pieces(self, pending: PendingAnswer) -> list[TextPiece]:
        """The next text of a stream, after as many steps as that takes; empty at its end, and while a parser waits.

        Between two calls the request is held: it runs only while the caller waits.
        """
        answer = pending.answer
        self._engine.resume(pending.job)
        try:
            self._drive([pending], lambda: answer.samples[0].fresh or answer.over or answer.stopped)
        except Cancelled:
            if not answer.stopped:  # this stream was not stopped: the caller gets the cancel
                raise
        if answer.stopped and not answer.over:
            self._engine.abort(pending.job)
            self._sync_driver.step_until(lambda: answer.over)
        self._engine.hold(pending.job)
        return answer.samples[0].pieces()

    def _drive(self, pending_answers: Sequence[PendingAnswer], done: Callable[[], bool]) -> None:
        """Step until done. The error of a request is raised here; a cancel has the tokens so far."""

        def done_or_failed() -> bool:
            return done() or any(pending.answer.error for pending in pending_answers)

        try:
            self._sync_driver.drive(done_or_failed)
        except Cancelled:
            samples = [sample for pending in pending_answers for sample in pending.answer.samples]
            raise Cancelled([sample.token_ids for sample in samples]) from None
        for pending in pending_answers:
            if pending.answer.error is not None:
                raise pending.answer.error

    @contextmanager
    def _leaving_on_error(self, pending_answers: Sequence[PendingAnswer]) -> Iterator[None]:
        """If the block raises, these requests are removed from the engine."""
        try:
            yield
        except BaseException:
            self._leave(pending_answers)
            raise

    def _leave(self, pending_answers: Sequence[PendingAnswer]) -> None:
        """The caller wants these answers no more. May be called by a finalizer."""
        for pending in pending_answers:
            pending.answer.abandon()
            self._engine.abort(pending.job)
        self._sync_driver.drain()
