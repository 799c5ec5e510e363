"""From a checked vocabulary to a `tokenizers` pipeline: byte-level BPE, SentencePiece BPE, or Gemma 4's BPE.

Control tokens are left out of each, so no text can ever become one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from .pretokenize import pre_tokenizer, rule_for
from .vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

SPACE = "▁"  # how SentencePiece writes a space
_SPM_PIECE_CHARS = 1024  # longer pieces would make the search for merges quadratic
_SILENT = (TokenType.CONTROL, TokenType.UNUSED, TokenType.UNKNOWN, TokenType.UNDEFINED)


def build_core(vocabulary: Vocabulary) -> Core:
    """The pipeline that turns plain text into ids."""
    match vocabulary.kind:
        case "llama":
            return _blocks(vocabulary, merges_of(vocabulary.of_type(TokenType.NORMAL), vocabulary.scores))
        case "gemma4":
            return _listed_blocks(vocabulary)
        case _:
            return _byte_level(vocabulary)


def token_bytes_of(vocabulary: Vocabulary) -> Callable[[int], bytes]:
    """The function from an id to the exact bytes it stands for; tokens without text give b""."""
    tokens, types = vocabulary.tokens, vocabulary.types
    id_to_bytes = spm_bytes if vocabulary.writes_blocks else ByteAlphabet().decode

    def bytes_of(token_id: int) -> bytes:
        if token_id >= len(tokens):  # padding rows of an embedding have no text
            return b""
        kind = types[token_id]
        if kind in _SILENT:
            return b""
        if kind == TokenType.USER_DEFINED:  # written as it is; SentencePiece files may still spell spaces their way
            text = tokens[token_id]
            return _raw(text.replace(SPACE, " ") if vocabulary.writes_blocks else text)
        return id_to_bytes(tokens[token_id])

    return bytes_of


class ByteAlphabet:
    """The printable characters that stand for the 256 bytes in byte-level vocabularies."""

    def __init__(self) -> None:
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(plain)]
        shown = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        self.byte_of: Mapping[str, int] = {char: byte for byte, char in shown.items()}

    def decode(self, token: str) -> bytes:
        """The bytes of a token; one that is not written in the alphabet stands for its own text."""
        try:
            return bytes([self.byte_of[char] for char in token])
        except KeyError:
            return _raw(token)


def _raw(text: str) -> bytes:
    """The UTF-8 bytes of a text; bytes of the file that were invalid UTF-8 come out unchanged."""
    return text.encode("utf-8", "surrogateescape")


def spm_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece piece: `<0x0A>` is one byte, U+2581 is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _raw(token.replace(SPACE, " "))


def _byte_level(vocabulary: Vocabulary) -> Core:
    from tokenizers import Tokenizer as Core
    from tokenizers import normalizers
    from tokenizers.models import BPE

    rule = rule_for(vocabulary.pre)
    words = vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
    pairs = _pairs(vocabulary.merges)
    try:
        model = BPE(words, pairs, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise _misfit(error) from error
    core = Core(model)
    core.pre_tokenizer = pre_tokenizer(rule)
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    _add_user_defined(core, vocabulary.of_type(TokenType.USER_DEFINED))
    return core


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    try:
        return [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    except ValueError:
        raise TokenizerError(
            "tokenizer.ggml.merges holds an entry that is not two tokens with one space between"
        ) from None


def _misfit(error: Exception) -> TokenizerError:
    return TokenizerError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}")


def _listed_blocks(vocabulary: Vocabulary) -> Core:
    """Merges that the file lists, over characters: lines and words are not cut before."""
    try:
        return _blocks(vocabulary, _pairs(vocabulary.merges))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception for a merge outside the vocabulary
        raise _misfit(error) from error


def _blocks(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Core:
    """BPE over characters in which a block stands for a space, and bytes stand for characters without a token."""
    from tokenizers import Tokenizer as Core
    from tokenizers import normalizers
    from tokenizers.models import BPE

    words = vocabulary.of_type(TokenType.NORMAL, TokenType.BYTE)
    unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN).items()), None) or _unknown(vocabulary)
    words |= dict([unknown]) if unknown else {}
    # Without a space prefix user-defined tokens are found where SentencePiece finds them, in text whose spaces are
    # blocks; the prefix would be put before each of them too, so then they are found in the text as it was given.
    spaces = (SPACE, " ") if vocabulary.space_prefix else (" ", SPACE)
    defined = {token.replace(*spaces): i for token, i in vocabulary.of_type(TokenType.USER_DEFINED).items()}
    model = BPE(words | defined, merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True)
    core = Core(model)
    blocks = normalizers.Replace(" ", SPACE)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blocks]) if vocabulary.space_prefix else blocks
    _add_user_defined(core, defined, normalized=not vocabulary.space_prefix)
    return core


def _unknown(vocabulary: Vocabulary) -> tuple[str, int] | None:
    """The unknown token by its id, for files that mark it as a control token."""
    token_id = vocabulary.named.get("unk_token")
    return None if token_id is None else (vocabulary.tokens[token_id], token_id)


def merges_of(pieces: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others, best score first: SentencePiece's order as a list of merges."""
    found: list[tuple[float, str, str]] = []
    for piece, token_id in pieces.items():
        if len(piece) > _SPM_PIECE_CHARS:
            raise TokenizerError(f"tokenizer.ggml.tokens holds a piece of more than {_SPM_PIECE_CHARS} characters")
        for cut in range(1, len(piece)):
            # Slicing once and testing the left part first halves the work: most prefixes are no pieces.
            if piece[:cut] in pieces and piece[cut:] in pieces:
                found.append((-scores[token_id], piece[:cut], piece[cut:]))  # noqa: PERF401
    found.sort(key=lambda merge: merge[0])  # stable: the ways to make one piece stay together
    return [(left, right) for _, left, right in found]


def _add_user_defined(core: Core, tokens: Mapping[str, int], *, normalized: bool = False) -> None:
    """Tokens that are found in text before anything else; their ids are already in the model."""
    from tokenizers import AddedToken

    core.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in tokens])
