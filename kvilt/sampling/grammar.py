"""Constraints compiled for a vocabulary, and matchers that follow samples through them token by token.

The one module that imports llguidance. Refuses to know text and tokenizers: a vocabulary is bytes per token. Compiling
is safe on any thread and may take a while; a matcher belongs to one sample and is used by one thread at a time.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GrammarError, GrammarFailed, GrammarTooLarge, GrammarUnsupported, InputError, Unsupported
from .constraint import Choice, Constraint, JsonObject, JsonSchema, Lark, Regex
from .lark_check import checked_lark
from .pattern import literal, whole_match
from .schema_check import checked

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bits = npt.NDArray[np.int32]  # [words]: bit i of word w is token 32 * w + i

# Without forcing, a mask holds every token that the grammar allows, not only the library's favourite spelling.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_DRAWING = re.compile(r"\n +[0-9]+ \| ")  # where the library begins to quote the grammar
_TOO_LARGE = ("too big", "too large", "too many", "too complex", "too deep", "unable to determine", "too much")


_STACK_BYTES = 256 << 20
_STACK_LOCK = threading.Lock()  # the size of stacks is a setting of the process


@dataclass(frozen=True, slots=True)
class Limits:
    """What one grammar may cost. Fuel is the library's count of work: about 50,000 a millisecond when compiling, 14,000
    when masking; a state takes about 3 KB."""

    compile_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    row_items: int = 5_000
    states: int = 50_000
    symbols: int = 50_000
    cached: int = 32  # compiled grammars that are kept


class Compiler:
    """Compiles constraints for one vocabulary and keeps the last ones used."""

    def __init__(self, vocabulary: Sequence[bytes], end_ids: Iterable[int], limits: Limits | None = None) -> None:
        """`vocabulary` has each token's bytes, empty for tokens that are no text; `end_ids` end a text."""
        self.limits = limits or Limits()
        self.end_ids = tuple(sorted({i for i in end_ids if 0 <= i < len(vocabulary)}))
        self.vocab_size = len(vocabulary)
        if not self.end_ids:
            raise Unsupported("grammars need a token that ends a text, and this vocabulary has none")
        self._tokenizer = _library_vocabulary(vocabulary, self.end_ids)
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, made now or kept from before; GrammarError says why there is none."""
        with self._lock:
            if (kept := self._grammars.get(constraint)) is not None:
                self._grammars.move_to_end(constraint)
                return kept
        grammar = Grammar(self, constraint)  # without the lock: other threads compile meanwhile
        with self._lock:
            self._grammars[constraint] = grammar
            while len(self._grammars) > self.limits.cached:
                self._grammars.popitem(last=False)
        return grammar

    def new_matcher(self, grammar: str) -> LLMatcher:
        """A matcher of the library at the beginning of a grammar, sharing nothing with others."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=self.limits.compile_fuel,
            step_lexer_fuel=self.limits.step_fuel,
            step_max_items=self.limits.step_items,
            max_items_in_row=self.limits.row_items,
            max_lexer_states=self.limits.states,
            max_grammar_size=self.limits.symbols,
            verbose_errors=False,
        )
        return _on_large_stack(lambda: LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits))


class Grammar:
    """One compiled constraint, from which samples get their matchers."""

    def __init__(self, compiler: Compiler, constraint: Constraint) -> None:
        self.compiler = compiler
        self.constraint = constraint
        try:
            self._text = library_text(constraint) + _OPTIONS
        except RecursionError:
            raise GrammarTooLarge(_name(constraint), "has too many parts one in another") from None
        self._start = self.renew()
        _check(self._start, _name(constraint))

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        return Matcher(self, self._start.deep_copy(), ())

    def renew(self) -> LLMatcher:
        """A matcher of the library with a lexer of its own; later samples start from it too.

        Copies share one lexer, which counts the states that all of them ever needed against one limit.
        """
        self._start = self.compiler.new_matcher(self._text)
        return self._start.deep_copy()


