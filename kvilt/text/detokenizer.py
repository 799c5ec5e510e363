"""Text from tokens as they come: only characters that are complete, each exactly once.

Knows a tokenizer's bytes; refuses to know stops, streams and requests.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection

from .tokenizer import Tokenizer


class Detokenizer:
    """One stream of ids; what `add` and `finish` return joins to `tokenizer.decode` of all ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        at_start: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        """With `at_start=False` the ids continue earlier text, so their first space is kept.

        `shown` are special tokens whose text is not skipped.
        """
        self._spell = tokenizer.token_bytes if skip_special else tokenizer.shown_bytes
        self._shown = {token_id: tokenizer.shown_bytes(token_id) for token_id in shown}
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.drops_space and at_start

    def add(self, token_id: int) -> str:
        """The text that is certain now; an unfinished character waits for its other bytes."""
        return self._first(self._decoder.decode(self._bytes(token_id)))

    def _bytes(self, token_id: int) -> bytes:
        return self._shown[token_id] if token_id in self._shown else self._spell(token_id)

    def finish(self) -> str:
        """What is left: U+FFFD for bytes whose character never came to its end."""
        text = self._first(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _first(self, text: str) -> str:
        """Take away the one space that encode put before the first word."""
        if text and self._drops_space:
            self._drops_space = False
            return text[1:] if text.startswith(" ") else text
        return text
