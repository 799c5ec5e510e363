"""A thread that steps an engine while there is something to do, a watchdog beside it, and an orderly end.

Refuses to know requests and listeners.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..config import EngineConfig
from ..errors import Cancelled, Draining, QueueFull, StepHung
from ..executor.protocol import Executor
from .engine import Engine
from .sequence import Job

_log = logging.getLogger(__name__)


class Driver:
    """Requests come from any thread; their listeners are called from the stepping thread."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        config: EngineConfig | None = None,
        on_step: Callable[[], None] = lambda: None,
        on_hung: Callable[[StepHung], None] = lambda _error: None,
    ) -> None:
        """`on_step` runs after every step, in its thread; `on_hung` in the watchdog's, while a step does not end."""
        self._engine = engine
        self._executor = executor
        self._config = config or EngineConfig()
        self._on_step, self._on_hung = on_step, on_hung
        self._wake = engine.wakeup
        self._quiet = threading.Condition()  # notified when a step has ended
        self._closing = threading.Event()
        self._draining = False
        self._hung: StepHung | None = None
        self._steps = 0  # begun so far
        self._stepping = False
        self._threads = [
            threading.Thread(target=self._run, name="kvilt-steps", daemon=True),
            threading.Thread(target=self._watch, name="kvilt-watchdog", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def healthy(self) -> bool:
        """Whether steps end in time, and all processes that share the model are there."""
        return self._executor.failure is None and (self._hung is None or not self._stepping)

    @property
    def accepting(self) -> bool:
        """Whether new requests are accepted."""
        return self.healthy and not self._draining

    # From any thread.

    def submit(self, job: Job) -> None:
        """Accept a request, or raise why not; a refused request holds nothing."""
        try:
            self._check(job.request.owner)
        except BaseException:
            job.release_resources()
            raise
        self._engine.add(job)
        self._wake.set()

    def abort(self, which: Job | str) -> None:
        """End a request within one step."""
        self._engine.abort(which)
        self._wake.set()

    def hold(self, which: Job | str) -> None:
        """Give a request no rows until `resume`: its reader is behind."""
        self._engine.hold(which)
        self._wake.set()

    def resume(self, which: Job | str) -> None:
        """Give a request rows again."""
        self._engine.resume(which)
        self._wake.set()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait until all others have ended; False if that took too long."""
        self._draining = True
        with self._quiet:
            return self._quiet.wait_for(lambda: self._engine.requests == 0, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the step in progress. Requests that are left fail; a step that hangs is left behind."""
        self._draining = True
        self._closing.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _check(self, owner: str) -> None:
        if (failure := self._executor.failure) is not None:
            raise failure
        if not self.healthy:
            raise StepHung(self._config.step_timeout_s)
        if self._draining:
            raise Draining()
        if self._engine.waiting >= self._config.max_waiting:
            waiting = self._engine.waiting_by_owner()
            most = self._config.max_waiting // len(
                {owner, *waiting}
            )  # an owner with less than its part of a full queue still gets in
            if waiting[owner] >= most:
                raise QueueFull(waiting[owner], most)

    # The thread that steps.

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.clear()
            if self._engine.ready:
                self._step()
            else:
                self._wake.wait(self._engine.wait_timeout_s)
        self._engine.fail_all(Draining())
        self._notify_readers()

    def _step(self) -> None:
        self._hung, stepped = None, True  # a watchdog may have been too late for the step before
        self._steps, self._stepping = self._steps + 1, True
        try:
            with self._executor.call():
                stepped = self._engine.step()
        except Cancelled:
            self._cancelled()
        except Exception:
            _log.exception("a step failed in a way it should not; its requests were ended")
        finally:
            self._stepping, self._hung = False, None
        self._notify_readers()
        if not stepped and self._engine.ready:
            time.sleep(0.001)  # samples want rows, and none could get one: do not spin

    def _cancelled(self) -> None:
        """If the watchdog cancelled the step, all requests fail; after any other cancel they continue."""
        if self._hung is not None:
            self._engine.fail_all(self._hung)

    def _notify_readers(self) -> None:
        try:
            self._on_step()
        except Exception:
            _log.exception("notifying the readers failed")
        with self._quiet:
            self._quiet.notify_all()

    # The thread that watches.

    def _watch(self) -> None:
        """Counts its own rounds, not a clock: a process that was stopped has no hung step."""
        limit_s = self._config.step_timeout_s
        round_s = min(1.0, limit_s / 4)
        step, age_s = 0, 0.0
        while not self._closing.wait(round_s):
            step, age_s = self._steps, age_s + round_s if step == self._steps else 0.0
            if self._stepping and self._hung is None and age_s > limit_s:
                self._trip(StepHung(limit_s))

    def _trip(self, error: StepHung) -> None:
        """Cancel the step and notify the readers; the driver continues when the step ends, before its next layer."""
        self._hung = error
        _log.critical("a step has taken more than %g s; it is cancelled, and its requests fail", error.limit_s)
        self._executor.cancel()
        try:
            self._on_hung(error)
        except Exception:
            _log.exception("notifying the readers of a hung step failed")
