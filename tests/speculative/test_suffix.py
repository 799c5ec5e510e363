"""The suffix index against all substrings of small texts."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvilt.speculative.suffix import SuffixIndex


def longest(text: list[int]) -> int:
    """How many of the last tokens also end somewhere earlier, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


@given(st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 200), max_size=40))
def test_the_match_is_the_longest_and_really_there(text: list[int]) -> None:
    index = SuffixIndex()
    for count, token in enumerate(text, start=1):
        index.append(token)
        match, seen = index.match, text[:count]
        assert match.length == longest(seen)
        if match.length:
            assert match.end < count - 1
            assert seen[match.end + 1 - match.length : match.end + 1] == seen[-match.length :]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=30), st.integers(1, 50))
def test_a_continuation_goes_on_as_the_text_did_and_then_as_it_does_itself(text: list[int], count: int) -> None:
    index = SuffixIndex(text)
    if not index.match.length:
        return
    whole, at = list(text), index.match.end + 1
    for token in index.continuation(count):
        assert token == whole[at]
        whole.append(token)
        at += 1
    assert len(whole) == len(text) + count


def test_it_finds_the_latest_place_where_the_same_end_was_met() -> None:
    text = [5, 6, 1, 9, 5, 6, 2, 8, 5, 6]
    assert SuffixIndex(text).match.end == 5
    assert SuffixIndex(text).continuation(2) == [2, 8]


def test_memory_is_linear() -> None:
    dice = random.Random(0)
    for text in (
        [dice.randrange(50_000) for _ in range(3000)],
        [0, 1] * 1500,
        [dice.randrange(2) for _ in range(3000)],
    ):
        index = SuffixIndex(text)
        states, ways = len(index._lengths), sum(map(len, index._more.values()))
        assert states <= 2 * len(text)
        assert ways <= 3 * len(text)