class Matcher:
    """Where one sample stands in its grammar: which tokens may come next, and whether it may end."""

    __slots__ = ("_ends", "_failure", "_grammar", "_inner", "_tokens")

    def __init__(self, grammar: Grammar, inner: LLMatcher, tokens: Iterable[int], ends: int = 0) -> None:
        self._grammar = grammar
        self._inner = inner
        self._tokens = list(tokens)  # without the end tokens, which are only counted
        self._ends = ends
        self._failure = ""  # why it can go no further

    @property
    def accepting(self) -> bool:
        """Whether the text so far is whole, so that the sample may end here."""
        return self._ends > 0 or (not self._failure and bool(self._inner.is_accepting()))

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._ends > 0 or (bool(self._inner.is_stopped()) and self.accepting)

    def fill(self, bits: Bits) -> None:
        """Set the bits [words] of the tokens that may come next, and clear all others."""
        bits[:] = 0
        if self._ends:
            for token in self._grammar.compiler.end_ids:
                bits[token // 32] |= np.array(1 << (token % 32), np.uint32).astype(np.int32)
            return
        if not self._failure:
            self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._inner.is_error() and self._restart():
                self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._note_failure()
        if self._failure:
            raise GrammarFailed([0], self._failure)

    def accept(self, token: int) -> None:
        """Take in a token; one that the grammar does not allow here is refused, and nothing changes.

        Where a limit is in the way the token counts as taken, and the next mask says so.
        """
        if token in self._grammar.compiler.end_ids:
            if not self.accepting:
                raise _not_allowed(token)
            self._ends += 1
            return
        if self._ends or not self._consume(token):
            raise _not_allowed(token)
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never been accepted."""
        if not 0 <= count <= len(self._tokens) + self._ends:
            raise InputError(f"{count} tokens cannot be taken back: {len(self._tokens) + self._ends} were accepted")
        ends = min(count, self._ends)
        kept = len(self._tokens) - (count - ends)
        self._ends -= ends
        back = len(self._tokens) - kept
        del self._tokens[kept:]
        if back and (self._failure or not self._inner.rollback(back)):
            self._go_again()

    def fork(self) -> Matcher:
        """The same place in the same grammar, free to go its own way."""
        other = Matcher(self._grammar, self._inner.deep_copy(), self._tokens, self._ends)
        other._failure = self._failure
        return other

    def _consume(self, token: int) -> bool:
        if not 0 <= token < self._grammar.compiler.vocab_size:
            return False
        if self._failure:
            return True
        taken = self._inner.try_consume_tokens([token])
        if self._inner.is_error() and self._restart():
            taken = self._inner.try_consume_tokens([token])
        self._note_failure()
        return bool(taken == 1 or self._failure)

    def _restart(self) -> bool:
        """Try again with a lexer of one's own, so that a limit others have used up does not end this sample."""
        if not self._inner.get_error().startswith("lexer"):
            return False  # only lexers are shared: whatever else is wrong would be wrong again
        self._go_again()
        return not self._failure

    def _go_again(self) -> None:
        self._inner = self._grammar.renew()
        self._failure = ""
        if self._inner.try_consume_tokens(self._tokens) != len(self._tokens):
            self._note_failure()

    def _note_failure(self) -> None:
        if self._inner.is_error():
            self._failure = _first_line(self._inner.get_error())


def masks(matchers: Sequence[Matcher], vocab_size: int) -> Tensor:
    """Which tokens each matcher allows [rows, vocab_size] bool; GrammarFailed names all rows that have no answer."""
    known = matchers[0]._grammar.compiler.vocab_size
    bits = np.empty((len(matchers), (known + 31) // 32), np.int32)
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
    return _unpacked(bits, min(known, vocab_size), vocab_size)


def _unpacked(bits: npt.NDArray[np.int32], known: int, vocab_size: int) -> Tensor:
    """Bits [rows, words] as booleans [rows, vocab_size]; ids past the vocabulary are padding and never allowed."""
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=known, bitorder="little").view(np.bool_)
    if known < vocab_size:
        allowed = np.pad(allowed, ((0, 0), (0, vocab_size - known)))
    return torch.from_numpy(allowed)


def _on_large_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Run the library's compiler where it may go deep: it follows chains of rules by recursion, at 8 KB a rule.

    On a usual stack a schema of a thousand references would end the process. The size is for the longest chain that the
    limits on texts and schemas let through; only what is used of it is real.
    """
    made: list[LLMatcher] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # a panic of the library is no Exception
            failed.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            worker = threading.Thread(target=run, name="kvilt grammar")
            worker.start()
        except RuntimeError:
            raise GrammarTooLarge("grammar", "there is no memory for the stack that compiling needs") from None
        finally:
            threading.stack_size(before)
    worker.join()
    if failed:
        raise GrammarError("grammar", f"the library failed to compile it: {str(failed[0])[:120]}") from failed[0]
    return made[0]


def library_text(constraint: Constraint) -> str:
    """A constraint as a grammar of the library."""
    match constraint:
        case JsonSchema():
            return f"start: %json {checked(constraint.text)}"
        case JsonObject():
            return f"start: %json {checked(json.dumps({'type': 'object'}))}"
        case Regex(pattern):
            return f"start: /(?:{whole_match(pattern)})/"
        case Choice(choices):
            return f"start: /(?:{'|'.join(map(literal, choices))})/"
        case Lark(grammar):
            return checked_lark(grammar)


def _name(constraint: Constraint) -> str:
    names = {JsonSchema: "json_schema", JsonObject: "json_object", Regex: "regex", Choice: "choice", Lark: "lark"}
    return names[type(constraint)]


class _Words:
    """A vocabulary in the shape the library asks for."""

    def __init__(self, tokens: list[bytes], end_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(end_ids)

    def __call__(self, _text: bytes | str) -> list[int]:
        """How the model spells forced text; nothing is forced, so nobody asks."""
        return []


def _library_vocabulary(vocabulary: Sequence[bytes], end_ids: Sequence[int]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise Unsupported("structured output needs llguidance; install it with: pip install 'kvilt[grammar]'") from None
    # The library marks special tokens with a byte 255, which no UTF-8 text holds: tokens with one are never text.
    tokens = [b"" if b"\xff" in token else bytes(token) for token in vocabulary]
    for token in end_ids:
        tokens[token] = b"\x00end of text %d" % token
    return LLTokenizer(TokenizerWrapper(_Words(tokens, end_ids)), eos_token=list(end_ids))


def _check(matcher: LLMatcher, where: str) -> None:
    """Raise what is wrong with a grammar, told from the library's words, or from the lack of a first token."""
    if matcher.is_error():
        raise _refusal(matcher.get_error(), where)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarUnsupported(where, "warning", _first_line(warnings[0]))
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error():
        raise GrammarTooLarge(where, f"cannot be followed within its limits: {_first_line(first.get_error())}")
    if not any(mask):
        raise GrammarError(where, "no token of this vocabulary can begin it, so nothing satisfies it")


def _refusal(message: str, where: str) -> GrammarError:
    reason = _first_line(message)
    lower = _DRAWING.split(message, maxsplit=1)[0].lower()
    for sign, keyword, advice in (
        ("oneof constraints", "oneOf", "is supported only where its branches cannot overlap; use anyOf"),
        ("not disjoint", "patternProperties", "is supported only where no name matches two patterns"),
        ("min/maxproperties", "minProperties", "and maxProperties are supported where all are required"),
        ("circular references with sibling", "$ref", "to itself is supported only with nothing beside it"),
        ("lookarounds", "lookaround", "in a pattern is not supported"),
    ):
        if sign in lower:
            return GrammarUnsupported(where, keyword, f"{keyword} {advice}")
    if any(sign in lower for sign in _TOO_LARGE):
        return GrammarTooLarge(where, f"is over a limit: {reason}")
    if "unsatisfiable" in lower and "while processing" in lower:
        return GrammarUnsupported(
            where, "$ref", "$ref to a schema that nothing satisfies is not supported; drop that branch"
        )
    if "unsatisfiable" in lower:
        return GrammarError(where, f"nothing satisfies it: {reason}")
    return GrammarError(where, f"is broken: {reason}")


def _first_line(message: str) -> str:
    """What the library says, without its drawings and the place in a text that kvilt wrote."""
    line = message.split("\n", 1)[0]
    return line.split("failed to compile JSON schema: ", 1)[-1].strip()[:200]


def _not_allowed(token: int) -> InputError:
    return InputError(f"the grammar does not allow token {token} here; draw tokens with this state's own mask")
