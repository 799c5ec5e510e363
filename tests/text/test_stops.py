"""Stop strings: against a plain search over the whole text, and against strings meant to be slow."""

from __future__ import annotations

import tracemalloc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvilt.errors import ParamError
from kvilt.text.stops import Emitted, StopCache, StopChecker, StopStrings


def run(stops: list[str], deltas: list[str], include: bool = False) -> tuple[str, str | None]:
    """What a reader sees, and the stop that ended it."""
    checker = StopChecker(StopStrings(stops), include)
    shown = ""
    for delta in deltas:
        emitted = checker.add(delta)
        shown += emitted.text
        if emitted.stopped:
            return shown, emitted.stop
    return shown + checker.finish(), None


def searched(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The same, looked up in the finished text: the match that ends first, the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_any_stream_equals_a_search_of_the_whole(stops: list[str], deltas: list[str], include: bool) -> None:
    assert run(stops, deltas, include) == searched(stops, "".join(deltas), include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    deltas=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_no_more_is_held_back_than_could_become_a_stop(stops: list[str], deltas: list[str]) -> None:
    checker = StopChecker(StopStrings(stops))
    given_text = shown = ""
    for delta in deltas:
        given_text += delta
        emitted = checker.add(delta)
        shown += emitted.text
        if emitted.stopped:
            return
        held = given_text[len(shown) :]
        ends = [
            n for n in range(len(given_text) + 1) if any(s.startswith(given_text[len(given_text) - n :]) for s in stops)
        ]
        assert len(held) == max(ends)


def test_a_stop_over_several_deltas_is_cut_out() -> None:
    checker = StopChecker(StopStrings(["</end>"]))
    assert checker.add("text</e") == Emitted("text")
    assert checker.add("nd>more") == Emitted("", "</end>")
    assert checker.add("after") == Emitted("", "</end>")
    assert checker.finish() == ""


def test_include_keeps_the_stop() -> None:
    assert run(["\n\n"], ["a\n", "\nb"], include=True) == ("a\n\n", "\n\n")


def test_what_was_held_back_comes_at_the_end() -> None:
    assert run(["</end>"], ["text</en"]) == ("text</en", None)


def test_without_stops_nothing_is_held_back() -> None:
    assert StopChecker(StopStrings([])).add("anything") == Emitted("anything")


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3], "abc"])
def test_stops_that_cannot_be_are_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(ParamError, match="stop: ") as caught:
        StopStrings(stops)
    assert caught.value.field == "stop"


class CountedStops(StopStrings):
    """Stop strings that count the edges they look for."""

    looked = 0

    def _child(self, state: int, char: str) -> int:
        self.looked += 1
        return super()._child(state, char)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * 20_000 + "b"], "a" * 40_000),
        (["a" * n + "b" for n in range(1, 200)], "a" * 20_000),
        ([f"stop number {n}" for n in range(2_000)], "stop number " * 2_000),
    ],
)
def test_hostile_stops_take_linear_work(stops: list[str], text: str) -> None:
    compiled = CountedStops(stops)
    checker = StopChecker(compiled)
    shown = "".join(checker.add(char).text for char in text)
    assert shown + checker.finish() == text
    assert compiled.looked <= 4 * (len(text) + sum(map(len, stops)))


def largest_stops() -> list[str]:
    """64 stop strings of 1 KB that share no beginning: the most memory for their size."""
    return [chr(0x100 + i) + chr(0x200 + i) * 1023 for i in range(64)]


def test_compiled_stops_take_a_small_multiple_of_their_size() -> None:
    stops = largest_stops()
    tracemalloc.start()
    try:
        compiled = StopStrings(stops)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert compiled.next(0, stops[-1][0])
    assert held < 24 * sum(map(len, stops))


def test_a_sample_holds_only_its_own_state() -> None:
    compiled = StopStrings(largest_stops())
    tracemalloc.start()
    try:
        checkers = [StopChecker(compiled) for _ in range(512)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(checkers) < 2048


def test_stops_in_use_are_compiled_once_and_then_forgotten() -> None:
    cache = StopCache()
    first = cache.of(["a", "b"])
    assert cache.of(("a", "b")) is first
    assert cache.of(["b", "a"]) is not first
    assert cache.of([]) is None
    gone = weakref.ref(first)  # type: ignore[arg-type]
    del first
    assert gone() is None
