"""Finding documents in prompts: what is found is what a search of everything finds, and it takes no longer for more."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.blend.document_finder import DocumentFinder
from kvilt.blend.known_documents import LOOKS, MOST_ALIKE, WINDOW_TOKENS, DocumentScope, KnownDocuments
from kvilt.blend.recipe import Span
from kvilt.kv.owner import part_of
from kvilt.kv.row import Token

HERE = DocumentScope("", "base")


def known(chunks: Sequence[Sequence[int]], scope: DocumentScope = HERE) -> KnownDocuments:
    made = KnownDocuments()
    for chunk in chunks:
        made.add(scope, chunk)
    return made


def by_force(chunks: Sequence[Sequence[int]], ids: Sequence[int]) -> tuple[Span, ...]:
    """Every document at every place, the longest first, those further left before others."""
    places = sorted(
        (-len(chunk), at)
        for chunk in {tuple(chunk) for chunk in chunks}
        if len(chunk) >= WINDOW_TOKENS
        for at in range(len(ids) - len(chunk) + 1)
        if tuple(ids[at : at + len(chunk)]) == chunk
    )
    found: list[Span] = []
    for negative, at in places:
        span = Span(at, at - negative)
        if all(span.stop <= one.start or one.stop <= span.start for one in found):
            found.append(span)
    return tuple(sorted(found, key=lambda one: one.start))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Documents of few different tokens, many of which begin alike or stand inside each other, and a prompt of them."""
    dice = random.Random(draw(st.integers(0, 1 << 32)))
    letters = draw(st.integers(1, 3))
    stem = [dice.randrange(letters) for _ in range(WINDOW_TOKENS + 8)]
    chunks = []
    for _ in range(draw(st.integers(0, 8))):
        begin = stem[: dice.choice([0, WINDOW_TOKENS, WINDOW_TOKENS + 5])]
        chunks.append([*begin, *(dice.randrange(letters) for _ in range(dice.randrange(0, 45)))])
    if chunks and draw(st.booleans()):
        chunks.append(dice.choice(chunks)[3:])
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        piece = dice.choice([*chunks, stem, [dice.randrange(letters) for _ in range(dice.randrange(20))]])
        prompt += piece[: dice.choice([len(piece), len(piece), 20])]
    return chunks, prompt


@settings(max_examples=examples(400))
@given(prompts())
def test_what_is_found_is_what_a_search_of_everything_finds(case: tuple[list[list[int]], list[int]]) -> None:
    chunks, prompt = case
    assert known(chunks).find(HERE, prompt).spans == by_force(chunks, prompt)


@settings(max_examples=examples(100))
@given(prompts(), st.integers(0, 60))
def test_nothing_is_found_before_the_start(case: tuple[list[list[int]], list[int]], start: int) -> None:
    chunks, prompt = case
    found = known(chunks).find(HERE, prompt, start).spans
    assert found == tuple(Span(one.start + start, one.stop + start) for one in by_force(chunks, prompt[start:]))


@settings(max_examples=examples(50))
@given(prompts())
def test_tokens_are_compared_where_hashes_agree(case: tuple[list[list[int]], list[int]]) -> None:
    """With a base of 1 a hash is a sum, and all kinds of texts have the same one."""
    chunks, prompt = case
    made = KnownDocuments(base=1)
    for chunk in chunks:
        made.add(HERE, chunk)
    for span in made.find(HERE, prompt).spans:
        assert list(prompt[span.start : span.stop]) in chunks


def test_everybody_finds_their_own() -> None:
    chunk = list(range(50))
    made = known([chunk])
    assert made.find(HERE, chunk).spans == (Span(0, 50),)
    assert made.find(DocumentScope("other", "base"), chunk).spans == ()
    assert made.find(DocumentScope("", "adapter"), chunk).spans == ()


@pytest.mark.parametrize("chunks", [10, 100, 5000])
def test_many_documents_that_begin_alike_cost_no_more(chunks: int) -> None:
    """All have the same first window, which also fills the prompt: the worst there is."""
    dice = random.Random(chunks)
    head = [7] * WINDOW_TOKENS
    made = known([[*head, *(dice.randrange(5, 50_000) for _ in range(dice.randrange(1, 200)))] for _ in range(chunks)])
    for length in (1000, 4000):
        found = made.find(HERE, [7] * length)
        assert found.spans == ()
        assert found.looked <= LOOKS * length + 4096 + MOST_ALIKE
        assert found.compared == 0  # all of them differ behind the window, and hashes say so


