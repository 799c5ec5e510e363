"""From the thread that steps to whoever awaits: a bounded queue for each reader of a stream, a future for the rest.

A reader who falls behind has its own request held, and nobody else's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..blend.blender import BlendReport
from ..engine.driver import Driver
from ..engine.event import Ended, Event, PromptProgress, TokenEvent
from ..engine.sequence import Job
from ..sampling.sampler import TokenLogprobs
from .answer import Answer, prompt_usage
from .completion import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class ReadingProgress:
    """How far a prompt is read."""

    tokens: int  # whose KV is there, computed or found
    cached: int  # of these, found
    prompt_tokens: int  # all there are
    blended: BlendReport | None = None  # where the rest came from, if it was blended

    @property
    def usage(self) -> Usage:
        """What the prompt took so far."""
        return prompt_usage(self.prompt_tokens, 0, self.cached, self.tokens - self.cached, self.blended)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one sample: a token and the text that is certain now, or its end and the rest of it.

    Before the first token, if that was asked for, how far the prompt is read.
    """

    index: int
    text: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    reading: ReadingProgress | None = None
    drafted: bool = False  # the token was an accepted draft


class Notifier:
    """Wakes readers after a step: once for each event loop, however many readers it has."""

    def __init__(self) -> None:
        self._fresh: dict[TokenStream, None] = {}

    def note(self, token_stream: TokenStream) -> None:
        """There is something for this reader. In the thread that steps."""
        self._fresh[token_stream] = None

    def deliver(self) -> None:
        """After a step."""
        fresh, self._fresh = list(self._fresh), {}
        for loop in dict.fromkeys(token_stream.loop for token_stream in fresh):
            mine = [token_stream for token_stream in fresh if token_stream.loop is loop]
            try:
                loop.call_soon_threadsafe(_wake, mine)
            except RuntimeError:  # the loop is closed: nobody will ever read this
                for token_stream in mine:
                    token_stream.leave()


class TokenStream:
    """Listens for one reader. `on_event` is called where steps run, everything else in the reader's event loop."""

    def __init__(
        self, answer: Answer, loop: asyncio.AbstractEventLoop, driver: Driver, post: Notifier, unread: int | None
    ) -> None:
        """`unread` is how many deltas may wait for the reader; None: there are none, only the end is waited for."""
        self.answer = answer
        self.loop = loop
        self.job: Job | None = None  # what it listens to, once that is made
        self._driver = driver
        self._post = post
        self._unread = unread
        self._queue: deque[Delta] = deque()
        self._reading: deque[Delta] = deque(maxlen=1)  # only the latest: who reads slowly is not told every step
        self._held = False
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    def on_event(self, event: Event) -> bool:
        """The engine's side."""
        enough = self.answer.on_event(event)
        if isinstance(event, PromptProgress):
            reading = ReadingProgress(event.tokens, event.cached, self.answer.prompt_tokens, event.blended)
            self._reading.append(Delta(event.index, "", reading=reading))
        elif self._unread is not None and isinstance(event, TokenEvent | Ended):
            self._queue.append(self._delta(event))
            if len(self._queue) >= self._unread and not self._held:
                self._driver.hold(self._own())
                self._held = True  # after: a quick reader that saw it first would resume what is not held yet
        if self._unread is not None or self.answer.over:
            self._post.note(self)
        return enough

    def stop(self) -> None:
        """Draw no more; what there is can still be read."""
        self._driver.abort(self._own())

    def leave(self) -> None:
        """Nobody reads any more: the request ends within one step, and what it would keep goes back."""
        self.answer.abandon()
        self._driver.abort(self._own())

    def wake(self) -> None:
        """There is news."""
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Whatever comes later, the reader hears of this."""
        self._failure = self._failure or error
        self._news.set()

    async def next(self) -> Delta | None:
        """The next delta; None after the last."""
        while True:
            if self._reading:
                return self._reading.popleft()
            if self._queue:
                delta = self._queue.popleft()
                self._relax()
                return delta
            self._relax()  # it may have been held just after the last delta was taken
            self._check()
            if self.answer.over:
                return None
            await self._wait()

    async def finished(self) -> None:
        """Return when every sample has ended."""
        while True:
            self._check()
            if self.answer.over:
                return
            await self._wait()

    def _relax(self) -> None:
        """Let a request go on whose reader has caught up."""
        if self._held and len(self._queue) <= (self._unread or 0) // 2:
            self._held = False
            self._driver.resume(self._own())

    def _own(self) -> Job:
        assert self.job is not None
        return self.job

    def _check(self) -> None:
        error = self._failure or self.answer.error
        if error is not None:
            raise error

    async def _wait(self) -> None:
        self._news.clear()
        if not self._queue and not self._reading and not self.answer.over and self._failure is None:
            await self._news.wait()

    def _delta(self, event: TokenEvent | Ended) -> Delta:
        sample = self.answer.samples[event.index]
        text = sample.take()
        if isinstance(event, TokenEvent):
            return Delta(event.index, text, event.token, event.logprobs, drafted=event.drafted)
        return Delta(event.index, text, finish_reason=sample.finish_reason)


def _wake(outlets: Iterable[TokenStream]) -> None:
    for token_stream in outlets:
        token_stream.wake()
