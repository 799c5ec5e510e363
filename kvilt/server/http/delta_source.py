"""Events that are made of the deltas of one stream: what all APIs do alike. Refuses to know what the events are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable

from ...llm import AsyncStream, Delta


class DeltaSource(ABC):
    """An `EventSource` over one stream; an API encodes its deltas, and writes what stands before and behind them."""

    work: Callable[[], Awaitable[None]] | None = None  # nothing is awaited while deltas are read

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def on_news(self, callback: Callable[[], None]) -> None:
        """Call back whenever there may be something to read."""
        self._stream.on_news(callback)

    def opening(self) -> bytes:
        """The events before the first token; none, unless an API has some."""
        return b""

    def read_ready(self) -> bytes | None:
        """The events of deltas that are there; None where there are none."""
        deltas = self._stream.read_ready()
        return b"".join(map(self._encode, deltas)) if deltas else None

    @property
    def over(self) -> bool:
        """Whether all deltas were read."""
        return self._stream.ended

    @abstractmethod
    def closing(self) -> AsyncGenerator[bytes, None]:
        """The events after the last token."""

    def close(self) -> None:
        """End the request."""
        self._stream.close()

    @abstractmethod
    def _encode(self, delta: Delta) -> bytes:
        """The events of one delta; empty where it adds nothing."""
