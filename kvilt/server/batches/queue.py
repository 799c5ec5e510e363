"""The batches of all keys: one of each key runs at a time, few in all, and they go on after a restart."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from ...errors import Draining, ModelClosed, QueueFull, WorkTimeout
from ...llm.offload import FILES, PARSE
from ..auth import Caller
from ..files.store import FileLimits, FileStore
from ..files.upload import MAX_TTL_S
from ..http.errors import HTTPError, http_error_of
from ..service import Service
from .index import BatchIndex, LineSpan
from .lines import BatchLine, error_line
from .output import BatchOutput
from .record import BatchRecord, Status, read_record
from .runner import BUSY_S, BatchRunner
from .schema import BatchRequest

_log = logging.getLogger(__name__)
AT_A_TIME = 4  # batches that run
WINDOW_S = 24 * 3600
_EXPIRED = "the request was not asked before the batch expired"


class BatchQueue:
    """Batches and the files that they read and write."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.time) -> None:
        config = service.config
        limits = FileLimits(config.max_file_bytes, config.max_files, config.max_files_bytes, MAX_TTL_S)
        self.files = FileStore(config.files_dir, limits, clock)
        self._service = service
        self._clock = clock
        self._records: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(AT_A_TIME)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by owner
        for path in sorted(self.files.folder.glob("batch_*.json")):
            try:
                found = read_record(path)
                self._records[found.id] = found
            except (OSError, ValueError, TypeError, KeyError):
                _log.warning("%s is no note of a batch, and is left out", path.name)
        unfinished = [one for one in self._records.values() if not one.ended]
        self.files.sweep(name for one in unfinished for name in (one.output, one.error))

    # The life of the server.

    def start(self) -> None:
        """Go on with what an earlier server has not ended."""
        for record in sorted(self._records.values(), key=lambda one: one.created_at):
            if not record.ended:
                self._begin(record)

    async def stop(self) -> None:
        """Stop all batches; the next server goes on with them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What routes ask for.

    def reads(self, name: str) -> bool:
        """Whether a batch needs this file."""
        return any(one.input_file_id == name and not one.ended for one in self._records.values())

    def find(self, name: str, owner: str) -> BatchRecord:
        """A batch of a key."""
        found = self._records.get(name)
        if found is None or found.owner != owner:
            raise HTTPError(404, "there is no such batch", code="batch_not_found")
        return found

    def batches(self, owner: str) -> list[BatchRecord]:
        """The batches of a key, the newest first."""
        mine = [one for one in reversed(self._records.values()) if one.owner == owner]
        return sorted(mine, key=lambda one: one.created_at, reverse=True)

    async def create(self, body: BatchRequest, owner: str) -> BatchRecord:
        """Begin a batch over a file of the key."""
        self.files.find(body.input_file_id, owner, param="input_file_id")
        self._make_room(owner)
        now_s = int(self._clock())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            metadata=body.metadata,
            output_ttl_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
            output=f"file-{secrets.token_hex(16)}",
            error=f"file-{secrets.token_hex(16)}",
            model=self._service.model,
        )
        self._records[record.id] = record
        await self._note(record)
        self._begin(record)
        return record

    async def cancel(self, name: str, owner: str) -> BatchRecord:
        """End a batch; what is answered stays."""
        record = self.find(name, owner)
        if record.ended or record.status in ("cancelling", "finalizing"):
            return record
        record.enter("cancelling", self._clock())
        await self._note(record)
        if (task := self._tasks.get(name)) is not None:
            task.cancel()
        else:
            self._begin(record)  # it waited for the next start of the server
        return record

    def _make_room(self, owner: str) -> None:
        mine = self.batches(owner)
        while len(mine) >= self._service.config.max_batches:
            ended = [one for one in mine if one.ended]
            if not ended:
                most = self._service.config.max_batches
                raise HTTPError(409, f"{most} batches run or wait and no more are allowed", code="batch_limit")
            mine.remove(ended[-1])
            del self._records[ended[-1].id]
            (self.files.folder / f"{ended[-1].id}.json").unlink(missing_ok=True)

    # One batch.

    def _begin(self, record: BatchRecord) -> None:
        task = asyncio.ensure_future(self._run(record))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    async def _run(self, record: BatchRecord) -> None:
        """Run a batch to its end, whatever that is. A server that stops leaves the batch as it is."""
        output: BatchOutput | None = None
        try:
            async with self._turns.setdefault(record.owner, asyncio.Lock()), self._room:
                output = await self._open(record)
                await self._answer(record, output)
        except asyncio.CancelledError:
            if record.status != "cancelling":
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            output = output or await self._open(record)
            await self._end(record, output, "cancelled")
        except Exception as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            if isinstance(cause, Draining | ModelClosed):
                _log.warning("%s waits for the next start of the server", record.id)
            else:
                await self._fail(record, output, http_error_of(cause))
        finally:
            if output is not None:
                output.close()

    async def _fail(self, record: BatchRecord, output: BatchOutput | None, error: HTTPError) -> None:
        record.problems.append({"code": error.code, "line": None, "message": error.message, "param": error.param})
        await self._end(record, output, "failed")

    async def _open(self, record: BatchRecord) -> BatchOutput:
        made: BatchOutput = await self._offload(BatchOutput, self.files, record, discard=BatchOutput.close)
        return made

    async def _answer(self, record: BatchRecord, output: BatchOutput) -> None:
        if record.status == "cancelling":  # of an earlier server
            await self._end(record, output, "cancelled")
            return
        index = await self._index(record)
        record.total, record.problems = len(index.spans), index.problems
        if index.problems:
            await self._end(record, output, "failed")
            return
        if not index.spans:
            raise HTTPError(400, "the file has no request", param="input_file_id", code="empty_file")
        record.enter("in_progress", self._clock())
        await self._note(record)
        left = index.in_order(output.done)
        runner, writing = BatchRunner(self._service, Caller(record.owner)), asyncio.Lock()

        async def write(answer: dict[str, Any]) -> None:
            async with writing:  # one thread is enough
                await self._offload(output.write, answer)

        try:
            async with asyncio.timeout(max(0.0, record.expires_at - self._clock())):
                await runner.run(self._lines(record, index, left), write)
        except TimeoutError:
            await self._offload(_expire, output, left)
            await self._end(record, output, "expired")
        else:
            record.enter("finalizing", self._clock())
            await self._end(record, output, "completed")

    async def _index(self, record: BatchRecord) -> BatchIndex:
        file = self.files.find(record.input_file_id, record.owner, param="input_file_id")
        config = self._service.config
        path = self.files.data_path(file.id)
        index = BatchIndex(path, record.endpoint, config.max_batch_lines, config.max_body_bytes)
        while await self._offload(index.read_slice):
            pass
        return index

    async def _lines(self, record: BatchRecord, index: BatchIndex, left: list[LineSpan]) -> AsyncIterator[BatchLine]:
        for span in left:
            yield await self._line(record, index, span)

    async def _line(self, record: BatchRecord, index: BatchIndex, span: LineSpan) -> BatchLine:
        """Read a line, when the server has time for it: a batch waits."""
        while True:
            with suppress(QueueFull, WorkTimeout):
                return await self._service.llm.offload.run(PARSE, index.line, span, owner=record.owner)
            await asyncio.sleep(BUSY_S)

    async def _end(self, record: BatchRecord, output: BatchOutput | None, status: Status) -> None:
        """Finish the files, then the batch: a client that sees the end finds the files."""
        if output is not None:
            await self._offload(output.finish)
        record.enter(status, self._clock())
        await self._note(record)

    async def _note(self, record: BatchRecord) -> None:
        with suppress(OSError):  # a full disk: the batch goes on, and is done again after a restart
            await self._offload(record.note, self.files.folder)

    async def _offload(
        self, work: Callable[..., Any], *given: Any, discard: Callable[[Any], None] | None = None
    ) -> Any:
        """Batches are one owner of this work: each of them has one piece of it at a time, so there is always room."""
        return await self._service.llm.offload.run(FILES, work, *given, owner="batches", discard=discard)


def _expire(output: BatchOutput, left: list[LineSpan]) -> None:
    """Say of each request that was not answered why."""
    for span in left:
        if span.custom_id not in output.done:
            output.write(error_line(span.custom_id, "batch_expired", _EXPIRED))
