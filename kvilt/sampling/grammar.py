"""Constraints compiled for a vocabulary, and the lexers that samples of one grammar share.

Refuses to know text and tokenizers: a vocabulary is bytes per token. Compiling is safe on any thread and may take a
while.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GrammarError, GrammarFailed, GrammarTooLarge, GrammarUnsupported, Unsupported, renamed
from . import library
from .compile_queue import CompileQueue, PendingGrammar
from .compile_worker import CompileLimits, CompileWorker
from .constraint import CONSTRAINTS, SHORT_NAMES, Choice, Constraint, Gbnf, JsonObject, JsonSchema, Lark, Regex
from .gbnf import gbnf_to_lark
from .lark_check import checked_lark
from .library import CompileResult
from .matcher import Bits, Matcher, first_line
from .pattern import literal, whole_match
from .schema_check import checked, checked_schema
from .unique_items import UniqueRules, UniqueWatch, VocabularyBytes

if TYPE_CHECKING:
    from .library import LLMatcher

# Without forcing, a mask holds every token that the grammar allows, not only the library's favourite spelling.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_NAMES = dict(zip(CONSTRAINTS, SHORT_NAMES, strict=True))
_DRAWING = re.compile(r"\n +[0-9]+ \| ")  # where the library begins to quote the grammar
_TOO_LARGE = (
    "too big",
    "too large",
    "too many",
    "too complex",
    "too deep",
    "unable to determine",
    "too much",
    "fuel exhausted",
    "precomputation failed",
)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost. Fuel is the library's count of work: about 50,000 a millisecond when compiling, 14,000
    when masking; a state takes about 3 KB."""

    compile_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    row_items: int = 5_000
    states: int = 50_000
    symbols: int = 50_000
    cached: int = 32  # compiled grammars that are kept
    cached_bytes: int = 512 << 20  # as long as they took no more memory than this together
    compile_s: float = 2.0  # CPU seconds for one grammar, in a worker process
    compile_wall_s: float = 10.0  # wall-clock seconds for the same
    compile_bytes: int = 256 << 20
    compilers: int = 2  # worker processes
    waiting: int = 32  # grammars of one owner that wait for them
    mask_s: float = 0.010  # what masks of one grammar may take on average, in CPU seconds
    mask_credit_s: float = 5.0  # and by how much they may exceed that in all
    replay_s: float = 0.25  # CPU seconds to replay a sample's tokens on another lexer
    renew_s: float = 0.050  # a grammar that took longer to compile gets no second lexer while samples run


