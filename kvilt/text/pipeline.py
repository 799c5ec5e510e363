"""A `tokenizers` pipeline with bounded work: long texts are tokenized in pieces, up to the limit.

Plain text in, ids out; refuses to know special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ContextOverflow, InputError
from .split_points import PIECE_CHARS, SplitPoints, find_split_points
from .token_sizes import TokenSizes, normalizer_effect

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

_SURROGATE = re.compile("[\ud800-\udfff]")


class Pipeline:
    """Derived tables are computed on first use; threads may share it."""

    def __init__(self, core: Core, all_token_bytes: Callable[[], Iterable[bytes]]) -> None:
        """`all_token_bytes` gives the bytes of every token."""
        self.core = core
        self._all_token_bytes = all_token_bytes

    @cached_property
    def sizes(self) -> TokenSizes:
        return TokenSizes(self._all_token_bytes(), normalizer_effect(self.core))

    @cached_property
    def cuts(self) -> SplitPoints | None:
        return find_split_points(self.core)

    def ids(self, text: str | bytes, limit: int | None = None, taken: int = 0) -> list[int]:
        """The ids of a text after `taken` others; ContextOverflow as soon as there must be more than `limit`."""
        if isinstance(text, str):
            self._check(text, limit, taken)  # before anything else reads a long text
        found: list[int] = []
        for piece in self._pieces(clean(text)):
            if len(piece) > 2 * PIECE_CHARS:
                self._check(piece, limit, taken + len(found))
            found += _encoded(self.core, piece)
            if limit is not None and taken + len(found) > limit:
                raise ContextOverflow(taken + len(found), limit, at_least=True)
        return found

    def _pieces(self, text: str) -> Iterator[str]:
        if len(text) <= 2 * PIECE_CHARS or self.cuts is None:
            return iter((text,) if text else ())
        return self.cuts.pieces(text)

    def _check(self, text: str, limit: int | None, taken: int) -> None:
        """Refuse a text by its length alone."""
        if limit is None or taken + len(text) <= limit:
            return
        tokens = taken + self.sizes.min_tokens(text, limit - taken)
        if tokens > limit:
            raise ContextOverflow(tokens, limit, at_least=True)


def clean(text: str | bytes) -> str:
    """`text` as a string that UTF-8 can write: invalid bytes and lone surrogates become U+FFFD."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    if not isinstance(text, str):
        raise InputError(f"text must be a string, not {type(text).__name__}")
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encoded(core: Core, text: str) -> list[int]:
    """Plain text to ids; other threads run meanwhile."""
    try:
        # The batch call lets go of the interpreter lock and keeps no offsets, unlike `encode`.
        ids: list[int] = core.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the regular expression engine is no Exception
        raise InputError(
            f"a text of {len(text)} characters cannot be tokenized ({error}); shorten its runs of white space"
        ) from error
    return ids
