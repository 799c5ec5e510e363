"""A request's deltas for an event loop. Closing the stream ends the request within one step."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable
from typing import Self

from ..errors import InputError
from ..sampling.sampler import TokenLogprobs
from .completion import Completion
from .token_stream import Delta, TokenStream


class AsyncStream:
    """Deltas of one request as they come; afterwards `completion`. Close it, or use it as a context manager."""

    def __init__(self, token_stream: TokenStream, request_id: str) -> None:
        self.id = request_id
        self._token_stream = token_stream
        self._finalizer = weakref.finalize(self, token_stream.leave)
        self._finalizer.atexit = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._token_stream.next()
        if delta is None:
            self._finalizer.detach()
            raise StopAsyncIteration
        return delta

    def on_news(self, callback: Callable[[], None]) -> None:
        """Read by `read_ready` instead of iterating: `callback` runs in the event loop when something may be there."""
        self._token_stream.on_news(callback)

    def read_ready(self, most: int = 16) -> list[Delta]:
        """The deltas that are there, about `most` of them, without waiting; a failed request raises its error."""
        deltas = self._token_stream.read_ready(most)
        if self._token_stream.ended:
            self._finalizer.detach()
        return deltas

    @property
    def ended(self) -> bool:
        """Whether the last delta was read."""
        return self._token_stream.ended

    @property
    def completion(self) -> Completion:
        """The whole result, once the stream was read to its end."""
        if not self._token_stream.answer.over or self._token_stream.answer.error is not None or self._finalizer.alive:
            raise InputError("this stream was not read to its end, or failed, so it has no completion")
        return self._token_stream.answer.completion()

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt, with prompt_logprobs; complete from the first delta with a token on."""
        return self._token_stream.answer.prompt_logprobs

    def stop(self) -> None:
        """Draw no more; deltas that are there can still be read, and `completion` has them."""
        self._token_stream.stop()

    def close(self) -> None:
        """End the request within one step, and free its KV. Waits for nothing; may be called twice."""
        self._finalizer()

    async def aclose(self) -> None:
        """`close`, for `async with`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()
