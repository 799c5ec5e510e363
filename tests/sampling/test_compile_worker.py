"""Grammars are compiled in processes that can be ended: limits, cancellation, a bounded queue, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from grammars import BYTES, END, byte_compiler, takes

from kvilt.errors import CompilerFailed, GrammarError, GrammarQueueFull, GrammarTooLarge, ModelClosed, Unsupported
from kvilt.llm.grammars import Grammars
from kvilt.sampling import library
from kvilt.sampling.compile_queue import CompileQueue, PendingGrammar
from kvilt.sampling.compile_worker import CompileCancelled, CompileLimits, CompileWorker
from kvilt.sampling.constraint import Choice, Constraint, JsonSchema, Lark, Regex
from kvilt.sampling.grammar import Compiler, GrammarLimits, _refusal

HANG_S = 60.0  # what no machine takes for what is waited for here
MANY = [f"/(a{{{i + 1}}})*/" for i in range(130)]
HOSTILE: dict[str, Constraint] = {
    "intersection": Lark(f"start: A\nA: {' & '.join(MANY)}"),
    "schema": JsonSchema({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(130)]}),
}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def isolated() -> Iterator[Compiler]:
    compiler = byte_compiler(
        limits=GrammarLimits(compile_s=0.1, compile_wall_s=HANG_S, compile_bytes=48 << 20), isolated=True
    )
    yield compiler
    compiler.close()


# The worker's answers.


def test_what_a_worker_compiled_is_compiled_here(isolated: Compiler) -> None:
    grammar = isolated.compile(Choice(["yes", "no"]))
    assert takes(grammar, "yes") and not takes(grammar, "ye")
    assert isolated.compile(Choice(["yes", "no"])) is grammar


@pytest.mark.parametrize(
    "constraint", [Lark("start: y"), Lark("start: /(/"), JsonSchema({"not": {}}), Lark('start: "a" & "b"')], ids=str
)
def test_a_worker_refuses_in_the_same_words(isolated: Compiler, constraint: Constraint) -> None:
    errors = []
    for compiler in (isolated, byte_compiler()):
        with pytest.raises(GrammarError) as caught:
            compiler.compile(constraint)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_stack_that_is_not_unmapped_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's stack goes a moment after the thread was joined, and a worker has memory for one stack."""
    honest, refused = threading.Thread.start, 2

    def start(thread: threading.Thread) -> None:
        nonlocal refused
        refused -= 1
        if refused >= 0:
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert takes(byte_compiler().compile(Choice(["yes"])), "yes")
    refused = 100
    with pytest.raises(GrammarError, match="no memory for the stack"):
        byte_compiler().compile(Choice(["yes"]))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_takes_too_much_ends_its_worker_and_nothing_else(isolated: Compiler, name: str) -> None:
    with pytest.raises(GrammarTooLarge, match="simplify it"):
        isolated.compile(HOSTILE[name])
    assert takes(isolated.compile(Choice(["a", name])), "a")


FUEL = Lark("start: A\nA: " + " & ".join(f"/.*{chr(97 + i % 26)}.{{{i % 9}}}/" for i in range(130)))


def test_a_grammar_that_the_librarys_fuel_does_not_suffice_for_is_too_large() -> None:
    """Fuel counts work, not time: nothing else may end this one, so it is compiled where no clock is read."""
    with pytest.raises(GrammarTooLarge, match="fuel exhausted"):
        byte_compiler().compile(FUEL)
    advice = "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable it"
    assert isinstance(_refusal(advice, "lark"), GrammarTooLarge)


# A worker that does what it is told, instead of compiling.

FAKE = """
import json, os, sys
sys.path.insert(0, {folder!r})
import library
source, sink = sys.stdin.buffer, sys.stdout.buffer.raw
for _ in range(3):
    library._read(source)
sink.write(library.frame(b"{{}}"))
while True:
    match library._read(source).decode():
        case "hang":
            library._end_with_parent()
            sys.stdin.buffer.read()
        case "abort":
            os.abort()
        case "spin":
            library._limit_cpu(0.01)
            while True:
                pass
        case "grow":
            sink.write(library.frame(json.dumps({{"grown_bytes": 1 << 40}}).encode()))
        case "ok":
            sink.write(library.frame(b"{{}}"))
"""


