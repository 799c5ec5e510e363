"""Samples that share a lexer: none refuses what its own mask allowed, whatever the others did to the lexer."""

from __future__ import annotations

import random

import pytest
from effort import examples
from grammars import BYTES, END, allowed, byte_compiler
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import GrammarFailed
from kvilt.sampling.constraint import Lark, Regex
from kvilt.sampling.grammar import Grammar, GrammarLimits
from kvilt.sampling.matcher import Matcher, masks

# Each remembers which of the last characters were of some kind: the states are doubled by each character of the gap.
PATTERNS = [
    "[a-z ]*[aeiou][a-z ]{18}[aeiou][a-z ]*",
    "[ab]*a[ab]{12}",
    "([abc]*a[abc]{9}|[abc]*b[abc]{7})+",
    "(x|y)*x(x|y){10}z?",
]
ROOMY = byte_compiler(limits=GrammarLimits(states=200_000))
COSTLY = {
    "mask_s": 10.0,
    "renew_s": 10.0,
    "replay_s": 10.0,
}  # what is tested here does not depend on the speed of the machine


def step(several: list[Matcher], dice: random.Random) -> None:
    """One step of an engine: all masks first, then each sample takes in a token that its mask allows."""
    mask = masks(several, len(BYTES))
    for row, one in enumerate(several):
        one.accept(dice.choice([i for i in mask[row].nonzero()[:, 0].tolist() if i != END] or [END]))


@settings(max_examples=examples(12))
@given(
    pattern=st.sampled_from(PATTERNS),
    rows=st.integers(2, 16),
    states=st.integers(150, 600),
    seed=st.integers(0, 2**32),
)
def test_no_sample_refuses_what_its_mask_allowed(pattern: str, rows: int, states: int, seed: int) -> None:
    grammar = byte_compiler(limits=GrammarLimits(states=states, **COSTLY)).compile(Regex(pattern))
    several, alone = ([each.matcher() for _ in range(rows)] for each in (grammar, ROOMY.compile(Regex(pattern))))
    dice = random.Random(seed)
    for _ in range(30):
        mask = masks(several, len(BYTES))
        assert mask.equal(masks(alone, len(BYTES)))
        for row, (one, other) in enumerate(zip(several, alone, strict=True)):
            token = dice.choice(mask[row].nonzero()[:, 0].tolist())
            one.accept(token)
            other.accept(token)


def broken_under(states: int = 300) -> tuple[Grammar, Matcher, list[int]]:
    """A matcher with a mask, and the mask, whose lexer other samples have broken since."""
    grammar = byte_compiler(limits=GrammarLimits(states=states, **COSTLY)).compile(Regex("[ab]*a[ab]{12}"))
    one, others, dice = grammar.matcher(), [grammar.matcher() for _ in range(4)], random.Random(3)
    for token in b"ab" * 7 + b"a":
        one.accept(token)
    known, lexer = allowed(one), grammar.lexer()
    while grammar.lexer() is lexer:
        step(others, dice)
    return grammar, one, known


@pytest.mark.parametrize("token", [ord("a"), END])
def test_a_lexer_that_others_broke_refuses_nothing(token: int) -> None:
    _, one, known = broken_under()
    assert token in known
    one.accept(token)
    assert allowed(one)


def test_a_lexer_that_others_broke_hides_no_whole_text() -> None:
    _, one, known = broken_under()
    assert one.accepting and not one.finished and allowed(one) == known


def test_a_broken_lexer_is_held_by_no_sample() -> None:
    """Samples that wait would keep its memory."""
    grammar, one, _ = broken_under()
    waiting, first = grammar.matcher(), grammar.lexer()
    waiting.accept(ord("a"))
    grammar.drop(first)
    assert list(first.users) == [waiting] and waiting._position is None and one.fork()._position is None
    assert grammar.lexer() is not first
    assert ord("b") in allowed(waiting)


def test_samples_share_one_lexer_however_many_find_the_last_one_broken() -> None:
    grammar = byte_compiler(limits=GrammarLimits(**COSTLY)).compile(Regex("[ab]*a[ab]{12}"))
    several = [grammar.matcher() for _ in range(8)]
    for one in several:
        one.accept(ord("a"))
    grammar.drop(grammar.lexer())
    masks(several, len(BYTES))
    assert set(grammar.lexer().users) == set(several)


def test_a_sample_for_which_a_lexer_of_its_own_is_too_small_fails_alone() -> None:
    tiny = byte_compiler(limits=GrammarLimits(states=40, **COSTLY)).compile(Regex("[ab]*a[ab]{12}"))
    one, other, dice = tiny.matcher(), tiny.matcher(), random.Random(1)
    with pytest.raises(GrammarFailed, match="too many states"):
        for _ in range(100):
            one.accept(dice.choice([i for i in allowed(one) if i != END]))
    assert allowed(other)
    with pytest.raises(GrammarFailed) as caught:
        masks([other, one, other], len(BYTES))
    assert caught.value.rows == (1,)


def test_a_grammar_that_is_slow_to_compile_gets_no_second_lexer() -> None:
    """It would be made in the middle of a step."""
    grammar = byte_compiler(limits=GrammarLimits(renew_s=0.0)).compile(Regex("[ab]*"))
    one = grammar.matcher()
    assert allowed(one)
    one.accept(ord("a"))
    grammar.drop(grammar.lexer())
    with pytest.raises(GrammarFailed, match="too large to start again"):
        allowed(one)


def spend(grammar: Grammar, seconds: float, step_s: float) -> None:
    for _ in range(round(seconds / step_s)):
        grammar.spend(grammar.compiler.limits.mask_s + step_s)


def test_masks_that_take_too_long_on_average_end_their_samples() -> None:
    grammar = byte_compiler(limits=GrammarLimits(mask_s=1.0, mask_credit_s=10.0)).compile(Regex("[ab]*"))
    one, other = grammar.matcher(), grammar.matcher()
    spend(grammar, 9.0, 0.5)
    assert allowed(one)
    spend(grammar, 3.0, 0.5)
    assert allowed(one)  # known already
    for each in (one, other):
        each.accept(ord("a"))
        with pytest.raises(GrammarFailed, match="take more than 1000 ms on average"):
            allowed(each)
    for _ in range(20):
        grammar.spend(0.0)
    assert allowed(grammar.matcher())


def test_one_long_mask_costs_more_than_several_short_ones() -> None:
    limits = GrammarLimits(mask_s=1.0, mask_credit_s=10.0)
    short, long = (byte_compiler(limits=limits).compile(Regex("[ab]*")) for _ in range(2))
    for _ in range(5):
        short.spend(2.0)
    long.spend(10.0)
    assert not short.overspent and long.overspent


def test_an_ambiguous_grammar_ends_by_what_its_tokens_take() -> None:
    """Each token of it takes longer than the one before, whatever the library's limits say."""
    grammar = byte_compiler(limits=GrammarLimits(mask_s=0.0001, mask_credit_s=0.05)).compile(
        Lark('start: a\na: a a | "x"')
    )
    one = grammar.matcher()
    with pytest.raises(GrammarFailed, match="on average"):
        for _ in range(10_000):
            assert allowed(one)
            one.accept(ord("x"))


def test_tokens_are_not_taken_in_again_for_ever() -> None:
    grammar = byte_compiler(limits=GrammarLimits(replay_s=0.0)).compile(Regex("[ab]*"))
    one = grammar.matcher()
    for _ in range(20):
        assert allowed(one)
        one.accept(ord("a"))
    grammar.drop(grammar.lexer())
    with pytest.raises(GrammarFailed, match="too long to be taken in again"):
        allowed(one)
