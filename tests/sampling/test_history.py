"""A history's tally equals counting from scratch, after any appends and forks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvilt.errors import InputError
from kvilt.sampling.history import History

tokens = st.lists(st.integers(0, 200), max_size=300)


def counted(history: History, vocab_size: int = 1_000) -> dict[int, float]:
    ids, counts = history.tally(vocab_size)
    assert ids.dtype == torch.int64 and counts.dtype == torch.float32
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def expected(prompt: list[int], generated: list[int]) -> dict[int, float]:
    return {**dict.fromkeys(prompt, 0.0), **Counter(generated)}


@given(tokens, tokens, st.booleans())
def test_the_tally_counts_generated_tokens_and_knows_the_prompt(
    prompt: list[int], generated: list[int], early: bool
) -> None:
    history = History(prompt)
    if early:
        assert counted(history) == expected(prompt, [])
    for token in generated:
        history.append(token)
    assert counted(history) == expected(prompt, generated)
    assert history.ids == prompt + generated
    assert history.generated == generated and len(history) == len(prompt) + len(generated)


few = st.lists(st.integers(0, 3), max_size=40)


def next_in_repeated_runs(ids: list[int], size: int) -> set[int]:
    """By definition: every id which makes the last `size` ids a run that was there before."""
    runs = {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}
    return {token for token in range(4) if tuple([*ids, token][-size:]) in runs}


@given(few, few, st.integers(1, 6))
def test_repeats_are_the_ids_that_make_a_run_appear_again(prompt: list[int], generated: list[int], size: int) -> None:
    history = History(prompt)
    assert set(history.repeats(size).tolist()) == next_in_repeated_runs(prompt, size)
    for token in generated:
        history.append(token)
        assert set(history.repeats(size).tolist()) == next_in_repeated_runs(history.ids, size)
    assert history.generated_tokens == len(generated)


def test_repeats_of_a_fork_are_its_own() -> None:
    history = History([1, 2, 1])
    assert history.repeats(2).tolist() == [2]
    fork = history.fork()
    fork.append(3)
    fork.append(1)
    history.append(2)
    assert sorted(fork.repeats(2).tolist()) == [2, 3]
    assert history.repeats(2).tolist() == [1]


@given(tokens, tokens, tokens, st.booleans())
def test_forks_go_their_own_ways(prompt: list[int], left: list[int], right: list[int], tallied: bool) -> None:
    history = History(prompt)
    if tallied:
        history.tally(1_000)
    fork = history.fork()
    for token in left:
        history.append(token)
    for token in right:
        fork.append(token)
    assert counted(history) == expected(prompt, left)
    assert counted(fork) == expected(prompt, right)


def test_ids_past_the_logits_are_left_out() -> None:
    history = History([5, 9, 100])
    history.append(100)
    assert counted(history, vocab_size=10) == {5: 0.0, 9: 0.0}


@pytest.mark.parametrize("token", [-1, 2**31, 2**80])
def test_what_cannot_be_a_token_id_is_refused(token: int) -> None:
    with pytest.raises(InputError, match="is not a token id"):
        History([token])
    with pytest.raises(InputError, match="is not a token id"):
        History().append(token)


@given(tokens, st.lists(st.integers(0, 9), max_size=60), st.lists(st.integers(0, 14), max_size=20), st.data())
def test_a_rollback_equals_never_having_appended(
    prompt: list[int], kept: list[int], drafts: list[int], data: st.DataObject
) -> None:
    history, fresh = History(prompt), History(prompt)
    seen = data.draw(st.integers(0, len(kept) + len(drafts)), label="tallied and searched after")
    for index, token in enumerate([*kept, *drafts]):
        if index == seen:
            counted(history)
            history.repeats(2)
        history.append(token)
    for token in kept:
        fresh.append(token)
    for back in data.draw(st.permutations([len(drafts) // 2, len(drafts) - len(drafts) // 2]), label="in two goes"):
        history.rollback(back)
    for step in (None, 3, 14):
        if step is not None:
            history.append(step)
            fresh.append(step)
        assert (history.ids, history.generated) == (fresh.ids, fresh.generated)
        assert counted(history) == counted(fresh) == expected(prompt, fresh.generated)
        assert history.tally(1_000)[0].tolist() == fresh.tally(1_000)[0].tolist(), "also their order"
        assert history.repeats(2).tolist() == fresh.repeats(2).tolist()
    other = history.fork()
    other.rollback(1)
    assert counted(other) == expected(prompt, fresh.generated[:-1])
    assert counted(history) == expected(prompt, fresh.generated)


@pytest.mark.parametrize("count", [-1, 3])
def test_only_what_was_generated_can_be_taken_back(count: int) -> None:
    history = History([1, 2, 3])
    history.append(4)
    history.append(5)
    with pytest.raises(InputError, match="2 were generated"):
        history.rollback(count)
    assert history.ids == [1, 2, 3, 4, 5]
