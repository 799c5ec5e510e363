"""The loop detector against a brute-force oracle, on streams that must fire and on texts that must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import ParamError
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.repetition import MAX_PATTERN_SIZE, MAX_WINDOW, RepetitionDetection, RepetitionDetector
from kvilt.text.tokenizer import Tokenizer, from_gguf

DEFAULT = RepetitionDetection()


def fired(detection: RepetitionDetection, tokens: Sequence[int]) -> list[bool]:
    detector = RepetitionDetector(detection)
    return [detector.add(token) for token in tokens]


def loops(detection: RepetitionDetection, tokens: Sequence[int]) -> bool:
    """The definition, word by word: some pattern fills as many of the last tokens as it must."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        fills = max(detection.min_tokens, min(detection.min_count * size, detection.enough_tokens))
        last = tokens[-fills:]
        if len(last) == fills and all(last[i] == last[i - size] for i in range(size, fills)):
            return True
    return False


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetection:
    largest = draw(st.integers(1, 6))
    return RepetitionDetection(
        max_pattern_size=largest,
        min_pattern_size=draw(st.integers(1, largest)),
        min_count=draw(st.integers(2, 5)),
        min_tokens=draw(st.integers(2, 14)),
        enough_tokens=draw(st.integers(2 * largest, 24)),
    )


# Runs of repeated patterns with breaks in between: random tokens alone would hardly ever repeat.
runs = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 30)).map(
    lambda run: list(islice(cycle(run[0]), run[1]))
)
streams = st.lists(runs, max_size=6).map(lambda parts: list(chain.from_iterable(parts)))


@settings(max_examples=examples(200))
@given(detection=detections(), tokens=streams)
def test_it_fires_exactly_where_the_definition_does(detection: RepetitionDetection, tokens: list[int]) -> None:
    expected = [loops(detection, tokens[: end + 1]) for end in range(len(tokens))]
    assert fired(detection, tokens) == expected


@settings(max_examples=examples(60))
@given(
    start=st.lists(st.integers(0, 99), max_size=600),
    pattern=st.lists(st.integers(0, 4), min_size=1, max_size=DEFAULT.max_pattern_size),
)
def test_every_stream_that_turns_periodic_fires_within_the_bound(start: list[int], pattern: list[int]) -> None:
    bound = DEFAULT.needed(len(pattern))
    told = fired(DEFAULT, [*start, *islice(cycle(pattern), bound)])
    assert told[-1]
    assert bound <= DEFAULT.enough_tokens


def thue_morse() -> Iterator[int]:
    """Two tokens, and no pattern ever comes three times in a row."""
    number = 0
    while True:
        yield number.bit_count() % 2
        number += 1


@pytest.mark.parametrize("detection", [DEFAULT, RepetitionDetection(32, 1, 3, 6, 96)])
def test_streams_without_a_period_never_fire(detection: RepetitionDetection) -> None:
    assert not any(fired(detection, range(2_000)))
    assert not any(fired(detection, list(islice(thue_morse(), 2_000))))


@settings(max_examples=examples(30))
@given(pattern=st.lists(st.integers(0, 4), min_size=1, max_size=40), gap=st.integers(1, 4))
def test_a_break_begins_the_count_again(pattern: list[int], gap: int) -> None:
    almost = list(islice(cycle(pattern), DEFAULT.needed(1) - 1))
    assert not any(fired(DEFAULT, [token for i in range(8) for token in (*almost, *[100 + i] * gap)]))


def test_work_and_memory_are_bounded() -> None:
    """One look at the window in about as many tokens as a loop needs, also where loops nearly happen."""
    near_loops = [i % 7 if i % 160 else 1000 + i for i in range(20_000)]
    for tokens in (range(20_000), list(islice(thue_morse(), 20_000)), near_loops):
        detector = RepetitionDetector(DEFAULT)
        for token in tokens:
            assert not detector.add(token)
        assert detector.looks <= 20_000 / 30
        assert len(detector._tail) == DEFAULT.window == 512


# What people ask for.


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return from_gguf(smollm2_path)


ZEROS = "[\n" + "    [0, 0, 0, 0, 0, 0, 0, 0],\n" * 8 + "]\n"
LEGITIMATE = {
    "numbers": ", ".join(str(i) for i in range(1, 400)),
    "a numbered list": "\n".join(f"{i}. Item {i}" for i in range(1, 120)),
    "a sentence 20 times": "I will not talk in class.\n" * 20,
    "a longer one 20 times": "All work and no play makes Jack a dull boy, and that is all there is to say.\n" * 20,
    "a word 50 times": "buffalo " * 50,
    "a table": "| name | age | city |\n|---|---|---|\n" + "".join(f"| Ada {i} | {i} | Rome |\n" for i in range(60)),
    "a table of equal rows": "| yes | no | yes |\n" * 20,
    "a wide table's rule": "|" + "---|" * 30,
    "code": "".join(f"            if x == {i}:\n                return {i * i}\n" for i in range(60)),
    "zeros": ZEROS,
    "dots": "Chapter 1 " + "." * 60 + " 3\nChapter 2 " + "." * 60 + " 9\n",
    "blank lines": "one\n\n\n\n\n\n\n\n\n\n\n\ntwo\n" * 5,
}
LOOPS = ["la femme au martyre, ", "il Coriobella, ", "\n", "the ", "a, b, c, d, ", "It is a city. It is a big city. "]


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE)
def test_it_lets_stand_what_people_ask_for(tokenizer: Tokenizer, text: str) -> None:
    assert not any(fired(DEFAULT, tokenizer.encode(text, add_special=False)))


@pytest.mark.parametrize("text", LOOPS)
def test_it_ends_what_small_models_fall_into(tokenizer: Tokenizer, text: str) -> None:
    told = fired(DEFAULT, tokenizer.encode("The capital of France is " + text * (1600 // len(text)), add_special=False))
    assert told.index(True) < 400


# The field.


def test_the_field_takes_a_flag_or_bounds() -> None:
    assert SamplingParams().repetition_detection is None
    assert SamplingParams(repetition_detection=False).repetition_detection is None
    assert SamplingParams(repetition_detection=True).repetition_detection == DEFAULT
    own = RepetitionDetection(max_pattern_size=3, min_count=4, min_tokens=8, enough_tokens=12)
    assert SamplingParams(repetition_detection=own).repetition_detection == own


@pytest.mark.parametrize("value", [1, "yes", {"max_pattern_size": 4}, [True]])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ParamError, match="repetition_detection"):
        SamplingParams(repetition_detection=value)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_pattern_size": 0},
        {"max_pattern_size": MAX_PATTERN_SIZE + 1},
        {"max_pattern_size": True},
        {"min_pattern_size": 0},
        {"min_pattern_size": 129},
        {"min_count": 1},
        {"min_count": 2.0},
        {"min_tokens": 1},
        {"min_tokens": MAX_WINDOW + 1},
        {"enough_tokens": 255},
        {"enough_tokens": MAX_WINDOW + 1},
    ],
)
def test_bounds_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ParamError, match=next(iter(bad))):
        RepetitionDetection(**bad)
