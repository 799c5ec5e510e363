"""Matchers: the position of each sample in its grammar, the tokens that may come next, and masks of several samples.

Refuses to know how grammars are written and compiled. A matcher belongs to one sample and is used by one thread at a
time.

Samples of one grammar share a lexer of the library, which builds states as they are needed. A lexer that goes over a
limit is broken for all of its samples at once. Masks report that, but taking in a token does not: the library then
answers as if the grammar did not allow the token. So a sample whose mask was made before another sample broke the lexer
had a token refused that its own mask allowed. Therefore only masks are trusted here. A sample
whose lexer is broken takes in its tokens again on another one, and fails only where a new lexer is not enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GrammarFailed, InputError

if TYPE_CHECKING:
    from .grammar import Grammar, Lexer
    from .library import LLMatcher

Bits = npt.NDArray[np.int32]  # [words]: bit i of word w is token 32 * w + i

_SHARED_LIMIT = "too many states"  # the library's word for the limit that samples reach together
_SLOW = "too many states, and its tokens take too long to be taken in again"
_AT_ONCE = 16  # tokens between two looks at the clock
_DISAGREES = "the library does not take in the tokens that it allowed"


@dataclass(frozen=True, slots=True)
class GrammarPosition:
    """A position in a grammar: the library's matcher, and the lexer that it uses."""

    lexer: Lexer
    place: LLMatcher


