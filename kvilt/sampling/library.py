"""The one module that imports llguidance: vocabularies in its shape, and grammars compiled within limits.

Compile workers run this file as a script, in a process that has none of kvilt's other modules: it imports nothing of
kvilt, and talks to its parent in frames over two pipes (see `frame`). What a worker compiles is compiled by the same
functions here, later, when it is known to be harmless.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from llguidance import LLMatcher as LLMatcher
    from llguidance import LLTokenizer as LLTokenizer

STACK_BYTES = 256 << 20
_STACK_PAUSES_S = (0.001, 0.01, 0.1, 0.5)  # after failures to get a stack
_STACK_LOCK = threading.Lock()  # the size of stacks is a setting of the process
_NICE = 5  # a worker gives way to the threads that compute


class LibraryFailed(Exception):
    """The library did not compile a grammar, and not for a reason that it gives itself."""


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of compiling: `problem` is empty or names the stage that failed; `message` is the library's."""

    problem: str = ""  # grammar, warning, mask, empty, stack, panic
    message: str = ""
    cpu_s: float = 0.0
    grown_bytes: int = 0  # memory that the process took for it


class _TokenTable:
    """A vocabulary in the shape the library asks for."""

    def __init__(self, tokens: list[bytes], end_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(end_ids)

    def __call__(self, _text: bytes | str) -> list[int]:
        """How the model spells forced text; nothing is forced, so this is never asked."""
        return []


def new_tokenizer(vocabulary: Sequence[bytes], end_ids: Sequence[int]) -> LLTokenizer:
    """The library's tables of a vocabulary; ImportError where it is not installed."""
    from llguidance import LLTokenizer, TokenizerWrapper

    # The library marks special tokens with a byte 255, which no UTF-8 text holds: tokens with one are never text.
    tokens = [b"" if b"\xff" in token else bytes(token) for token in vocabulary]
    for token in end_ids:
        tokens[token] = b"\x00end of text %d" % token
    return LLTokenizer(TokenizerWrapper(_TokenTable(tokens, end_ids)), eos_token=list(end_ids))


def new_matcher(tokenizer: LLTokenizer, grammar: str, limits: Mapping[str, Any]) -> tuple[LLMatcher, float]:
    """A matcher at the beginning of a grammar, which shares nothing with others, and what it took in CPU seconds."""
    from llguidance import LLMatcher, LLParserLimits

    own = LLParserLimits(**limits, verbose_errors=False)
    return _on_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=own))


def compile_result(matcher: LLMatcher) -> CompileResult:
    """The result for a grammar, after its first mask."""
    if matcher.is_error():
        return CompileResult("grammar", matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        return CompileResult("warning", warnings[0])
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error():
        return CompileResult("mask", first.get_error())
    return CompileResult() if any(mask) else CompileResult("empty")


def _on_large_stack(make: Callable[[], LLMatcher]) -> tuple[LLMatcher, float]:
    """Run the library's compiler where it may go deep: it follows chains of rules by recursion, at 8 KB a rule.

    On a usual stack a schema of a thousand references would end the process. The size is for the longest chain that the
    limits on texts and schemas let through; only what is used of it is real.
    """
    made: list[tuple[LLMatcher, float]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append((make(), time.thread_time()))
        except BaseException as error:  # a panic of the library is no Exception
            failed.append(error)

    _start_on_large_stack(run).join()
    if failed:
        raise LibraryFailed(f"the library failed to compile it: {str(failed[0])[:120]}") from failed[0]
    return made[0]


def _start_on_large_stack(run: Callable[[], None]) -> threading.Thread:
    """A thread that runs this; LibraryFailed if there is no memory for its stack.

    `join` returns a moment before the stack of a thread is unmapped. A worker's memory is for one stack, so it tries
    again for a while.
    """
    with _STACK_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            for pause_s in _STACK_PAUSES_S:
                try:
                    thread = threading.Thread(target=run, name="kvilt grammar", daemon=True)
                    thread.start()
                    return thread
                except RuntimeError:
                    time.sleep(pause_s)
            raise LibraryFailed("there is no memory for the stack that compiling needs")
        finally:
            threading.stack_size(before)


# The worker's side.


def frame(content: bytes) -> bytes:
    """A message on a pipe: its length in eight bytes, then itself."""
    return len(content).to_bytes(8, "little") + content


def startup_message(vocabulary: Sequence[bytes], settings: Mapping[str, Any]) -> bytes:
    """The first message to a worker: settings, the lengths of all tokens, and their bytes end to end."""
    lengths = b"".join(len(token).to_bytes(4, "little") for token in vocabulary)
    return frame(json.dumps(dict(settings)).encode()) + frame(lengths) + frame(b"".join(vocabulary))


def _read(source: BinaryIO) -> bytes:
    """The next message; the process ends where its parent is gone."""
    head = source.read(8)
    content = source.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if len(head) < 8 or len(content) < int.from_bytes(head, "little"):
        raise SystemExit(0)
    return content


def _vocabulary(source: BinaryIO) -> list[bytes]:
    lengths, content = _read(source), _read(source)
    tokens: list[bytes] = []
    at = 0
    for i in range(0, len(lengths), 4):
        size = int.from_bytes(lengths[i : i + 4], "little")
        tokens.append(content[at : at + size])
        at += size
    return tokens


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Compile grammars from the pipe, one at a time, until the parent closes it."""
    settings = json.loads(_read(source))
    tokenizer = new_tokenizer(_vocabulary(source), settings["end_ids"])
    _limit_memory(settings["memory_bytes"])
    sink.write(frame(b"{}"))
    while True:
        grammar = _read(source).decode()
        _limit_cpu(settings["cpu_s"])
        found = _trial(tokenizer, grammar, settings["limits"])
        sink.write(frame(json.dumps(asdict(found)).encode()))


def _trial(tokenizer: LLTokenizer, grammar: str, limits: Mapping[str, Any]) -> CompileResult:
    began, before = time.process_time(), _resident_bytes()
    try:
        matcher, _ = new_matcher(tokenizer, grammar, limits)
        found = compile_result(matcher)
    except LibraryFailed as error:
        found = CompileResult("panic", str(error))
    return CompileResult(found.problem, found.message[:10_000], time.process_time() - began, _resident_bytes() - before)


def _statm(field: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGESIZE")
    except OSError:  # no such file outside Linux
        return 0


def _resident_bytes() -> int:
    return _statm(1)


def _limit_memory(memory_bytes: int) -> None:
    """From here on the process may take this much more, and the stack; where it wants more it is ended."""
    import resource

    limit = _statm(0) + STACK_BYTES + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """From here on the process may compute for so long, to the next second; then it is ended."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = math.ceil(time.process_time() + seconds)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def _end_with_parent() -> None:
    """Ask Linux to end this process when its parent ends; elsewhere the limit on CPU time does."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)


def main() -> None:
    """Run as a worker: the arguments are the parent's process id, and folders in which the library lies."""
    _end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit(0)  # it ended before it could be watched
    sys.path.extend(sys.argv[2:])
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the library prints is no answer
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
