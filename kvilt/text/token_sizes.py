"""How few tokens a text can have, from its length alone: a text that cannot fit is refused before it is tokenized.

A token holds at most so many letters, digits, blanks, signs and bytes beyond ASCII; a text of n letters therefore has
at least n divided by the most letters of any token. Knows a vocabulary's bytes; refuses to know merges and models.
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .assemble import ByteAlphabet
from .pipeline_steps import BLOCK, composes, steps, writes_blocks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

CHUNK_CHARS = 1 << 16  # a text is read in chunks, so that no call keeps the interpreter's lock for long
_UNKNOWN_BYTES = 1 << 10  # taken for the bytes of a token where no bound can be proved
# Composing letters and accents takes bytes away where two chunks meet: at most a few characters.
_SEAM_BYTES = 32

_CLASSES = (
    string.ascii_letters.encode(),
    string.digits.encode(),
    string.whitespace.encode(),
    string.punctuation.encode(),
    bytes(range(128, 256)),
)
_OTHERS = tuple(bytes(sorted(set(range(256)) - set(members))) for members in _CLASSES)


@dataclass(frozen=True, slots=True)
class NormalizerEffect:
    """What the normalizer does to a text before tokenizing, as far as it changes the bytes of tokens."""

    composes: bool = False  # letters and accents are composed (NFC)
    blocks: bool = False  # the lower block stands for a space (SentencePiece)
    lost: bytes = b""  # bytes that have no token and leave no trace
    exact: bool = True  # apart from that every byte of a text is a byte of a token


class TokenSizes:
    """The largest tokens of a vocabulary, and what they say about texts."""

    def __init__(self, all_token_bytes: Iterable[bytes], normalizer: NormalizerEffect) -> None:
        """`all_token_bytes` are the bytes of every token that a text can become."""
        self._normalizer = normalizer
        self._most = _largest(all_token_bytes) if normalizer.exact else (_UNKNOWN_BYTES,)  # of each class, and of all
        classes = (*_OTHERS, b"") if normalizer.exact else (b"",)
        self._skipped = tuple(others + normalizer.lost for others in classes)

    def min_tokens(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least; what lies after `enough` tokens is not looked at."""
        most = self._most
        counts = [0] * len(most)
        tokens = 0
        for start in range(0, len(text), CHUNK_CHARS):
            for i, count in enumerate(self._counts(text[start : start + CHUNK_CHARS])):
                counts[i] += count
                tokens = max(tokens, -(-counts[i] // most[i]))
            if tokens > enough:
                break
        return tokens

    def max_bytes(self, tokens: int) -> int:
        """The bytes that so many tokens can hold."""
        return tokens * self._most[-1]

    def _counts(self, chunk: str) -> list[int]:
        """Bytes of each class, and of all, that tokens of this chunk must hold."""
        normalizer = self._normalizer
        if normalizer.blocks:
            chunk = chunk.replace(BLOCK, " ")
        seam = 0
        if normalizer.composes and not chunk.isascii():
            chunk, seam = unicodedata.normalize("NFC", chunk), _SEAM_BYTES
        data = chunk.encode("utf-8", "ignore")  # lone surrogates become other characters, and are not counted
        return [max(0, len(data.translate(None, skipped)) - seam) for skipped in self._skipped]


def normalizer_effect(core: Core) -> NormalizerEffect:
    """What a pipeline does to a text; not `exact` where that is not known, or bytes can be lost."""
    normalizers, vocabulary = steps(core.normalizer), core.get_vocab()
    added = core.get_added_tokens_decoder().values()
    strips = any(not token.special and (token.lstrip or token.rstrip) for token in added)
    if any(step["type"] == "ByteLevel" for step in steps(core.pre_tokenizer)):
        lost = bytes(byte for char, byte in ByteAlphabet().byte_of.items() if char not in vocabulary)
        return NormalizerEffect(composes=bool(normalizers), lost=lost, exact=composes(normalizers) and not strips)
    known = writes_blocks(normalizers) or (not normalizers and _only_blocks(core))
    falls_back = core.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return NormalizerEffect(blocks=True, exact=known and falls_back and not strips)


def _only_blocks(core: Core) -> bool:
    """Whether the words of a pipeline are cut at spaces, for which it writes blocks."""
    splits = steps(core.pre_tokenizer)
    return bool(splits) and all(step["type"] == "Metaspace" and step["replacement"] == BLOCK for step in splits)


def _largest(all_token_bytes: Iterable[bytes]) -> tuple[int, ...]:
    """The most bytes of each class, and of all, in one token."""
    ordered = sorted(all_token_bytes, key=len, reverse=True)
    found = []
    for others in _OTHERS:
        most = 1
        for token in ordered:
            if len(token) <= most:
                break
            most = max(most, len(token.translate(None, others)))
        found.append(most)
    return (*found, max(1, len(ordered[0]) if ordered else 0))
