"""From the thread that steps to event loops: a bounded queue for each reader, an event for other callers.

If a reader falls behind, the engine holds its request and no other one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..blend.report import BlendReport
from ..engine.driver import Driver
from ..engine.event import Ended, Event, PromptProgress, TokenEvent
from ..engine.sequence import Job
from ..sampling.sampler import TokenLogprobs
from .answer import Answer, prompt_usage
from .completion import FinishReason, Miss, Usage


@dataclass(frozen=True, slots=True)
class ReadingProgress:
    """How far a prompt is computed."""

    tokens: int  # tokens whose KV is there, computed or found
    cached: int  # of these, found
    prompt_tokens: int  # all there are
    blended: BlendReport | None = None  # where the rest came from, if it was blended
    miss: Miss | None = None  # why no more was reused

    @property
    def usage(self) -> Usage:
        """The token counts of the prompt so far."""
        counts = prompt_usage(self.prompt_tokens, 0, self.cached, self.tokens - self.cached, self.blended)
        return replace(counts, miss=self.miss)


@dataclass(slots=True)
class Delta:
    """What a step added to one sample: a token and the text that is certain now, or its end and the rest of it.

    Before the first token, with `progress`, how far the prompt is computed.
    """

    index: int
    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    reading: ReadingProgress | None = None
    drafted: bool = False  # the token was an accepted draft
    stop_string: str | None = None  # with the end: the stop string that was found, if one was


class Notifier:
    """Wakes readers after a step: once for each event loop, however many readers it has."""

    def __init__(self) -> None:
        self._fresh: dict[TokenStream, None] = {}

    def note(self, token_stream: TokenStream) -> None:
        """Mark a stream that has something to read. Called in the thread that steps."""
        self._fresh[token_stream] = None

    def deliver(self) -> None:
        """Wake the readers, after a step."""
        fresh, self._fresh = list(self._fresh), {}
        for loop in dict.fromkeys(token_stream.loop for token_stream in fresh):
            streams = [token_stream for token_stream in fresh if token_stream.loop is loop]
            try:
                loop.call_soon_threadsafe(_wake, streams)
            except RuntimeError:  # the loop is closed, so these streams have no reader
                for token_stream in streams:
                    token_stream.leave()


class TokenStream:
    """Listens for one reader. `on_event` is called where steps run, everything else in the reader's event loop."""

    def __init__(
        self, answer: Answer, loop: asyncio.AbstractEventLoop, driver: Driver, notifier: Notifier, unread: int | None
    ) -> None:
        """`unread` is how many deltas may wait to be read; None: no deltas, the caller waits for the end."""
        self.answer = answer
        self.loop = loop
        self.job: Job | None = None  # whose events it gets, once the job is made
        self._driver = driver
        self._notifier = notifier
        self._unread = unread
        self._queue: deque[Delta] = deque()
        self._reading: deque[Delta] = deque(maxlen=1)  # only the latest: a slow reader misses the others
        self._held = False
        self._over = False  # the last delta is in the queue
        self._news = asyncio.Event()
        self._wake: Callable[[], None] = self._news.set
        self._failure: BaseException | None = None

    def on_event(self, event: Event) -> bool:
        """Take an event of the engine; called in the thread that steps."""
        enough, unread = self.answer.on_event(event), self._unread
        if isinstance(event, PromptProgress):
            miss = self.answer.shown_miss(event.miss)
            reading = ReadingProgress(event.tokens, event.cached, self.answer.prompt_tokens, event.blended, miss)
            self._reading.append(Delta(event.index, "", reading=reading))
        elif unread is not None and isinstance(event, TokenEvent | Ended):
            self._queue.append(self._delta(event))
            if len(self._queue) >= unread and not self._held:
                self._driver.hold(self._running_job())
                self._held = True  # last: otherwise a quick reader could resume a request that is not held yet
        if unread is not None or self.answer.over:
            self._over = self.answer.over  # after the last delta: a reader that is awake must not miss it
            self._notifier.note(self)
        return enough

    def stop(self) -> None:
        """Draw no more; deltas that are there can still be read."""
        self._driver.abort(self._running_job())

    def leave(self) -> None:
        """The reader has left: the request ends within one step, and its kept KV is freed."""
        self.answer.abandon()
        self._driver.abort(self._running_job())

    def wake(self) -> None:
        """There is something to read."""
        self._wake()

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call back in the event loop, instead of waking a task, whenever there may be something to read."""
        self._wake = callback

    def fail(self, error: BaseException) -> None:
        """Raise this error in the reader, whatever comes later."""
        self._failure = self._failure or error
        self._wake()

    def read_ready(self, most: int) -> list[Delta]:
        """The deltas that wait to be read, about `most` of them. Raises the error of a request that failed."""
        queue = self._queue
        deltas = [self._reading.popleft()] if self._reading else []
        deltas += [queue.popleft() for _ in range(min(len(queue), most))]
        if self._held or not deltas:  # it may have been held just after the last delta was taken
            self._resume_if_read()
        if not deltas:
            self._raise_failure()
        return deltas

    @property
    def ended(self) -> bool:
        """Whether the last delta was read, of a request that did not fail."""
        return self._over and not self._queue and not self._reading and self._error is None

    async def next(self) -> Delta | None:
        """The next delta; None after the last."""
        while True:
            if self._reading:
                return self._reading.popleft()
            if self._queue:
                delta = self._queue.popleft()
                self._resume_if_read()
                return delta
            self._resume_if_read()  # it may have been held just after the last delta was taken
            self._raise_failure()
            if self.ended:
                return None
            await self._wait()

    async def finished(self) -> None:
        """Return when every sample has ended."""
        while True:
            self._raise_failure()
            if self.answer.over:
                return
            await self._wait()

    def _resume_if_read(self) -> None:
        """Resume a held request once its reader has caught up."""
        if self._held and len(self._queue) <= (self._unread or 0) // 2:
            self._held = False
            self._driver.resume(self._running_job())

    def _running_job(self) -> Job:
        assert self.job is not None
        return self.job

    @property
    def _error(self) -> BaseException | None:
        return self._failure or self.answer.error

    def _raise_failure(self) -> None:
        if (error := self._error) is not None:
            raise error

    async def _wait(self) -> None:
        self._news.clear()
        if not self._queue and not self._reading and not self._over and self._failure is None:
            await self._news.wait()

    def _delta(self, event: TokenEvent | Ended) -> Delta:
        sample = self.answer.samples[event.index]
        text = sample.take()
        if isinstance(event, TokenEvent):
            return Delta(event.index, text, event.token, event.logprobs, drafted=event.drafted)
        return Delta(event.index, text, finish_reason=sample.finish_reason, stop_string=sample.stop_string)


def _wake(token_streams: Iterable[TokenStream]) -> None:
    for token_stream in token_streams:
        token_stream.wake()