@pytest.fixture
def new_fake(tmp_path: Path) -> Iterator[Callable[..., CompileWorker]]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(folder=str(Path(library.__file__).parent)))
    made: list[CompileWorker] = []

    def new(wall_s: float = HANG_S) -> CompileWorker:
        bounds = CompileLimits(cpu_s=2.0, wall_s=wall_s, memory_bytes=1 << 30)
        made.append(
            CompileWorker(library.startup_message(BYTES, {}), bounds, [sys.executable, "-I", "-S", str(script)])
        )
        return made[-1]

    yield new
    for worker in made:
        worker.close()


@pytest.mark.parametrize(
    ("told", "message"), [("abort", "MiB to compile"), ("spin", "s of computing"), ("hang", "longer than 0.5 s")]
)
def test_a_worker_over_a_limit_is_replaced(new_fake: Callable[..., CompileWorker], told: str, message: str) -> None:
    worker = new_fake(wall_s=0.5 if told == "hang" else HANG_S)
    with pytest.raises(GrammarTooLarge, match=message) as caught:
        worker.try_compile(told, "regex")
    assert caught.value.where == "regex" and worker.pid is None
    assert new_fake().try_compile("ok").problem == ""


def test_a_worker_stays_while_it_is_small(new_fake: Callable[..., CompileWorker]) -> None:
    worker = new_fake()
    worker.try_compile("ok")
    first = worker.pid
    worker.try_compile("ok")
    assert first is not None and worker.pid == first
    worker.try_compile("grow")
    assert worker.pid is None and not is_running(first)


def test_an_abandoned_trial_ends_its_process(new_fake: Callable[..., CompileWorker]) -> None:
    worker = new_fake()
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(worker.try_compile, "hang")
        wait_for(lambda: worker.pid is not None)
        pid = worker.pid
        worker.cancel()
        with pytest.raises(CompileCancelled):
            trial.result(HANG_S)
    assert pid is not None and not is_running(pid)
    worker.cancel()  # nothing runs: nothing happens
    assert worker.try_compile("ok").problem == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit on CPU time ends it")
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Also in the middle of a grammar, and where the parent is killed."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, threading, time\n"
        "from kvilt.sampling import library\n"
        "from kvilt.sampling.compile_worker import CompileLimits, CompileWorker\n"
        "settings = {'end_ids': [256], 'limits': {}, 'cpu_s': 60, 'memory_bytes': 1 << 33}\n"
        "vocabulary = [bytes([i]) for i in range(256)] + [b'', b'']\n"
        "worker = CompileWorker(library.startup_message(vocabulary, settings), CompileLimits(60, 60, 1 << 33))\n"
        "worker.try_compile('start: \"a\"')\n"
        "threading.Thread(target=worker.try_compile, args=(sys.argv[1],), daemon=True).start()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    hostile = f"start: A\nA: {' & '.join(MANY)}"
    parent = subprocess.Popen(
        [sys.executable, str(script), hostile],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: not is_running(pid))


def test_a_process_that_cannot_start_is_told_as_such() -> None:
    for command in (["/nowhere/python"], [sys.executable, "-c", "raise SystemExit(3)"]):
        worker = CompileWorker(library.startup_message(BYTES, {}), CompileLimits(1.0, 1.0, 1 << 20), command)
        with pytest.raises(CompilerFailed):
            worker.try_compile("start: /a/")
        assert worker.pid is None


# The queue.