class Compiler:
    """Compiles constraints for one vocabulary and keeps the last ones used. Close it, where it is isolated."""

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        end_ids: Iterable[int],
        limits: GrammarLimits | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        """`vocabulary` has each token's bytes, empty for tokens that are no text; `end_ids` end a text.

        Isolated, a grammar is compiled here only after a process that can be ended has compiled it within its limits.
        Constraints that others write need that: the library's own limits do not cover all that it does.
        """
        self.limits = limits or GrammarLimits()
        self.end_ids = tuple(sorted({i for i in end_ids if 0 <= i < len(vocabulary)}))
        self.vocab_size = len(vocabulary)
        if not self.end_ids:
            raise Unsupported("grammars need a token that ends a text, and this vocabulary has none")
        self.end_mask: Bits = np.zeros((self.vocab_size + 31) // 32, np.int32)
        for token in self.end_ids:
            self.end_mask[token // 32] |= np.array(1 << (token % 32), np.uint32).astype(np.int32)
        try:
            self._tokenizer = library.new_tokenizer(vocabulary, self.end_ids)
        except ImportError:
            raise Unsupported(
                "structured output needs llguidance; install it with: pip install 'kvilt[grammar]'"
            ) from None
        self._vocabulary = vocabulary
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._queue = self._new_queue(vocabulary) if isolated else None

    @cached_property
    def token_bytes(self) -> VocabularyBytes:
        """The vocabulary for those who watch texts."""
        return VocabularyBytes(self._vocabulary)

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint, made now or kept from before; GrammarError says why there is none."""
        ticket = self.begin(constraint)
        try:
            return ticket.future.result()
        finally:
            ticket.leave()

    def begin(self, constraint: Constraint, owner: str = "") -> PendingGrammar[Grammar]:
        """Start compiling a constraint; an isolated compiler returns at once and compiles in a worker.

        Owners take turns where grammars wait for a worker.
        """
        done: Future[Grammar] = Future()
        with self._lock:
            kept = self._grammars.get(constraint)
            if kept is not None:
                self._grammars.move_to_end(constraint)
        if kept is None and self._queue is not None:
            return self._queue.submit(constraint, owner)
        done.set_result(kept or self._keep(Grammar(self, constraint, _checked(constraint))))
        return PendingGrammar(done, lambda: None)

    def close(self) -> None:
        """End the processes that compile; grammars that are made can be used on."""
        if self._queue is not None:
            self._queue.close()

    def new_matcher(self, grammar: str) -> tuple[LLMatcher, float]:
        """A matcher of the library at the beginning of a grammar, sharing nothing with others, and its CPU seconds."""
        try:
            return library.new_matcher(self._tokenizer, grammar, self._library_limits)
        except library.LibraryFailed as error:
            raise GrammarError("grammar", str(error)) from error

    def _keep(self, grammar: Grammar) -> Grammar:
        with self._lock:
            self._grammars[grammar.constraint] = grammar
            while len(self._grammars) > 1 and (
                len(self._grammars) > self.limits.cached
                or sum(each.grown_bytes for each in self._grammars.values()) > self.limits.cached_bytes
            ):
                self._grammars.popitem(last=False)
        return grammar

    def _new_queue(self, vocabulary: Sequence[bytes]) -> CompileQueue[Grammar]:
        limits = self.limits
        worker_limits = CompileLimits(limits.compile_s, limits.compile_wall_s, limits.compile_bytes)
        settings = {
            "end_ids": self.end_ids,
            "limits": self._library_limits,
            "cpu_s": worker_limits.cpu_s,
            "memory_bytes": worker_limits.memory_bytes,
        }
        startup = library.startup_message(vocabulary, settings)
        return CompileQueue(
            lambda: CompileWorker(startup, worker_limits), self._tried, limits.compilers, limits.waiting
        )

    def _tried(self, constraint: Constraint, worker: CompileWorker) -> Grammar:
        """Compile a grammar that the worker has compiled before; runs in a thread of the queue."""
        written, where = _checked(constraint), _name(constraint)
        verdict = worker.try_compile(written.text, where)
        _check(verdict, where)
        return self._keep(Grammar(self, constraint, written, max(0, verdict.grown_bytes)))

    @property
    def _library_limits(self) -> dict[str, int]:
        return {
            "initial_lexer_fuel": self.limits.compile_fuel,
            "step_lexer_fuel": self.limits.step_fuel,
            "step_max_items": self.limits.step_items,
            "max_items_in_row": self.limits.row_items,
            "max_lexer_states": self.limits.states,
            "max_grammar_size": self.limits.symbols,
        }


@dataclass(eq=False, slots=True)
class Lexer:
    """A lexer of the library that samples share: a matcher at the beginning, and the matchers that use it."""

    start: LLMatcher
    masks: int = 0  # made with it so far
    users: weakref.WeakSet[Matcher] = field(default_factory=weakref.WeakSet)


class Grammar:
    """One compiled constraint, from which samples get their matchers."""

    def __init__(
        self, compiler: Compiler, constraint: Constraint, written: LibraryGrammar, grown_bytes: int = 0
    ) -> None:
        """`written` is the constraint as the library reads it; compiling it took about `grown_bytes` of memory."""
        self.compiler = compiler
        self.constraint = constraint
        self.grown_bytes = grown_bytes
        self.warnings = written.warnings
        self._text = written.text
        self._unique = written.unique
        self._lock = threading.Lock()
        self._credit_s = compiler.limits.mask_credit_s
        self._compile_s = 0.0
        self._lexer: Lexer | None = None
        _check(library.compile_result(self.lexer().start), _name(constraint))

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        return Matcher(self)

    def watch(self) -> UniqueWatch | None:
        """Follows a sample from the beginning, where arrays must have different items."""
        return None if self._unique is None else UniqueWatch(self._unique, self.compiler.token_bytes)

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
        """Count what a mask took, and the token before it, against what that may take on average.

        What is above twice the average counts ten times: one long wait in a step is worse than several short ones.
        """
        limits = self.compiler.limits
        cost = seconds + 9 * max(0.0, seconds - 2 * limits.mask_s)
        with self._lock:
            self._credit_s = min(self._credit_s + limits.mask_s - cost, limits.mask_credit_s)

    @property
    def overspent(self) -> str:
        """Why no more masks are made: they take too long. Empty while they do not."""
        limit_ms = self.compiler.limits.mask_s * 1000
        return f"its masks take more than {limit_ms:g} ms on average" if self._credit_s < 0 else ""


@dataclass(frozen=True, slots=True)
class LibraryGrammar:
    """A constraint as a grammar of the library, and what the library does not know of it."""

    text: str
    unique: UniqueRules | None = None
    warnings: tuple[str, ...] = ()  # what of the constraint has no effect, in sentences


def _checked(constraint: Constraint) -> LibraryGrammar:
    try:
        return library_grammar(constraint)
    except RecursionError:
        raise GrammarTooLarge(_name(constraint), "has too many parts one in another") from None


def library_grammar(constraint: Constraint) -> LibraryGrammar:
    """A constraint as a grammar of the library."""
    if isinstance(constraint, JsonSchema):
        schema = checked_schema(constraint.text, close_objects=constraint.close_objects)
        return LibraryGrammar(f"start: %json {schema.text}{_OPTIONS}", schema.unique, schema.warnings)
    return LibraryGrammar(_text(constraint) + _OPTIONS)


def _text(constraint: JsonObject | Regex | Choice | Lark | Gbnf) -> str:
    match constraint:
        case JsonObject():
            return f"start: %json {checked(json.dumps({'type': 'object'}))}"
        case Regex(pattern):
            return f"start: /(?:{whole_match(pattern)})/"
        case Choice(choices):
            return f"start: /(?:{'|'.join(map(literal, choices))})/"
        case Lark(grammar):
            return checked_lark(grammar)
        case Gbnf(grammar):
            return gbnf_to_lark(grammar)


def _name(constraint: Constraint) -> str:
    return _NAMES[type(constraint)]


def _check(verdict: CompileResult, where: str) -> None:
    """Raise the error that the library's message stands for."""
    match verdict.problem:
        case "":
            return
        case "grammar":
            raise _refusal(verdict.message, where)
        case "warning":
            raise GrammarUnsupported(where, "warning", first_line(verdict.message))
        case "mask":
            raise GrammarTooLarge(where, f"cannot be followed within its limits: {first_line(verdict.message)}")
        case "empty":
            raise GrammarError(where, "no token of this vocabulary can begin it, so nothing satisfies it")
        case _:
            raise GrammarError(where, first_line(verdict.message))


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


__getattr__ = renamed(__name__, {"Limits": "GrammarLimits"})
