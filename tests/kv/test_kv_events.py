"""KV events: replayed, they give exactly the prefixes that the index has, and what a reader missed it gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import pytest
import zmq
from desk import BASE, SIZE, Desk, Line
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvilt.errors import InputError, ParamError
from kvilt.kv.cache import KVCache
from kvilt.kv.prefix_keys import PrefixKeys, PrefixScope
from kvilt.server.kv_events.encoding import KVEventEncoder, block_hash
from kvilt.server.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    decode_batch,
    encode_batch,
)
from kvilt.server.kv_events.publisher import END, KVEventPublisher, number_bytes, replay_endpoint

Known = dict[int, tuple[int, ...]]  # by hash: the tokens of a whole prefix


def replayed(events: list[KVEvent], known: Known) -> None:
    """What a reader makes of events."""
    for event in events:
        match event:
            case BlockStored(hashes, parent, tokens, size):
                before = () if parent is None else known[parent]  # type: ignore[index]
                for at, one in enumerate(hashes):
                    known[one] = before = (*before, *tokens[at * size : (at + 1) * size])  # type: ignore[index]
            case BlockRemoved(hashes):
                for one in hashes:
                    del known[one]  # type: ignore[arg-type]
            case AllBlocksCleared():
                known.clear()


def indexed(desk: Desk) -> Known:
    """What the index has."""
    return {block_hash(node): tuple(_path(node)) for node in desk.index._nodes.values()}


def _path(node: Any) -> list[int]:
    nodes = [node]
    while nodes[-1].parent is not None:
        nodes.append(nodes[-1].parent)
    return [int(token) for one in reversed(nodes) for token in memoryview(one.content).cast("q")]


def through_wire(events: list[KVEvent]) -> list[KVEvent]:
    return list(decode_batch(encode_batch(KVEventBatch(1.5, tuple(events)))).events)


@pytest.fixture
def desk(scribe: Any) -> Desk:
    return Desk(scribe, scribe.full(page_tokens=SIZE), 8)


SCOPES = st.sampled_from([BASE, PrefixScope(salt="a"), PrefixScope(adapter="sha256:1 x 1.0", salt="a")])
MOVES = st.one_of(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), SCOPES),
    st.just("clear"),
    st.just("read"),
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MOVES, max_size=24), st.integers(0, 8), st.booleans())
def test_events_give_exactly_the_prefixes_of_the_index(
    scribe: Any, moves: list[Any], late: int, windowed: bool
) -> None:
    """Also to a reader that begins late, and where the pool evicts."""
    desk = Desk(scribe, scribe.windowed(page_tokens=SIZE) if windowed else scribe.full(page_tokens=SIZE), 5)
    watch = desk.index.watch()
    encoder = KVEventEncoder(SIZE, "CPU")
    known: Known = {}
    for at, move in enumerate(moves):
        if at == late:
            watch, encoder, known = desk.index.watch(), KVEventEncoder(SIZE, "CPU"), {}
        if move == "clear":
            desk.index.clear()
        elif move == "read":
            replayed(through_wire(encoder.events(watch.take(3))), known)
        else:
            desk.once(*move)
    replayed(through_wire(encoder.events(watch.take(1 << 20))), known)
    assert known == indexed(desk)
    again: Known = {99: (1, 2)}
    for events in encoder.snapshot(2):
        replayed(through_wire(events), again)
    assert again == known


def test_events_are_arrays_with_the_fields_of_vllm(desk: Desk) -> None:
    watch = desk.index.watch()
    scope = PrefixScope(adapter="sha256:1 x 1.0", salt="tenant")
    desk.once(range(8), scope)
    encoder = KVEventEncoder(SIZE, "GPU")
    data = encode_batch(KVEventBatch(2.0, tuple(encoder.events(watch.take(100)))))
    first, second = (block_hash(node) for node in desk.index._nodes.values())
    ts, ((tag, *fields),) = msgpack.unpackb(data)
    assert (ts, tag) == (2.0, "BlockStored")
    keys = [["tenant"], ["tenant"]]
    assert fields == [[first, second], None, [*range(8)], SIZE, 1, "GPU", "sha256:1 x 1.0", keys]
    desk.once([*range(8), 20, 21, 22, 23], scope)
    (event,) = encoder.events(watch.take(100))
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids) == (second, (20, 21, 22, 23))
    desk.index.clear()
    assert encoder.events(watch.take(100)) == [AllBlocksCleared()]


def test_embedding_rows_are_told_by_their_hashes(desk: Desk) -> None:
    line = Line(KVCache(desk.pool), PrefixKeys(BASE), [])
    desk.extend(line, [1, b"\x07" * 32, 2, 3])
    line.cache.close()
    (event,) = KVEventEncoder(SIZE, "CPU").events(desk.index.watch().take(9))
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.extra_keys) == ((1, 0, 2, 3), (("07" * 32,),))


def test_a_reader_that_is_too_slow_loses_its_watch_and_not_the_memory(desk: Desk) -> None:
    watch = desk.index.watch()
    watch._most = 2
    desk.once(range(16))
    assert watch.lost
    assert len(watch.take(100)) == 2
    assert len(desk.index.watch().take(100)) == 4


def test_events_as_maps_and_with_hashes_as_bytes_are_read_too() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [b"\x01" * 32], "medium": "GPU", "group_idx": 0}
    (read,) = decode_batch(msgpack.packb([0.0, [event], None])).events
    assert read == BlockRemoved((b"\x01" * 32,), "GPU")


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [1], None, [1, 2], 4],
        ["BlockStored", [1], None, ["a", 2], 2],
        ["BlockStored", ["x"], None, [1, 2], 2],
        ["BlockStored", [1], None, [1, 2], 2, None, "CPU", None, [None, None]],
        ["BlockStored", [1], None, [], 0],
        ["BlockRemoved", 5],
        ["Unknown"],
        [],
        7,
    ],
)
def test_what_is_no_event_is_refused(event: Any) -> None:
    with pytest.raises(InputError):
        decode_batch(msgpack.packb([0.0, [event]]))


@given(st.binary(max_size=64))
def test_bytes_that_are_no_batch_are_refused(data: bytes) -> None:
    with suppress(InputError):
        decode_batch(data)


# Over sockets.


@contextmanager
def published(desk: Desk, **options: Any) -> Iterator[tuple[KVEventPublisher, Any]]:
    """A publisher, and a reader of its events."""
    with (
        KVEventPublisher(desk.index, SIZE, "tcp://127.0.0.1:*", **options) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as events,
    ):
        events.setsockopt(zmq.RCVTIMEO, 60_000)
        events.setsockopt(zmq.LINGER, 0)
        events.connect(publisher.endpoint)
        events.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        yield publisher, events


def test_what_was_missed_is_replayed_and_a_late_reader_gets_a_snapshot(desk: Desk) -> None:
    with published(desk, kept=2) as (publisher, events), zmq.Context() as context:
        known: Known = {}
        desk.once(range(8))
        while publisher.published < 0:
            time.sleep(0.001)
        snapshot = _dealt(context, publisher, END)
        assert {number for number, _ in snapshot} == {publisher.published}
        for _, data in snapshot:
            replayed(list(decode_batch(data).events), known)
        assert known == indexed(desk)
        for n in range(1, 4):
            before = publisher.published
            desk.once(range(100 * n, 100 * n + 8))
            while publisher.published == before:
                time.sleep(0.001)
        assert [number for number, _ in _dealt(context, publisher, 0)] == [2, 3], "two are kept"
        numbers = []
        while not numbers or numbers[-1] < 3:
            topic, number, data = events.recv_multipart()
            numbers.append(int.from_bytes(number, "big"))
            assert topic == b"kv-events"
        assert numbers == [*range(numbers[0], 4)], "without a gap from the first that came"


def _dealt(context: Any, publisher: KVEventPublisher, first: int) -> list[tuple[int, bytes]]:
    """A replay as vLLM's readers ask for it."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(publisher.replay)
        socket.send_multipart([b"", number_bytes(first)])
        found = []
        while True:
            _, number, data = socket.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == END:
                return found
            found.append((int.from_bytes(number, "big"), data))


def test_addresses_are_checked() -> None:
    assert replay_endpoint("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5558"
    assert replay_endpoint("tcp://[::1]:*") == "tcp://[::1]:*"
    for wrong in ("127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:70000", "ipc:///tmp/x", ""):
        with pytest.raises(ParamError):
            replay_endpoint(wrong)


def test_an_address_that_is_taken_is_refused_by_name(desk: Desk) -> None:
    with published(desk) as (publisher, _), pytest.raises(ParamError, match="kv_events"):
        KVEventPublisher(desk.index, SIZE, publisher.endpoint)