class Desk:
    """A queue whose grammars are the constraints themselves, made when the test says so."""

    def __init__(self, threads: int = 1, waiting: int = 2) -> None:
        self.go = threading.Event()
        self.made: list[Constraint] = []
        self.workers: list[Fake] = []
        self.queue: CompileQueue[Constraint] = CompileQueue(self._worker, self._make, threads, waiting)

    def _worker(self) -> CompileWorker:
        self.workers.append(Fake())
        return self.workers[-1]

    def _make(self, constraint: Constraint, worker: CompileWorker) -> Constraint:
        assert isinstance(worker, Fake)
        self.made.append(constraint)
        while not self.go.wait(0.005):
            if worker.abandoned.is_set():
                worker.abandoned.clear()
                raise CompileCancelled
        return constraint

    def running(self, count: int) -> None:
        wait_for(lambda: len(self.made) == count)


class Fake(CompileWorker):
    def __init__(self) -> None:
        super().__init__(b"", CompileLimits(1.0, 1.0, 1))
        self.abandoned = threading.Event()
        self.closed = threading.Event()

    def cancel(self) -> None:
        self.abandoned.set()

    def close(self) -> None:
        self.closed.set()


def regexes(count: int) -> list[Constraint]:
    return [Regex(f"a{{{i}}}") for i in range(1, count + 1)]


def test_no_more_wait_than_may_and_the_same_grammar_waits_once() -> None:
    desk, each = Desk(), regexes(4)
    tickets = [desk.queue.submit(each[0])]
    desk.running(1)
    tickets += [desk.queue.submit(one) for one in each[1:3]]
    with pytest.raises(GrammarQueueFull, match="2 grammars wait to be compiled and 2 may"):
        desk.queue.submit(each[3])
    tickets += [desk.queue.submit(one) for one in each[:3]]
    desk.go.set()
    assert [ticket.future.result(HANG_S) for ticket in tickets] == [*each[:3], *each[:3]]
    assert desk.made == each[:3] and len(desk.workers) == 1
    desk.queue.close()


def test_owners_take_turns_whatever_each_of_them_has_queued() -> None:
    desk, each = Desk(waiting=10), regexes(9)
    tickets = [desk.queue.submit(each[0], "many")]
    desk.running(1)
    tickets += [desk.queue.submit(one, "many") for one in each[1:6]]
    tickets += [desk.queue.submit(one, "few") for one in each[6:8]]
    tickets += [desk.queue.submit(each[8], "one")]
    desk.go.set()
    assert [ticket.future.result(HANG_S) for ticket in tickets] == each
    assert desk.made == [each[i] for i in (0, 1, 6, 8, 2, 7, 3, 4, 5)]
    desk.queue.close()


def test_the_queue_of_one_owner_is_full_for_that_owner_alone() -> None:
    desk, each = Desk(waiting=2), regexes(30)
    desk.queue.submit(each[0], "a")
    desk.running(1)
    for one in each[1:3]:
        desk.queue.submit(one, "a")
    with pytest.raises(GrammarQueueFull, match="2 grammars wait to be compiled and 2 may"):
        desk.queue.submit(each[3], "a")
    tickets = [desk.queue.submit(one, f"other {i // 2}") for i, one in enumerate(each[4:18])]
    with pytest.raises(GrammarQueueFull):  # so many owners cannot fill the memory either
        desk.queue.submit(each[20], "last")
    tickets[0].leave()
    desk.queue.submit(each[20], "last")
    desk.queue.close()


def test_a_grammar_of_two_owners_is_compiled_at_the_first_turn_of_either() -> None:
    desk, each = Desk(waiting=3), regexes(5)
    first = desk.queue.submit(each[0], "a")
    desk.running(1)
    waits = [desk.queue.submit(one, "a") for one in each[1:4]]
    own, joined = desk.queue.submit(each[4], "b"), desk.queue.submit(each[3], "b")
    waits[2].leave()  # its first owner; the other one waits on
    again = desk.queue.submit(each[0], "b")  # one that runs
    desk.go.set()
    tickets = [first, *waits[:2], own, joined, again]
    assert [ticket.future.result(HANG_S) for ticket in tickets] == [*each[:3], each[4], each[3], each[0]]
    assert desk.made == [each[0], each[1], each[4], each[2], each[3]]
    desk.queue.close()


