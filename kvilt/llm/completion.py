"""What a generation gives back: text, ids, counts and times, whole or piece by piece. Knows no model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ..blend.report import BlendedDocument
from ..engine.misses.miss import MissCandidate, MissReason
from ..kv.cache import KVCache
from ..sampling.sampler import TokenLogprobs
from .drawing import draw_completion
from .python_tools import Tool
from .tool_calls import ParsedToolCall as ParsedToolCall
from .tool_calls import run_calls

FinishReason = Literal["stop", "length", "cancelled", "repetition"]


@dataclass(frozen=True, slots=True)
class TextAround:
    """Text before the first different token, and what follows in this prompt and in the earlier one."""

    before: str
    now: str
    earlier: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt reused less KV than an earlier one left behind. Shows prompts of the same tenant only."""

    reason: MissReason
    first_different_token: int | None
    text_around_it: TextAround | None
    expected: int  # tokens that could have been reused
    candidates: tuple[MissCandidate, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of a completion; those of the prompt by where their KV came from.

    Samples after the first compute nothing of the prompt: they share its KV.
    """

    prompt_tokens: int
    completion_tokens: int
    computed: int
    prefix_hit: int = 0  # found in the prefix index, or in the cache or handle that the prompt continues
    blended_reused: int = 0
    blended_recomputed: int = 0
    recipe: str = ""  # how documents were blended, if they were
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # of these, accepted
    accepted_places: tuple[int, ...] = ()  # of these, how many as the first, second, ... of their draft
    documents_computed: int = 0  # tokens of documents that were not stored: computed once by themselves, then reused
    miss: Miss | None = None  # why no more was reused; None where no more was there
    documents: tuple[BlendedDocument, ...] = field(default=(), repr=False)  # what was blended, and computed again
    cached_tokens: int = field(init=False)  # tokens of the prompt that were not computed, from any source

    def __post_init__(self) -> None:
        object.__setattr__(self, "cached_tokens", self.prefix_hit + self.blended_reused)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the call."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. `token_ids` end with the token that stopped it, `text` does not.

    The answer of a chat is parsed: `text` is its content, beside `reasoning` and `tool_calls`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprobs] | None
    timing: Timing
    kv: KVCache | None = None  # with keep_kv: prompt and all generated tokens but the last; yours to close
    alternatives: tuple[Completion, ...] = ()  # samples 1 to n - 1; this one is sample 0
    # With prompt_logprobs: one for each token of the prompt; None for the first, and for what a cache or handle held.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_string: str | None = None  # the stop string that ended it, if one did
    warnings: tuple[str, ...] = ()  # what of the request had no effect, as unknown keywords of a schema
    reasoning: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()

    def run_tools(self, functions: Sequence[Tool]) -> list[dict[str, Any]]:
        """Carry out the tool calls with these functions; returns the messages that continue the conversation.

        They are the answer with its calls, and the result of each. A function that raises gives its error as the
        result.
        """
        return run_calls(self.text, self.tool_calls, functions)

    def _repr_html_(self) -> str:
        return draw_completion(self)


class TextPiece(str):
    """Some text of an answer; `drafted` if its tokens were accepted drafts, `reasoning` if it is not the content."""

    drafted: bool
    reasoning: bool

    def __new__(cls, text: str, drafted: bool = False, reasoning: bool = False) -> TextPiece:
        piece = super().__new__(cls, text)
        piece.drafted = drafted
        piece.reasoning = reasoning
        return piece


class Stream:
    """Pieces of text as they are certain; after the last one `completion` has the rest.

    Close it, or use it as a context manager, unless it is read to its end.
    """

    def __init__(
        self,
        pieces: Generator[TextPiece, None, None],
        result: Callable[[], Completion],
        stop: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """`leave` aborts a request that no caller waits for; it does nothing once the first piece was asked for."""
        self._pieces = pieces
        self._result = result
        self._stop = stop
        self._finalizer = weakref.finalize(self, leave)
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[TextPiece]:
        return self

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    @property
    def completion(self) -> Completion:
        """The whole result; reads the stream to its end first."""
        for _ in self._pieces:
            pass
        return self._result()

    def stop(self) -> None:
        """Generate nothing after the step in progress. `completion` then has the text so far, and its KV with keep_kv.

        May be called from a signal's callback or another thread.
        """
        self._stop()

    def close(self) -> None:
        """End the request within one step and free its KV; there is no completion. May be called twice.

        While another thread reads, it stops there as with `stop`.
        """
        try:
            self._pieces.close()
        except ValueError:  # another thread is inside the generator
            self._stop()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
