"""Rank 0's side of a model that several processes share: it starts the others, and they follow what it does.

Every command goes to all workers in one order. A worker that is gone or late fails the whole group, once and for good.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from ...batch import Batch
from ...config import RunConfig
from ...errors import RankFailed
from ...models.adapters import FittedAdapter
from ...models.split import ModelShare, ModelSplit
from ...models.step_adapters import StepAdapters
from ...models.tap import DecoderBatch
from .channel import RankChannel
from .collectives import ProcessRanks
from .command import RankCommand
from .interrupts import interrupts_deferred
from .message import MessageReader, MessageWriter
from .step_message import brings_kv, with_own_heads, write_batch

_log = logging.getLogger(__name__)
_END_S = 5.0  # for a worker to end by itself
_WORKER = "kvilt.executor.parallel.worker"


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    channel: RankChannel


class RankGroup:
    """The workers of one model. Commands may come from any thread."""

    def __init__(self, splits: Sequence[ModelSplit], timeout_s: float) -> None:
        self._splits, self._timeout_s = splits, timeout_s
        self._ranks = ProcessRanks(0, len(splits), timeout_s)
        self.share = ModelShare(splits[0], self._ranks, splits)
        self._folder = Path(tempfile.mkdtemp(prefix="kvilt-ranks-"))
        self._lock = threading.RLock()  # held while a command is sent: all workers get commands in one order
        self._closing = False
        self.failure: RankFailed | None = None
        self._workers: list[_Worker] = []

    @property
    def size(self) -> int:
        return len(self._splits)

    @property
    def splits(self) -> Sequence[ModelSplit]:
        """What each rank has."""
        return self._splits

    def numerics(self, backend: str) -> str:
        """Names the bits of results: sums over ranks are other sums, so another number of ranks has other bits."""
        return f"{backend}/{self.size} ranks"

    @property
    def pids(self) -> list[int]:
        """The processes of the other ranks."""
        return [worker.process.pid for worker in self._workers]

    # Beginning and end.

    def start(self, checkpoint: Path, config: RunConfig, max_context: int, kv_dtype: str) -> None:
        """Start the workers; each begins to load its part."""
        for rank in range(1, self.size):
            own, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", _WORKER, str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            worker = _Worker(rank, process, RankChannel(own, f"rank {rank}"))
            self._workers.append(worker)
            threading.Thread(target=self._watch, args=(worker,), name=f"kvilt-rank-{rank}", daemon=True).start()
            message = MessageWriter(RankCommand.BUILD)
            message.numbers([rank, self.size, max_context])
            message.real(self._timeout_s)
            for text in (str(checkpoint), json.dumps(asdict(config)), kv_dtype):
                message.text(text)
            worker.channel.send(message)

    def connect(self) -> None:
        """Wait until all workers have their parts, and meet them; an error of a worker is raised here."""
        for worker in self._workers:
            answer = worker.channel.answer(None)
            if answer.kind != RankCommand.DONE:
                raise self.fail(RankFailed(f"rank {worker.rank} could not load its part of the model: {answer.text()}"))
        meeting = str(self._folder / "meeting")
        message = MessageWriter(RankCommand.CONNECT)
        message.text(meeting)
        self.send(lambda _: message.data())
        self._ranks.connect(meeting)

    def make_pages(self, pages: Sequence[int], states: int) -> None:
        """Pages of each layer group, and slots for recurrent states, as the pool of rank 0 has them."""
        message = MessageWriter(RankCommand.PAGES)
        message.numbers([states, *pages])
        self.send(lambda _: message.data())

    def close(self) -> None:
        """End all workers."""
        if self._closing:
            return
        self._closing = True
        with self._lock:
            for worker in self._workers:
                try:
                    if self.failure is None:
                        worker.channel.send(MessageWriter(RankCommand.END))
                except RankFailed:
                    pass
                worker.channel.close()
        for worker in self._workers:
            try:
                worker.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Failure.

    def fail(self, error: RankFailed) -> RankFailed:
        """Nothing runs from now on: ranks that do not take the same steps have nothing in common. The first error."""
        if self.failure is None and not self._closing:
            self.failure = error
            _log.critical("tensor parallelism has failed: %s", error)
            for worker in self._workers:
                worker.process.kill()
        return self.failure or error

    def check(self) -> None:
        """Raise if the group has failed."""
        if self.failure is not None:
            raise self.failure

    def _watch(self, worker: _Worker) -> None:
        """A thread for each worker: its end is noticed at once, also while nothing is computed."""
        code = worker.process.wait()
        if not self._closing:
            self.fail(RankFailed(f"rank {worker.rank} has ended with code {code}"))

    # Commands.

    def send(self, message_for: Callable[[int], bytes]) -> None:
        """A command to every worker."""
        with self._lock:
            self.check()
            try:
                for worker in self._workers:
                    worker.channel.send(message_for(worker.rank))
            except RankFailed as error:
                raise self.fail(error) from None

    def ask(self, message: MessageWriter, ranks: Sequence[int]) -> list[MessageReader]:
        """A command to some workers, and their answers."""
        data, asked = message.data(), [worker for worker in self._workers if worker.rank in ranks]
        with self._lock:
            self.check()
            try:
                for worker in asked:
                    worker.channel.send(data)
                return [worker.channel.answer(self._timeout_s) for worker in asked]
            except RankFailed as error:
                raise self.fail(error) from None

    @contextmanager
    def step(self, batch: Batch, adapters: StepAdapters | None) -> Iterator[DecoderBatch]:
        """For the length of a forward: the other ranks compute the same step. What rank 0 computes of it."""

        def message_for(rank: int) -> bytes:
            message = MessageWriter(RankCommand.STEP)
            write_batch(message, batch, adapters, self._splits[rank])
            return message.data()

        same = None if brings_kv(batch.step) else message_for(1)
        own = with_own_heads(batch, self._splits[0])
        with self._together(lambda rank: message_for(rank) if same is None else same):
            yield own

    @contextmanager
    def embed(self, ids: Tensor) -> Iterator[None]:
        """The other ranks look up the same tokens."""
        message = MessageWriter(RankCommand.EMBED)
        message.tensor(ids)
        with self._together(lambda _: message.data()):
            yield

    @contextmanager
    def _together(self, message_for: Callable[[int], bytes]) -> Iterator[None]:
        """Work of all ranks. Whatever stops it on rank 0 half way fails the group."""
        with interrupts_deferred():
            self.send(message_for)
            try:
                yield
            except RankFailed as error:
                raise self.fail(error) from None
            except BaseException as error:
                failed = self.fail(RankFailed(f"rank 0 failed in a step: {type(error).__name__}: {error}"))
                raise failed from error

    # Adapters.

    def put_adapter(self, slot: int, fitted: FittedAdapter) -> None:
        """Give every worker its part of an adapter, under the slot that it has here."""
        self.send(lambda rank: _adapter_message(slot, fitted, self._splits[rank]))

    def drop_adapter(self, slot: int) -> None:
        """Empty a slot."""
        message = MessageWriter(RankCommand.DROP_ADAPTER)
        message.number(slot)
        if self.failure is None:
            self.send(lambda _: message.data())


def _adapter_message(slot: int, fitted: FittedAdapter, split: ModelSplit) -> bytes:
    message = MessageWriter(RankCommand.PUT_ADAPTER)
    message.numbers([slot, len(fitted.whole)])
    for name, whole in fitted.whole.items():
        cut = split.cut(name)
        product = whole if cut is None else cut.product(whole)
        message.text(name)
        message.real(product.scale)
        message.tensor(product.down)
        message.tensor(product.up)
    embedded = fitted.embedded
    message.tensor(None if embedded is None else embedded.numbers)
    if embedded is not None:
        message.tensor(embedded.up)
        message.real(embedded.scale)
    return message.data()
