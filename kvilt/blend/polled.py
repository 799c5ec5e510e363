"""Retrievals that are polled: an engine asks what is there, goes on with other work, and waits only where it wants to.

A task that can only be waited for is run in a thread of its own. Refuses to know engines.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable

from ..errors import StoreMiss
from .interfaces import BlendRetrieverResult, BlendRetrieverTask

LAYER_S = 10.0  # a retriever that gives no layer for so long is given up
_LOG = logging.getLogger(__name__)


class PolledTask(BlendRetrieverTask):
    """A retrieval whose layers arrive in order. Methods may be called from any thread."""

    @property
    @abstractmethod
    def layers_ready(self) -> int:
        """How many layers, from the first on, can be had without waiting."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why the rest will not come; empty as long as it may."""

    @abstractmethod
    def settled(self, layers: int = 0) -> bool:
        """Whether so many layers are there or will not come; with 0, whether anything was found. Never waits."""

    @abstractmethod
    def patience_s(self, layers: int = 0) -> float:
        """Seconds until `settled` is true at the latest."""

    @abstractmethod
    def settle(self, layers: int = 0) -> None:
        """Wait until `settled`."""

    @abstractmethod
    def watch(self, notify: Callable[[], None]) -> None:
        """Call this, from any thread, at each change."""

    @abstractmethod
    def cancel(self) -> None:
        """The caller does not need the rest."""


class BackgroundTask(PolledTask):
    """Any task, run in a thread of its own: its caller is never held up, and what it raises is a miss."""

    def __init__(self, begin: Callable[[], BlendRetrieverTask], layers: int, layer_s: float = LAYER_S) -> None:
        """`begin` makes the task; it may wait as well."""
        self._begin = begin
        self._layers = layers
        self._layer_s = layer_s
        self._change = threading.Condition()
        self._results: list[BlendRetrieverResult] = []
        self._reason = ""
        self._heard_s = time.monotonic()
        self._watchers: list[Callable[[], None]] = []
        threading.Thread(target=self._load, name="kvilt-retriever", daemon=True).start()

    @property
    def layers_ready(self) -> int:
        return len(self._results)

    @property
    def reason(self) -> str:
        return self._reason

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """One layer; StoreMiss where it does not come."""
        self.settle(layer_id + 1)
        if layer_id >= len(self._results):
            raise StoreMiss(self._reason)
        return self._results[layer_id]

    def settled(self, layers: int = 0) -> bool:
        if not self._settled(layers) and self._left_s() <= 0:
            self._fail("deadline")
        return self._settled(layers)

    def patience_s(self, layers: int = 0) -> float:
        return 0.0 if self._settled(layers) else max(0.0, self._left_s())

    def settle(self, layers: int = 0) -> None:
        while not self.settled(layers):
            with self._change:
                self._change.wait_for(lambda: self._settled(layers), max(0.0, self._left_s()))

    def watch(self, notify: Callable[[], None]) -> None:
        self._watchers.append(notify)

    def cancel(self) -> None:
        self._fail("cancelled")

    def _settled(self, layers: int) -> bool:
        return bool(self._reason) or len(self._results) >= max(1, layers)  # the first layer says what was found

    def _left_s(self) -> float:
        return self._heard_s + self._layer_s - time.monotonic()

    def _load(self) -> None:
        try:
            task = self._begin()
            for layer in range(self._layers):
                if self._reason:
                    return
                self._add(task.result(layer))
        except StoreMiss as miss:
            self._fail(miss.reason)
        except Exception:
            _LOG.warning("a retriever failed; what it did not give is computed", exc_info=True)
            self._fail("error")

    def _add(self, found: BlendRetrieverResult) -> None:
        with self._change:
            if self._reason:
                return
            self._results.append(found)
            self._heard_s = time.monotonic()
            self._change.notify_all()
        self._notify_watchers()

    def _fail(self, reason: str) -> None:
        with self._change:
            if self._reason or len(self._results) == self._layers:
                return
            self._reason = reason
            self._change.notify_all()
        self._notify_watchers()

    def _notify_watchers(self) -> None:
        """Outside of the lock, since they may call back."""
        for notify in tuple(self._watchers):
            notify()