def test_a_worker_that_is_done_is_asked_before_another_one_starts() -> None:
    desk = Desk(threads=2)
    desk.go.set()
    for one in regexes(50):
        desk.queue.submit(one).future.result(HANG_S)
    assert len(desk.workers) == 1
    desk.queue.close()


def test_as_many_are_compiled_at_once_as_there_are_workers() -> None:
    desk = Desk(threads=2, waiting=10)
    each = regexes(5)
    tickets = [desk.queue.submit(one) for one in each]
    desk.running(2)
    assert len(desk.workers) == 2
    desk.go.set()
    assert [ticket.future.result(HANG_S) for ticket in tickets] == each
    desk.queue.close()


def test_a_grammar_ends_with_the_last_caller_who_waits_for_it() -> None:
    desk, (first, second, third) = Desk(), regexes(3)
    one, other = desk.queue.submit(first), desk.queue.submit(first)
    desk.running(1)
    queued, kept = desk.queue.submit(second), desk.queue.submit(third)
    one.leave()
    queued.leave()
    assert not desk.workers[0].abandoned.is_set() and not other.future.done()
    other.leave()
    with pytest.raises(CompileCancelled):
        other.future.result(HANG_S)
    desk.running(2)
    assert desk.made == [first, third]
    again = desk.queue.submit(first)  # as if it had never been asked for
    desk.go.set()
    assert (kept.future.result(HANG_S), again.future.result(HANG_S)) == (third, first)
    for ticket in (kept, again):
        ticket.leave()
    assert not desk.workers[0].abandoned.is_set()
    desk.queue.close()


def test_a_closed_queue_leaves_no_caller_waiting_and_no_process() -> None:
    desk = Desk()
    tickets: list[PendingGrammar[Constraint]] = [desk.queue.submit(one) for one in regexes(2)]
    desk.running(1)
    desk.queue.close()
    for ticket in tickets:
        with pytest.raises(ModelClosed):
            ticket.future.result(HANG_S)
        ticket.leave()
    assert desk.workers[0].closed.wait(HANG_S)
    with pytest.raises(ModelClosed):
        desk.queue.submit(Regex("b"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_has_threads_and_workers_of_its_own() -> None:
    desk = Desk()
    desk.go.set()
    assert desk.queue.submit(Regex("a")).future.result(HANG_S) == Regex("a")
    child = os.fork()
    if not child:
        os._exit(7 if desk.queue.submit(Regex("b")).future.result(HANG_S) == Regex("b") else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(desk.workers) == 1
    desk.queue.close()


# From an event loop.


class Spelled:
    """A tokenizer, as far as grammars ask."""

    vocab_size = len(BYTES)

    def token_bytes(self, token: int) -> bytes:
        return BYTES[token]


def test_a_cancelled_task_ends_its_compilation() -> None:
    logged: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        grammars = Grammars(Spelled(), [END])  # type: ignore[arg-type]
        assert await grammars.compiled(None) is None
        assert await grammars.compiled(Choice(["a"])) is grammars.compile(Choice(["a"]))
        queue = grammars.compiler._queue
        assert queue is not None
        (worker,) = queue._workers  # whoever asks again finds the first one idle
        first = worker.pid
        asking = asyncio.ensure_future(grammars.compiled(HOSTILE["intersection"]))
        while not worker._trying:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await grammars.compiled(Choice(["b"])) is not None
        assert worker.pid != first and first is not None and not is_running(first)
        grammars.close()
        with pytest.raises(ModelClosed):
            await grammars.compiled(Choice(["c"]))
        gc.collect()

    asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert logged == []  # no caller is left to read the error of the cancelled compilation


def test_tables_can_be_made_ahead_of_the_first_grammar() -> None:
    grammars = Grammars(Spelled(), [END])  # type: ignore[arg-type]
    grammars.warm_up()
    made = grammars._compiler
    assert made is not None
    assert grammars.compiler is made
    grammars.close()
    none = Grammars(Spelled(), [])  # type: ignore[arg-type]
    none.warm_up()  # where there can be no grammars, a server starts all the same
    with pytest.raises(Unsupported):
        _ = none.compiler