def test_documents_of_one_length_cost_one_look_each_place() -> None:
    head, dice = [7] * WINDOW_TOKENS, random.Random(1)
    chunks = [[*head, *(dice.randrange(50_000) for _ in range(100))] for _ in range(3000)]
    made, prompt = known(chunks), [*head, 1, 2, 3, *chunks[1234], *([9] * 500), *chunks[77]]
    found = made.find(HERE, prompt)
    assert [prompt[one.start : one.stop] for one in found.spans] == [chunks[1234], chunks[77]]
    assert (found.looked, found.compared) == (3, 2 * 132)


def test_a_prompt_full_of_overlaps_is_compared_once() -> None:
    """One token over and over, and documents of every length: thousands of matches, of which few can be taken."""
    made = known([[5] * size for size in range(WINDOW_TOKENS, WINDOW_TOKENS + MOST_ALIKE)])
    prompt = [5] * 700
    found = made.find(HERE, prompt)
    assert sum(map(len, found.spans)) == 190  # it stops looking after a while
    assert found.compared == sum(map(len, found.spans))
    assert found.looked <= LOOKS * len(prompt) + 4096 + MOST_ALIKE


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    dice = random.Random(2)
    chunks = [[dice.randrange(50_000) for _ in range(100)] for _ in range(30)]
    made = KnownDocuments(most_tokens=1000)
    for at, chunk in enumerate(chunks):
        made.add(HERE, chunk)
        made.add(HERE, chunk)  # twice is once
        assert made.tokens <= 1000
        assert made.find(HERE, chunks[0]).spans == (Span(0, 100),), at  # it is of use, so it stays
    assert (len(made), made.tokens) == (10, 1000)
    assert [bool(made.find(HERE, chunk).spans) for chunk in chunks] == [True] + [False] * 20 + [True] * 9
    made.add(HERE, [1] * 2000)
    assert len(made) == 10


def test_salts_do_not_make_another_key_forget_its_documents() -> None:
    made, mine = KnownDocuments(most_tokens=1000), list(range(400))
    made.add(DocumentScope("a", "base"), mine)
    for n in range(40):
        made.add(DocumentScope(part_of("b", str(n)), "base"), range(1000 * n + 1000, 1000 * n + 1100))
    assert made.find(DocumentScope("a", "base"), mine).spans == (Span(0, 400),)
    assert made.find(DocumentScope(part_of("b", "39"), "base"), range(40000, 40100)).spans == (Span(0, 100),)
    assert (made.tokens, len(made)) == (1000, 7)


def test_few_of_those_that_begin_alike_are_kept() -> None:
    made = known([[3] * (WINDOW_TOKENS + at) for at in range(200)])
    assert len(made) == MOST_ALIKE
    assert made.find(HERE, [3] * 150).spans == ()  # shorter than the latest ones
    assert made.find(HERE, [3] * 231).spans == (Span(0, 231),)


def test_what_was_of_no_use_is_the_next_to_go() -> None:
    dice = random.Random(4)
    chunks = [[dice.randrange(50_000) for _ in range(100)] for _ in range(4)]
    made = KnownDocuments(most_tokens=300)
    for chunk in chunks[:3]:
        made.add(HERE, chunk)
    made.demote(HERE, chunks[2])
    made.demote(HERE, [1])  # never heard of
    made.add(HERE, chunks[3])
    assert [bool(made.find(HERE, chunk).spans) for chunk in chunks] == [True, True, False, True]


def test_nobody_is_asked_for_long() -> None:
    now, asked = 0.0, []

    def slow(_: DocumentScope, ids: Sequence[int]) -> bool:
        nonlocal now
        now += 0.4
        asked.append(len(ids))
        return True

    finder = DocumentFinder(lambda _: (), slow, lambda: now)
    chunks = [[at] * 40 for at in range(10)]
    for chunk in chunks:
        finder.known.add(HERE, chunk)
    found = finder.find(HERE, [token for chunk in chunks for token in chunk])
    assert found == (Span(0, 40), Span(40, 80), Span(80, 120))
    assert len(asked) == 3
    finder.close()


def test_a_scope_is_read_once_and_not_after_the_end() -> None:
    read: list[DocumentScope] = []
    chunk = list(range(50))

    def stored(scope: DocumentScope) -> list[Sequence[Token]]:
        read.append(scope)
        return [chunk, [b"x" * 32, *chunk], [1, 2]]

    finder = DocumentFinder(stored, lambda *_: True)
    for scope in (HERE, DocumentScope("a", "base"), HERE):
        finder.read(scope)
        finder.settle()
    assert read == [HERE, DocumentScope("a", "base")]
    assert len(finder.known) == 2  # what holds embeddings is no text
    assert finder.find(HERE, [0, *chunk]) == (Span(1, 51),)
    finder.close()
    finder.read(DocumentScope("b", "base"))
    finder.settle()
    assert len(read) == 2
