"""Publishes KV events over ZMQ as vLLM does: a PUB socket, and a ROUTER socket for what a reader missed.

A reader of the ROUTER socket sends the number of the first batch that it wants, as eight bytes, and gets all batches
from there on that are still kept. -1 asks for a snapshot instead: batches with the number of the last one published,
after which the reader goes on with the next. Both end with the number -1.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque

import zmq

from ...errors import ParamError
from ...kv.prefix import PrefixIndex
from ...kv.prefix_watch import PrefixChange
from .encoding import KVEventEncoder
from .messages import KVEvent, KVEventBatch, encode_batch

_log = logging.getLogger(__name__)
END = -1  # of a replay; as a request: a snapshot
KEPT_BATCHES = 10_000
BATCH_CHANGES = 4096
_POLL_MS = 10
_HIGH_WATER = 100_000
_ENDPOINT = re.compile(r"tcp://(?P<host>[A-Za-z0-9.*\-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5}|\*)")
_LOOPBACK = re.compile(r"127\.[0-9.]+|localhost|\[::1\]")


def number_bytes(number: int) -> bytes:
    """A batch's number as it travels."""
    return number.to_bytes(8, "big", signed=True)


def check_endpoint(endpoint: str) -> bool:
    """Whether only this machine reaches the endpoint; refuses what is none."""
    found = _ENDPOINT.fullmatch(endpoint)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ParamError("kv_events", f"{endpoint!r} is no address; write it like tcp://127.0.0.1:5557")
    return _LOOPBACK.fullmatch(found["host"]) is not None


def replay_endpoint(endpoint: str) -> str:
    """Where batches are replayed by default: at the port after the one of events, or at any."""
    check_endpoint(endpoint)
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{'*' if port in ('*', '0') else int(port) + 1}"


class KVEventPublisher:
    """Follows one prefix index in a thread of its own. `endpoint` and `replay` are the addresses, once it is open."""

    def __init__(
        self,
        index: PrefixIndex,
        page_tokens: int,
        endpoint: str,
        replay: str | None = None,
        topic: str = "kv-events",
        medium: str = "CPU",
        kept: int = KEPT_BATCHES,
    ) -> None:
        replay = replay_endpoint(endpoint) if replay is None else replay
        check_endpoint(replay)
        self._index, self._topic = index, topic.encode()
        self._encoder = KVEventEncoder(page_tokens, medium)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._events = self._bound(zmq.PUB, endpoint)
            self._replay = self._bound(zmq.ROUTER, replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ParamError("kv_events", f"cannot listen at {endpoint} and {replay}: {error}") from None
        self.endpoint, self.replay = (_address(one) for one in (self._events, self._replay))
        self._watch = index.watch()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvilt-kv-events", daemon=True)
        self._thread.start()

    @property
    def published(self) -> int:
        """The number of the last batch; -1: there was none."""
        return self._next - 1

    def close(self) -> None:
        """Stop to follow, and close the sockets."""
        self._ending.set()
        self._thread.join()
        self._watch.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 64 if kind == zmq.ROUTER else -1)  # requests are eight bytes
        socket.bind(endpoint)
        return socket

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                asked = self._replay.poll(_POLL_MS)
                self._publish()
                if asked:
                    self._answer(self._replay.recv_multipart())
            except zmq.ZMQError:  # a reader that went away in the middle
                _log.warning("a reader of KV events was not answered", exc_info=True)

    def _publish(self) -> None:
        """Publish all changes so far."""
        while True:
            if self._watch.lost:  # changes came faster than they went; tell all again
                _log.warning("KV events were too many to publish; readers get all blocks again")
                self._watch = self._index.watch()
                self._send(self._encoder.events([PrefixChange("cleared")]))
            changes = self._watch.take(BATCH_CHANGES)
            if not changes:
                return
            self._send(self._encoder.events(changes))

    def _send(self, events: list[KVEvent]) -> None:
        data = encode_batch(KVEventBatch(time.time(), tuple(events)))
        self._kept.append((self._next, data))
        self._events.send_multipart([self._topic, number_bytes(self._next), data])
        self._next += 1

    def _answer(self, frames: list[bytes]) -> None:
        """Replay to one reader; frames that are no request are left unanswered."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        reader, empty, asked = frames
        first = int.from_bytes(asked, "big", signed=True)
        found = self._snapshot() if first == END else [one for one in self._kept if one[0] >= first]
        for number, data in [*found, (END, b"")]:
            self._replay.send_multipart([reader, empty, number_bytes(number), data])

    def _snapshot(self) -> list[tuple[int, bytes]]:
        """All blocks after the last batch; none before the first. `_publish` came just before, so that they agree."""
        if self.published < 0:
            return []
        now = time.time()
        parts = self._encoder.snapshot(BATCH_CHANGES)
        return [(self.published, encode_batch(KVEventBatch(now, tuple(events)))) for events in parts]


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
