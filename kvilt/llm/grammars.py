"""A model's vocabulary as grammars see it: bytes per token, and the tokens that end a text."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ..sampling.constraint import Constraint
from ..sampling.grammar import Compiler, Grammar
from ..text.tokenizer import Tokenizer


class Grammars:
    """Compiles the grammars of requests, in the thread of whoever asks; its tables are made when first needed."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint | None) -> Grammar | None:
        """The grammar of a constraint, if there is one; GrammarError says what is wrong with it."""
        return None if constraint is None else self.compiler.compile(constraint)

    @property
    def compiler(self) -> Compiler:
        with self._lock:
            if self._compiler is None:
                spell = self._tokenizer.token_bytes
                self._compiler = Compiler([spell(i) for i in range(self._tokenizer.vocab_size)], self._end_ids)
            return self._compiler
