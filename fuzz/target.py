"""What is fuzzed, and what counts as a finding. Knows no format and no engine.

A target's `check` gets bytes and returns a short name of what became of them ("read", "refused magic"). Everything it
raises is a finding: a target catches the typed errors that kvilt may raise for its input, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

FREE_S, SECONDS_A_MIB = 2.0, 1.0  # CPU time that an input may take


Mutate = Callable[[bytes, random.Random], bytes]


class Finding(AssertionError):
    """An oracle disagrees with what kvilt did."""


class TooSlow(BaseException):
    """An input took more CPU time than its size allows. No `except Exception` on the way may swallow it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input."""

    name: str
    check: Callable[[bytes], str]
    seeds: Callable[[], Sequence[bytes]]  # sound inputs, and some that are just not
    words: tuple[bytes, ...] = ()  # what the format is made of
    mutate: Mutate | None = None  # one that knows the format; a third of all changes are its
    most_bytes: int = 1 << 16
    most_more_memory: int = 2 << 30  # address space that may be taken beyond what imports took


def label(error: BaseException) -> str:
    """A short name for refusals of one kind: the error and the words of its message, without what it quotes."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^a-z ]", " ", str(error)[:400]).split()
    return f"{type(error).__name__} {' '.join(word for word in words if len(word) > 1)[-48:]}"


@contextlib.contextmanager
def file_in_memory(data: bytes) -> Iterator[Path]:
    """A path under which these bytes can be opened and mapped; nothing is left of it, however the process ends."""
    descriptor = os.memfd_create("fuzz")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def limit_s(nbytes: int) -> float:
    """CPU seconds that an input of so many bytes may take."""
    return FREE_S + SECONDS_A_MIB * nbytes / (1 << 20)


def limit_memory(more_bytes: int) -> None:
    """Let this process map so much more than it does now; past it comes MemoryError."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))


@contextlib.contextmanager
def bounded_time(nbytes: int) -> Iterator[None]:
    """TooSlow out of Python code that runs on, and also afterwards if C code held the signal up."""
    began_s = time.process_time()

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"still running after {time.process_time() - began_s:.1f} s for {nbytes} bytes")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, limit_s(nbytes))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if (took_s := time.process_time() - began_s) > limit_s(nbytes):
        raise TooSlow(f"took {took_s:.1f} s for {nbytes} bytes")
