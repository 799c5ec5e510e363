"""Fair queueing over API keys at the door, in counted work and not in seconds."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvilt.cluster.fair_queue import FairQueue, QueuedRequest
from kvilt.errors import QueueFull


class Replicas:
    """Replicas that give each request that is there an equal part of `room`, and one place of it at the most."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.now = 0.0
        self.left: dict[int, float] = {}  # work of requests that run
        self.requests: dict[int, QueuedRequest] = {}
        self.asked_at: list[float] = []
        self.took: dict[int, float] = {}

    def ask(self, key: str, work: float) -> int:
        number = len(self.asked_at)
        self.asked_at.append(self.now)
        self.requests[number] = self.queue.enter(key, work, lambda: self.left.update({number: work}))
        return number

    def step(self) -> None:
        """Until the next request ends."""
        speed = min(1.0, self.queue.room / len(self.left))
        number = min(self.left, key=lambda one: self.left[one])
        work = self.left.pop(number)
        self.left = {other: left - work for other, left in self.left.items()}
        self.now += work / speed
        self.took[number] = self.now - self.asked_at[number]
        self.queue.leave(self.requests.pop(number))

    def until(self, number: int) -> float:
        while number not in self.took:
            self.step()
        return self.took[number]


@pytest.mark.parametrize("room", [1, 4, 16])
def test_a_flood_of_one_key_does_not_double_the_latency_of_another(room: int) -> None:
    flood = 40 * room
    alone = Replicas(FairQueue(room=room, most_waiting=1000))
    base = [alone.until(alone.ask("b", 1.0)) for _ in range(10)]
    busy = Replicas(FairQueue(room=room, most_waiting=1000))
    for _ in range(flood):
        busy.ask("a", 1.0)
    there = [busy.until(busy.ask("b", 1.0)) for _ in range(10)]
    assert max(there) <= 2 * max(base) + 1e-9
    assert sum(there) > sum(base)  # the flood is there
    assert busy.queue.waiting > flood / 2


def _order(queue: FairQueue, asked: list[tuple[str, float]], count: int) -> Counter[str]:
    """Which keys the first requests to begin were of, where requests end in the order in which they began."""
    begun: list[int] = []
    requests = [queue.enter(key, work, partial(begun.append, at)) for at, (key, work) in enumerate(asked)]
    for at in range(count):
        queue.leave(requests[begun[at]])
    return Counter(asked[at][0] for at in begun[:count])


def test_keys_get_places_by_their_weights() -> None:
    done = _order(FairQueue({"a": 3.0}, 8, 1000), [("a", 1.0)] * 300 + [("b", 1.0)] * 300, 200)
    assert done["a"] / done["b"] == pytest.approx(3.0, rel=0.15)


def test_where_there_are_more_keys_than_places_large_requests_count_for_their_size() -> None:
    keys = [("big", 10.0), *((f"small {n}", 1.0) for n in range(7))]
    done = _order(FairQueue(None, 1, 1000), keys * 100, 200)
    small = [count for key, count in done.items() if key != "big"]
    assert min(small) >= 5 * done["big"]


def test_too_many_of_one_key_are_refused_and_others_are_not() -> None:
    queue = FairQueue(room=1, most_waiting=3)
    held = [queue.enter("a", 1.0, lambda: None) for _ in range(4)]
    with pytest.raises(QueueFull):
        queue.enter("a", 1.0, lambda: None)
    queue.enter("b", 1.0, lambda: None)
    queue.leave(held[-1])  # its client left while it waited
    queue.leave(held[-1])
    queue.enter("a", 1.0, lambda: None)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 9), st.booleans()), max_size=60), st.integers(1, 5))
def test_every_request_gets_its_turn_and_room_is_used(moves: list[Any], room: int) -> None:
    queue = FairQueue({"c": 2.0}, room)
    there: list[QueuedRequest] = []
    started: list[QueuedRequest] = []
    for key, work, ends in moves:
        there.append(queue.enter(key, work, lambda: None))
        if ends:
            queue.leave(there.pop(len(there) // 2))
        assert queue.running <= 2 * room
        assert queue.running >= min(room, len(there))
        assert queue.running + queue.waiting == len(there)
    while there:
        running = [one for one in there if one.running]
        assert running
        queue.leave(running[0])
        there.remove(running[0])
        started += running[:1]
    assert (queue.running, queue.waiting) == (0, 0)
