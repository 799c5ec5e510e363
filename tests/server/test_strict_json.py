"""The JSON reader: the same values as Python's parser, in work and memory that grow with the text and not faster."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.server.http import strict_json
from kvilt.server.http.strict_json import MAX_DEPTH, MAX_VALUES, InvalidJSON, TooManyValues, read_json

# What strings are made of: escapes of every length, halves of pairs that belong together, and plain characters.
PARTS = st.sampled_from(
    ['\\"', "\\\\", "\\n", "\\u00e9", "\\ud83d\\ude00", "\\/", "a", "é", "😀", "[{", "]}", ",:", "x" * 300]
)
ATTACKS = [
    '"' + '\\"' * 100 + "[" * 65,  # froze a server for 38 s at 60 KB
    '"\\',
    '"\\u',
    '"\\\\',
    "[",
    '{"a":',
    "[[],",
    '["",',
    "[0,",
    "-",
    "1",
    "1.1",
    "1e1",
    " ",
    '"a',
    '"\\ud83d',
    '"' + "x" * 257 + '",',
    '{"a":1},',
    "tru",
]


@given(st.lists(PARTS, max_size=40), st.integers(0, 40))
@settings(max_examples=examples(150))
def test_long_strings_are_read_in_pieces_as_if_at_once(parts: list[str], shift: int) -> None:
    """Whatever stands where a piece is cut."""
    text = '["' + "y" * (480 + shift) + "".join(parts) * 40 + '", 1]'
    assert read_json(text) == json.loads(text)


@pytest.mark.parametrize("escape", ["\\u00e9", "\\ud83d\\ude00", "\\\\", '\\"'])
def test_every_place_of_a_cut(escape: str) -> None:
    """The first piece ends in every place of an escape, and of a run of them."""
    for shift in range(14):
        text = '"' + "y" * (505 - shift) + escape * 300 + '"'
        assert read_json(text) == json.loads(text), shift


@pytest.mark.parametrize(
    "text", ["[1,]", "[,1]", "[1 2]", "[01]", "[1,2,03]", "[1,2", "[1,", '{"a":1,}', '"a" 1', "[1]]"]
)
def test_lists_of_numbers_are_checked_like_all_others(text: str) -> None:
    with pytest.raises(InvalidJSON):
        read_json(text)


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers(values: list[Any]) -> None:
    assert read_json(json.dumps(values, indent=1)) == values


def test_values_are_counted_and_what_stands_in_strings_is_not() -> None:
    read_json(json.dumps({"a": "[1,{:" * 1000}), max_values=2)
    for text in ("[1,1,1]", "[[],[],[]]", '["a","a","a"]', '{"a":1,"b":2,"c":3}', "[1.5,1.5,1]"):
        assert read_json(text, max_values=4) is not None
        with pytest.raises(TooManyValues):
            read_json(text, max_values=3)
    with pytest.raises(TooManyValues):
        read_json("[" + "0," * MAX_VALUES + "0]")
    with pytest.raises(TooManyValues):
        read_json("[" + ("[" * 60 + "]" * 60 + ",") * (MAX_VALUES // 60 + 1) + "0]")


class Counted:
    """A pattern that counts how often it is tried."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self.calls = 0

    def match(self, text: str, at: int) -> Any:
        self.calls += 1
        return self._pattern.match(text, at)


@given(st.lists(st.sampled_from(ATTACKS), min_size=1, max_size=3), st.integers(1, 3000))
@settings(max_examples=examples(100))
def test_each_character_is_looked_at_a_bounded_number_of_times(parts: list[str], times: int) -> None:
    """Counts the pieces that go into C, and the patterns that are tried; each consumes what it looks at."""
    text = "".join(parts) * times
    looked = 0
    honest = strict_json.scanstring

    def scanned(piece: str, at: int, strict: bool) -> tuple[str, int]:
        nonlocal looked
        looked += len(piece)
        return honest(piece, at, strict)

    with pytest.MonkeyPatch.context() as patch:
        tokens, runs = Counted(strict_json._TOKEN), Counted(strict_json._WHOLE_NUMBERS)
        patch.setattr(strict_json, "scanstring", scanned)
        patch.setattr(strict_json, "_TOKEN", tokens)
        patch.setattr(strict_json, "_WHOLE_NUMBERS", runs)
        with contextlib.suppress(InvalidJSON):
            read_json(text)
    assert looked <= 4 * len(text) + 1024
    assert tokens.calls + runs.calls <= 2 * len(text) + 4


def test_no_call_into_c_sees_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two pieces the event loop can run, and the work can be ended."""
    seen: list[int] = []
    honest = strict_json.scanstring

    def scanned(piece: str, at: int, strict: bool) -> tuple[str, int]:
        seen.append(len(piece))
        return honest(piece, at, strict)

    monkeypatch.setattr(strict_json, "scanstring", scanned)
    text = '"' + "\\n" * 500_000 + '"'
    assert read_json(text) == "\n" * 500_000
    assert max(seen) <= strict_json._LAST_PIECE + 1
    assert len(seen) < 30


@pytest.mark.parametrize("part", ATTACKS, ids=lambda part: part[:12])
def test_twice_the_text_takes_about_twice_the_time(part: str) -> None:
    """CPU time of this thread, so that other work on the machine does not count."""

    def took_s(size: int) -> float:
        text = part * (size // len(part))
        best = float("inf")
        for _ in range(5):
            began_s = time.thread_time()
            with contextlib.suppress(InvalidJSON):
                read_json(text)
            best = min(best, time.thread_time() - began_s)
        return best

    small_s, large_s = took_s(1 << 16), took_s(1 << 17)
    assert large_s <= 3 * small_s + 0.005


@pytest.mark.parametrize("part", ["a", "[", '\\"', "\\n", "é", "😀", "a b,c:[d] "])
def test_a_text_takes_a_small_multiple_of_its_memory(part: str) -> None:
    body = f'{{"prompt": "{part * ((1 << 20) // len(part.encode()))}"}}'.encode()
    tracemalloc.start()
    read_json(body.decode())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 13 * len(body)  # a character beyond the 16 bits takes four bytes here, in the text, pieces and value


@pytest.mark.parametrize("part", ["[],", "{},", '{"a":1},', '"",', "1.5,", "[[[[[]]]]],"])
def test_values_take_a_bounded_memory_each(part: str) -> None:
    values = 20_000
    text = "[" + part * values
    tracemalloc.start()
    with pytest.raises(InvalidJSON):
        read_json(text, max_values=values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 512 * values


def test_depth_is_counted_while_it_is_read() -> None:
    read_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(InvalidJSON, match="deeper"):
        read_json("[" * 8_000_000)
