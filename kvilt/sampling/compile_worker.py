"""Worker processes that compile a grammar first, because a process can be killed; then it is compiled in this one.

A worker is started when first needed, compiles one grammar at a time, and is ended where a grammar goes over a limit on
time or memory, or when its caller no longer waits. Refuses to know constraints and the library's messages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompilerFailed, GrammarTooLarge
from . import library
from .library import CompileResult

_START_S = 60.0  # to start a worker and make its tables, on a machine with much other work
_PIECE = 1 << 16
_KEPT_BYTES = 64 << 20  # a worker that has grown by more is started anew


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What one grammar may take while it is compiled."""

    cpu_s: float
    wall_s: float
    memory_bytes: int


class CompileCancelled(Exception):
    """The caller no longer waits for this grammar."""


class CompileWorker:
    """One process that compiles grammars. Call `try_compile` from one thread; `cancel` and `close` from any."""

    def __init__(self, startup: bytes, limits: CompileLimits, command: Sequence[str] | None = None) -> None:
        """`startup` is the first message to the process: vocabulary and limits. `command` replaces the program."""
        self._command = command
        self._startup = startup
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._trying = self._cancelled = False

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def try_compile(self, grammar: str, where: str = "grammar") -> CompileResult:
        """Compile a grammar in the worker; GrammarTooLarge, about `where`, if that goes over a limit."""
        with self._lock:
            self._trying, self._cancelled = True, False
        try:
            process = self._started()
            answer = _exchange(process, library.frame(grammar.encode()), time.monotonic() + self._limits.wall_s)
            if answer is None:
                raise self._lost(process, where)
            verdict = CompileResult(**json.loads(answer))
        except TimeoutError:
            self.close()
            raise _too_large(where, f"takes longer than {self._limits.wall_s:g} s to compile") from None
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._trying = False
        if verdict.grown_bytes > _KEPT_BYTES:
            self.close()
        return verdict

    def cancel(self) -> None:
        """End the compilation that runs, if one does."""
        with self._lock:
            if self._trying:
                self._cancelled = True
                self._kill()

    def close(self) -> None:
        """End the process; the next compilation starts another one."""
        with self._lock:
            self._kill()
            process, self._process = self._process, None
        if process is not None:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = _spawn(self._command or _own_command())
        with self._lock:
            self._process = process
            if self._cancelled:
                process.kill()
        try:
            ready = _exchange(process, self._startup, time.monotonic() + _START_S)
        except TimeoutError:
            ready = None
        if ready is None:
            raise CompileCancelled if self._cancelled else CompilerFailed("did not start, or ended at once")
        return process

    def _lost(self, process: subprocess.Popen[bytes], where: str) -> Exception:
        """Why a process ended without an answer."""
        if self._cancelled:
            return CompileCancelled()
        process.wait()
        if process.returncode == -signal.SIGXCPU:
            return _too_large(where, f"takes more than {self._limits.cpu_s:g} s of computing to compile")
        return _too_large(where, f"takes more than {self._limits.memory_bytes >> 20} MiB to compile, or nests too deep")


def _too_large(where: str, what: str) -> GrammarTooLarge:
    return GrammarTooLarge(where, f"{what}; simplify it")


def _own_command() -> list[str]:
    found = importlib.util.find_spec("llguidance")
    if found is None or not found.submodule_search_locations:
        raise CompilerFailed("does not find llguidance; install it with: pip install 'kvilt[grammar]'")
    folders = [str(Path(place).parent) for place in found.submodule_search_locations]
    return [sys.executable, "-I", "-S", "-X", "utf8", library.__file__, str(os.getpid()), *folders]


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A worker's process, which shares nothing with this one but two pipes."""
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
            start_new_session=True,  # an interrupt at the terminal is for the parent
        )
    except (OSError, ValueError) as error:
        raise CompilerFailed(f"cannot be started ({type(error).__name__})") from None


def _exchange(process: subprocess.Popen[bytes], message: bytes, deadline: float) -> bytes | None:
    """Send a message and read the answer; None where the process ends, TimeoutError where the time is up."""
    assert process.stdin is not None and process.stdout is not None
    sink, source = process.stdin.fileno(), process.stdout.fileno()
    os.set_blocking(sink, False)
    unsent, got = memoryview(message), bytearray()
    while len(got) < 8 or len(got) < 8 + int.from_bytes(got[:8], "little"):
        left = deadline - time.monotonic()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        if unsent:
            poll.register(sink, select.POLLOUT)
        ready = dict(poll.poll(max(0.0, left) * 1000)) if left > 0 else {}
        if not ready:
            raise TimeoutError
        if source in ready:
            piece = os.read(source, _PIECE)
            if not piece:
                return None
            got += piece
        if unsent and sink in ready:
            try:
                unsent = unsent[os.write(sink, unsent[:_PIECE]) :]
            except BlockingIOError:
                continue
            except OSError:
                return None
    return bytes(got[8:])
