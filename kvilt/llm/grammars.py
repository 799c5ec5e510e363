"""A model's vocabulary as grammars see it, and the grammars of requests, compiled in worker processes first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import ModelClosed, Unsupported
from ..sampling.constraint import Constraint
from ..text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..sampling.grammar import Compiler, Grammar


class Grammars:
    """Compiles the grammars of requests, in worker processes first; its tables are made when first needed."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._compiler: Compiler | None = None
        self._closed = False
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint | None) -> Grammar | None:
        """The grammar of a constraint, if there is one; GrammarError says what is wrong with it."""
        return None if constraint is None else self.compiler.compile(constraint)

    async def compiled(self, constraint: Constraint | None, owner: str = "") -> Grammar | None:
        """`compile` for event loops: a caller that is cancelled ends it, unless others wait for the same grammar.

        Grammars of different owners are compiled by turns.
        """
        if constraint is None:
            return None
        compiler = self._compiler
        if compiler is None:
            compiler = await asyncio.to_thread(self._made)
        ticket = compiler.begin(constraint, owner)
        compiling = asyncio.wrap_future(ticket.future)
        compiling.add_done_callback(_mark_retrieved)
        try:
            # Shielded: to cancel the future itself would be to cancel it for others too.
            grammar: Grammar = await asyncio.shield(compiling)
            return grammar
        finally:
            ticket.leave()

    def warm_up(self) -> None:
        """Make the tables now. This takes about 0.1 s and blocks all other threads. Does nothing without llguidance."""
        with suppress(Unsupported):
            self._made()

    def close(self) -> None:
        """End all that is being compiled; no more grammars are made."""
        with self._lock:
            self._closed = True
            if self._compiler is not None:
                self._compiler.close()

    @property
    def compiler(self) -> Compiler:
        """The compiler for this vocabulary, which is made now or was before."""
        return self._made()

    def _made(self) -> Compiler:
        with self._lock:
            if self._closed:
                raise ModelClosed
            if self._compiler is None:
                from ..sampling.grammar import Compiler  # most processes have no grammar

                spell = self._tokenizer.token_bytes
                spelled = [spell(i) for i in range(self._tokenizer.vocab_size)]
                self._compiler = Compiler(spelled, self._end_ids, isolated=True)
            return self._compiler


def _mark_retrieved(compiling: asyncio.Future[Grammar]) -> None:
    """Read the error, if there is one: asyncio logs those that nothing reads, and a cancelled caller reads none."""
    if not compiling.cancelled():
        compiling.exception()
