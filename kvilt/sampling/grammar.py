"""Constraints compiled for a vocabulary, and the lexers that samples of one grammar share.

The one module that imports llguidance. Refuses to know text and tokenizers: a vocabulary is bytes per token. Compiling
is safe on any thread and may take a while.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GrammarError, GrammarFailed, GrammarTooLarge, GrammarUnsupported, Unsupported
from .constraint import Choice, Constraint, JsonObject, JsonSchema, Lark, Regex
from .lark_check import checked_lark
from .matcher import Bits, Matcher, first_line
from .pattern import literal, whole_match
from .schema_check import checked

if TYPE_CHECKING:
    from llguidance import LLMatcher as LLMatcher
    from llguidance import LLTokenizer

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
    mask_s: float = 0.010  # what masks of one grammar may take on average, in CPU seconds
    mask_credit_s: float = 5.0  # and how far beyond that they may go in all
    renew_s: float = 0.050  # a grammar that took longer to compile gets no second lexer while samples run


class Compiler:
    """Compiles constraints for one vocabulary and keeps the last ones used."""

    def __init__(self, vocabulary: Sequence[bytes], end_ids: Iterable[int], limits: Limits | None = None) -> None:
        """`vocabulary` has each token's bytes, empty for tokens that are no text; `end_ids` end a text."""
        self.limits = limits or Limits()
        self.end_ids = tuple(sorted({i for i in end_ids if 0 <= i < len(vocabulary)}))
        self.vocab_size = len(vocabulary)
        if not self.end_ids:
            raise Unsupported("grammars need a token that ends a text, and this vocabulary has none")
        self.end_mask: Bits = np.zeros((self.vocab_size + 31) // 32, np.int32)
        for token in self.end_ids:
            self.end_mask[token // 32] |= np.array(1 << (token % 32), np.uint32).astype(np.int32)
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

    def new_matcher(self, grammar: str) -> tuple[LLMatcher, float]:
        """A matcher of the library at the beginning of a grammar, sharing nothing with others, and its CPU seconds."""
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


@dataclass(eq=False, slots=True)
class Lexer:
    """A lexer of the library that samples share: a matcher at the beginning, and who has a place on it."""

    start: LLMatcher
    masks: int = 0  # made with it so far
    users: weakref.WeakSet[Matcher] = field(default_factory=weakref.WeakSet)


class Grammar:
    """One compiled constraint, from which samples get their matchers."""

    def __init__(self, compiler: Compiler, constraint: Constraint) -> None:
        self.compiler = compiler
        self.constraint = constraint
        try:
            self._text = library_text(constraint) + _OPTIONS
        except RecursionError:
            raise GrammarTooLarge(_name(constraint), "has too many parts one in another") from None
        self._lock = threading.Lock()
        self._credit_s = compiler.limits.mask_credit_s
        self._compile_s = 0.0
        self._lexer: Lexer | None = None
        _check(self.lexer().start, _name(constraint))

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        return Matcher(self)

    def lexer(self) -> Lexer:
        """The lexer for samples that have none: the one that others use, or a new one.

        Making one takes as long as compiling did, in the middle of a step: a grammar for which that is too long ends
        with its first lexer, with GrammarFailed.
        """
        with self._lock:
            if self._lexer is None:
                if self._compile_s > self.compiler.limits.renew_s:
                    raise GrammarFailed([0], "too many states, and the grammar is too large to start again")
                start, self._compile_s = self.compiler.new_matcher(self._text)
                self._lexer = Lexer(start)
            return self._lexer

    def drop(self, lexer: Lexer) -> None:
        """Give up a lexer that is broken; samples that have a place on it find another one when they go on."""
        with self._lock:
            if self._lexer is lexer:
                self._lexer = None
        for matcher in list(lexer.users):
            matcher.leave(lexer)

    def spend(self, seconds: float) -> None:
        """Count what a mask took against what masks of this grammar may take on average."""
        limits = self.compiler.limits
        with self._lock:
            self._credit_s = min(self._credit_s + limits.mask_s - seconds, limits.mask_credit_s)

    @property
    def overspent(self) -> str:
        """Why no more masks are made: they take too long. Empty while they do not."""
        limit_ms = self.compiler.limits.mask_s * 1000
        return f"its masks take more than {limit_ms:g} ms on average" if self._credit_s < 0 else ""


def _on_large_stack(make: Callable[[], LLMatcher]) -> tuple[LLMatcher, float]:
    """Run the library's compiler where it may go deep: it follows chains of rules by recursion, at 8 KB a rule.

    On a usual stack a schema of a thousand references would end the process. The size is for the longest chain that the
    limits on texts and schemas let through; only what is used of it is real.
    """
    made: list[tuple[LLMatcher, float]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append((make(), time.thread_time()))
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
        raise GrammarUnsupported(where, "warning", first_line(warnings[0]))
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error():
        raise GrammarTooLarge(where, f"cannot be followed within its limits: {first_line(first.get_error())}")
    if not any(mask):
        raise GrammarError(where, "no token of this vocabulary can begin it, so nothing satisfies it")


def _refusal(message: str, where: str) -> GrammarError:
    reason = first_line(message)
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
