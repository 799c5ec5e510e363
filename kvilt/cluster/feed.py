"""Follows the KV events of one replica: a snapshot first, then batch after batch; asks again for what was missed."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

import zmq
import zmq.asyncio

from ..errors import InputError
from ..server.kv_events.messages import KVEventBatch, decode_batch
from ..server.kv_events.publisher import END, number_bytes
from .router import Router

_log = logging.getLogger(__name__)
_REPLY_S = 5.0
_AGAIN_S = 0.5


class BatchOrder:
    """Which batch comes next."""

    def __init__(self) -> None:
        self.next: int | None = None  # None: a snapshot is needed

    def place(self, number: int) -> Literal["next", "old", "gap"]:
        """What a batch with this number is. A number far below the next one is that of a publisher that began again."""
        if self.next is None or number > self.next:
            return "gap"
        if number == self.next:
            return "next"
        if number == 0:  # of a new publisher: it has nothing of what the old one had
            self.next = None
            return "gap"
        return "old"


class EventFeed:
    """Brings the KV events of one replica to a router, until it is cancelled."""

    def __init__(self, router: Router, replica: str, endpoint: str, replay: str) -> None:
        self._router, self._replica = router, replica
        self._endpoint, self._replay_endpoint = endpoint, replay
        self._order = BatchOrder()
        self.gaps = self.snapshots = 0

    async def run(self) -> None:
        """Follow; errors of the network or of messages begin with a new snapshot."""
        with zmq.asyncio.Context() as context:
            while True:
                try:
                    await self._follow(context)
                except (InputError, TimeoutError, zmq.ZMQError) as error:
                    _log.warning("the KV events of replica %s are read again: %s", self._replica, error)
                    self._order.next = None
                    await asyncio.sleep(_AGAIN_S)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        with context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.LINGER, 0)
            events.setsockopt(zmq.RCVHWM, 100_000)
            events.connect(self._endpoint)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            await self._snapshot(context)
            while True:
                frames = await events.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._take(context, int.from_bytes(frames[1], "big", signed=True), frames[2])

    async def _take(self, context: zmq.asyncio.Context, number: int, data: bytes) -> None:
        place = self._order.place(number)
        if place == "next":
            self._apply(number, decode_batch(data))
        elif place == "gap":
            self.gaps += 1
            await self._catch_up(context)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Replay what was missed, or all where that is not kept any more."""
        if self._order.next is not None:
            found = await self._asked(context, self._order.next)
            if found and found[0][0] == self._order.next:
                for number, data in found:
                    self._apply(number, decode_batch(data))
                return
        await self._snapshot(context)

    async def _snapshot(self, context: zmq.asyncio.Context) -> None:
        self.snapshots += 1
        found = await self._asked(context, END)
        self._router.clear(self._replica)
        for _, data in found:
            self._router.apply(self._replica, decode_batch(data).events)
            await asyncio.sleep(0)  # requests go on meanwhile
        self._order.next = found[-1][0] + 1 if found else 0

    def _apply(self, number: int, batch: KVEventBatch) -> None:
        self._router.apply(self._replica, batch.events)
        self._order.next = number + 1

    async def _asked(self, context: zmq.asyncio.Context, first: int) -> list[tuple[int, bytes]]:
        """All batches of a replay."""
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", number_bytes(first)])
            found: list[tuple[int, bytes]] = []
            async with asyncio.timeout(_REPLY_S):
                while True:
                    frames = await socket.recv_multipart()
                    number = int.from_bytes(frames[1], "big", signed=True) if len(frames) == 3 else END
                    if number == END:
                        return found
                    found.append((number, frames[2]))
