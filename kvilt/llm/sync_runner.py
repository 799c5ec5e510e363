"""Questions through the engine, in the thread of whoever asks: all answers at once, or one piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..engine.engine import Engine
from ..engine.sequence import Job
from ..errors import Cancelled, InputError, ParamError
from ..executor.executor import Executor
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
    """Drives an engine for as long as somebody waits. Several threads may; their questions then share steps."""

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine = engine
        self._sync_driver = SyncDriver(engine, executor)

    def answers(
        self,
        asked: Sequence[Callable[[], PendingAnswer]],
        on_step: Callable[[Sequence[PendingAnswer]], None] = lambda _questions: None,
    ) -> list[Completion]:
        """Ask for all prompts at once, and wait for every answer; `on_step` looks on between steps."""
        questions: list[PendingAnswer] = []

        def done() -> bool:
            on_step(questions)
            return all(question.answer.over for question in questions)

        with self._holding(questions):
            for prepare in asked:
                questions.append(prepare())  # noqa: PERF401 (see `_holding`)
            for question in questions:
                self._engine.add(question.job)
            self._drive(questions, done)
            return [question.answer.completion() for question in questions]

    def stream(self, prepare: Callable[[], PendingAnswer], params: SamplingParams) -> Stream:
        if params.n > 1:
            raise ParamError("n", f"a stream shows one sample, not {params.n}; use generate or chat for several")
        question = prepare()
        results: list[Completion] = []
        begun = False

        def result() -> Completion:
            if not results:
                raise InputError("this stream failed or was closed before its end, so it has no completion")
            return results[0]

        def stop() -> None:
            question.answer.stopped = True

        def leave() -> None:
            if not begun:
                self._leave([question])

        def pieces() -> Generator[TextPiece, None, None]:
            nonlocal begun
            begun = True
            with self._holding([question]):
                self._engine.add(question.job, held=True)
                while found := self._piece(question):
                    yield from found
                results.append(question.answer.completion())

        return Stream(pieces(), result, stop, leave)

    def _piece(self, question: PendingAnswer) -> list[TextPiece]:
        """The next text of a stream, after as many steps as that takes; empty at its end.

        In between the request is held: it runs only while somebody waits for it.
        """
        answer = question.answer
        self._engine.resume(question.job)
        try:
            self._drive([question], lambda: answer.samples[0].fresh or answer.over or answer.stopped)
        except Cancelled:
            if not answer.stopped:  # nobody stopped this stream: the caller must hear of it
                raise
        if answer.stopped and not answer.over:
            self._engine.abort(question.job)
            self._sync_driver.step_until(lambda: answer.over)
        self._engine.hold(question.job)
        return answer.samples[0].pieces()

    def _drive(self, questions: Sequence[PendingAnswer], done: Callable[[], bool]) -> None:
        """Step until done; what fails is raised here, a cancel with the tokens so far."""

        def settled() -> bool:
            return done() or any(question.answer.error for question in questions)

        try:
            self._sync_driver.drive(settled)
        except Cancelled:
            samples = [sample for question in questions for sample in question.answer.samples]
            raise Cancelled([sample.token_ids for sample in samples]) from None
        for question in questions:
            if question.answer.error is not None:
                raise question.answer.error

    @contextmanager
    def _holding(self, questions: Sequence[PendingAnswer]) -> Iterator[None]:
        """However the block ends, nothing of these questions is left in the engine."""
        try:
            yield
        except BaseException:
            self._leave(questions)
            raise

    def _leave(self, questions: Sequence[PendingAnswer]) -> None:
        """Nobody wants these answers any more. May be called by a finalizer."""
        for question in questions:
            question.answer.abandon()
            self._engine.abort(question.job)
        self._sync_driver.settle()