class Matcher:
    """The position of one sample in its grammar: which tokens may come next, and whether it may end."""

    __slots__ = ("__weakref__", "_ends", "_failure", "_grammar", "_mask", "_position", "_taken_s", "_tokens", "_watch")

    def __init__(self, grammar: Grammar, tokens: Iterable[int] = (), ends: int = 0) -> None:
        self._grammar = grammar
        self._tokens = list(tokens)  # without the end tokens, which are only counted
        self._ends = ends
        self._failure = ""  # why it can go no further
        self._mask: Bits | None = None  # of this place, once it is known; never written to again
        self._taken_s = 0.0  # for taking in tokens since the last mask
        self._position: GrammarPosition | None = None  # after the tokens; None until it is needed
        self._watch = grammar.watch()

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole, so that the sample may end here."""
        return self._ends > 0 or self._allows(self._grammar.compiler.end_ids[0])

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._ends > 0 or bool(np.array_equal(self._allowed(), self._grammar.compiler.end_mask))

    def fill(self, bits: Bits) -> None:
        """Set the bits [words] of the tokens that may come next, and clear all others."""
        bits[:] = self._grammar.compiler.end_mask if self._ends else self._allowed()
        if self._failure and not self._ends:
            raise GrammarFailed([0], self._failure)

    def accept(self, token: int) -> None:
        """Take in a token; one that the grammar does not allow here is refused, and nothing changes.

        A token that this matcher's own mask allowed is never refused: where a limit is in the way it counts as taken,
        and the next mask says so.
        """
        if token in self._grammar.compiler.end_ids:
            if not self.accepting:
                raise _not_allowed(token)
            self._ends += 1
            return
        began = time.thread_time()
        if self._ends or not self._follow(token):
            raise _not_allowed(token)
        self._tokens.append(token)
        self._mask = None
        self._taken_s += time.thread_time() - began

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never been accepted."""
        if not 0 <= count <= len(self._tokens) + self._ends:
            raise InputError(f"{count} tokens cannot be taken back: {len(self._tokens) + self._ends} were accepted")
        ends = min(count, self._ends)
        self._ends -= ends
        back = count - ends
        if not back:
            return
        del self._tokens[len(self._tokens) - back :]
        if self._watch is not None:
            self._watch.keep(len(self._tokens))
        self._mask = None
        if self._failure or self._position is None or not self._position.place.rollback(back):
            self._position, self._failure = None, ""

    def fork(self) -> Matcher:
        """An independent matcher at the same position."""
        other = Matcher(self._grammar, self._tokens, self._ends)
        other._failure, other._mask = self._failure, self._mask
        other._watch = None if self._watch is None else self._watch.fork()
        if self._position is not None:
            other._move(GrammarPosition(self._position.lexer, self._position.place.deep_copy()))
        return other

    def leave(self, lexer: Lexer) -> None:
        """Release a broken lexer and its memory; the sample takes another one when it continues."""
        if self._position is not None and self._position.lexer is lexer:
            self._position = None

    def _follow(self, token: int) -> bool:
        """Take in a token, here and where items are watched."""
        if self._watch is None:
            return self._take(token)
        if not 0 <= token < self._grammar.compiler.vocab_size or not (self._allows(token) or self._failure):
            return False
        if not self._take(token):
            return False
        if not self._failure:  # what is taken in after that is taken back before anything else follows
            self._watch.take(token)
        return True

    def _take(self, token: int) -> bool:
        if not 0 <= token < self._grammar.compiler.vocab_size:
            return False
        stand = self._here()
        if stand is None:
            return True
        if stand.place.try_consume_tokens([token]) == 1:
            return True
        allowed = self._allows(token)
        if allowed:
            self._grammar.drop(stand.lexer)
            self._replay([*self._tokens, token])
        return allowed or bool(self._failure)

    def _allows(self, token: int) -> bool:
        return bool(self._allowed()[token // 32] >> (token % 32) & 1)

    def _allowed(self) -> Bits:
        """The mask of this place [words]; nothing is allowed where there is a failure."""
        if self._mask is None:
            mask = np.zeros_like(self._grammar.compiler.end_mask)
            self._failure = self._failure or self._grammar.overspent
            began = time.thread_time()
            self._compute(mask)
            if self._watch is not None:
                self._watch.forbid(mask)
            self._grammar.spend(self._taken_s + time.thread_time() - began)
            self._taken_s = 0.0
            self._mask = np.zeros_like(mask) if self._failure else mask
        return self._mask

    def _compute(self, mask: Bits) -> None:
        while (stand := self._here()) is not None:
            place, lexer = stand.place, stand.lexer
            place.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if not place.is_error():
                lexer.masks += 1
                return
            error = place.get_error()
            if error.startswith("lexer"):
                self._grammar.drop(lexer)
            own = lexer.masks == 0 and len(lexer.users) == 1  # no other sample has used this lexer
            if own or _SHARED_LIMIT not in error:
                self._failure = first_line(error)

    def _here(self) -> GrammarPosition | None:
        """The current position; without one, the tokens are replayed. None: the matcher has failed."""
        if self._position is None and not self._failure:
            self._replay(self._tokens)
        return None if self._failure else self._position

    def _replay(self, tokens: Sequence[int]) -> None:
        """Replay tokens that were allowed: on the shared lexer or, if that breaks, on a new one."""
        failure = ""
        for _ in range(2):
            try:
                lexer = self._grammar.lexer()
            except GrammarFailed as error:
                failure = error.reason
                break
            place = lexer.start.deep_copy()
            taken = _take_all(place, tokens, self._grammar.compiler.limits.replay_s)
            if taken == len(tokens):
                self._move(GrammarPosition(lexer, place))
                return
            if taken is None:
                failure = _SLOW
                break
            failure = first_line(place.get_error()) or _DISAGREES
            self._grammar.drop(lexer)
        self._position, self._failure = None, failure

    def _move(self, stand: GrammarPosition) -> None:
        self._position = stand
        stand.lexer.users.add(self)


def _take_all(place: LLMatcher, tokens: Sequence[int], limit_s: float) -> int | None:
    """How many of these tokens a matcher of the library accepts; None where that takes too long."""
    began = time.thread_time()
    for at in range(0, len(tokens), _AT_ONCE):
        piece = list(tokens[at : at + _AT_ONCE])
        taken = place.try_consume_tokens(piece)
        if taken < len(piece):
            return at + taken
        if time.thread_time() - began > limit_s:
            return None
    return len(tokens)


def masks(matchers: Sequence[Matcher], vocab_size: int) -> Tensor:
    """Which tokens each matcher allows [rows, vocab_size] bool; GrammarFailed names all rows that have no answer."""
    bits, known = packed_masks(matchers)
    return _unpacked(bits, min(known, vocab_size), vocab_size)


def packed_masks(matchers: Sequence[Matcher]) -> tuple[npt.NDArray[np.int32], int]:
    """The same as bits [rows, words], and the size of the grammar's vocabulary: bits past it say nothing."""
    compiler = matchers[0]._grammar.compiler
    bits = np.empty((len(matchers), len(compiler.end_mask)), np.int32)
    failed: list[int] = []
    reason = ""
    for row, matcher in enumerate(matchers):
        try:
            matcher.fill(bits[row])
        except GrammarFailed as error:
            failed.append(row)
            reason = error.reason
    if failed:
        raise GrammarFailed(failed, reason)
    return bits, compiler.vocab_size


def _unpacked(bits: npt.NDArray[np.int32], known: int, vocab_size: int) -> Tensor:
    """Bits [rows, words] as booleans [rows, vocab_size]; ids past the vocabulary are padding and never allowed."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=known, bitorder="little").view(np.bool_)
    if known < vocab_size:
        allowed = np.pad(allowed, ((0, 0), (0, vocab_size - known)))
    return torch.from_numpy(allowed)


def first_line(message: str) -> str:
    """The library's message, without its source excerpt and position."""
    line = message.split("\n", 1)[0]
    return line.split("failed to compile JSON schema: ", 1)[-1].strip()[:200]


def _not_allowed(token: int) -> InputError:
    return InputError(f"the grammar does not allow token {token} here; draw tokens with this state's own mask")
