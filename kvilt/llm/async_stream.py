"""A request's deltas for whoever awaits them. Leaving it ends the request within one step."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from typing import Self

from ..errors import InputError
from ..sampling.sampler import TokenLogprobs
from .completion import Completion
from .token_stream import Delta, TokenStream


class AsyncStream:
    """Deltas of one request as they come; afterwards `completion`. Leave it with `aclose`, or as a context manager."""

    def __init__(self, token_stream: TokenStream, request_id: str) -> None:
        self.id = request_id
        self._outlet = token_stream
        self._left = weakref.finalize(self, token_stream.leave)
        self._left.atexit = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._outlet.next()
        if delta is None:
            self._left.detach()
            raise StopAsyncIteration
        return delta

    @property
    def completion(self) -> Completion:
        """The whole result, once the stream was read to its end."""
        if not self._outlet.answer.over or self._outlet.answer.error is not None or self._left.alive:
            raise InputError("this stream was not read to its end, or failed, so it has no completion")
        return self._outlet.answer.completion()

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Those of the prompt, if they were asked for; all there are from the first delta with a token on."""
        return self._outlet.answer.prompt_logprobs

    def stop(self) -> None:
        """Draw no more; what there is can still be read, and `completion` has it."""
        self._outlet.stop()

    def close(self) -> None:
        """Leave: the request ends within one step, and its KV goes back. Waits for nothing; twice is fine."""
        self._left()

    async def aclose(self) -> None:
        """The same, for those who await."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()
