"""Text to token ids and back, the same way whether the vocabulary came from GGUF or from tokenizer.json.

Refuses to know models and chats; special tokens in text given to `encode` are plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ContextOverflow, InputError, KviltError, TokenizerError
from .pipeline import Pipeline, clean
from .specials import SpecialTexts

_CACHED_TOKENS = 1 << 16  # whose bytes are kept: they are asked for once for each token that is drawn

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

    from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One vocabulary and its rules; immutable, so threads may share it."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]  # every token that ends a generation, the model's own eos first
    special: Mapping[str, int]  # control tokens by their text
    named: Mapping[str, str]  # bos_token, eos_token, ... as templates call them
    chat_template: str | None
    core: Pipeline = field(repr=False)  # cuts plain text; never yields a control token
    inner: Pipeline = field(repr=False)  # the same for text that follows a special token
    id_to_bytes: Callable[[int], bytes] = field(repr=False)
    lookup: Callable[[str], int | None] = field(repr=False)
    texts: SpecialTexts = field(repr=False)
    head: tuple[int, ...] = ()  # what add_special puts before
    tail: tuple[int, ...] = ()  # and after
    drops_space: bool = False  # the first space of a decoded text was added by encode
    _special_text: Mapping[int, str] = field(default_factory=dict, repr=False)

    def encode(
        self, text: str | bytes, add_special: bool = True, *, limit: int | None = None, taken: int = 0
    ) -> list[int]:
        """Ids of `text`, in which special tokens are plain text; broken UTF-8 becomes U+FFFD.

        More than `limit` ids, with `taken` before them, raise ContextOverflow: by the length alone where that shows it.
        """
        if not add_special:
            return self.core.ids(text, limit, taken)
        return [*self.head, *self.core.ids(text, limit, taken + len(self.head) + len(self.tail)), *self.tail]

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a text whose author may write special tokens, as a chat template does; adds none by itself."""
        return self.encode_parts(self.texts.split(clean(text)))

    def encode_parts(self, parts: Sequence[str | int], *, limit: int | None = None) -> list[int]:
        """Ids of plain texts and ready ids in turn; the texts hold no special tokens. `limit` as in `encode`."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend((self.inner if i else self.core).ids(part, limit, len(ids)))
        if limit is not None and len(ids) > limit:
            raise ContextOverflow(len(ids), limit)
        return ids

    def max_bytes(self, tokens: int) -> int:
        """The bytes that so many tokens can hold; a longer text is refused by its length."""
        return self.core.sizes.max_bytes(tokens)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        id_to_bytes = self.token_bytes if skip_special else self.shown_bytes
        text = b"".join(map(id_to_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self.drops_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; b"" for control tokens and for ids past the vocabulary."""
        if token_id < 0:
            raise InputError(f"{token_id} is no token id; ids start at 0")
        return b"" if token_id in self._special_text else self.id_to_bytes(token_id)

    def shown_bytes(self, token_id: int) -> bytes:
        """Like `token_bytes`, with control tokens written out."""
        text = self._special_text.get(token_id)
        return self.token_bytes(token_id) if text is None else text.encode()

    def id_of(self, token: str) -> int:
        """The id of a token by its text in the vocabulary."""
        found = self.special.get(token)
        if found is None:
            found = self.lookup(token)
        if found is None:
            raise InputError(f"{token!r} is no token of this vocabulary")
        return found


def make_tokenizer(core: Core, inner: Core, **parts: Any) -> Tokenizer:
    """A tokenizer from its parts, with the tables that follow from them."""
    special, id_to_bytes, size = parts["special"], parts["id_to_bytes"], parts["vocab_size"]

    def all_token_bytes() -> Iterable[bytes]:
        return map(id_to_bytes, range(size))

    parts["id_to_bytes"] = lru_cache(_CACHED_TOKENS)(id_to_bytes)
    parts["core"] = parts["inner"] = Pipeline(core, all_token_bytes)
    if inner is not core:
        parts["inner"] = Pipeline(inner, all_token_bytes)
    parts.setdefault("texts", SpecialTexts(special))
    return Tokenizer(**parts, _special_text={i: text for text, i in special.items()})


def from_file(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint: its folder, or the tokenizer.json inside it."""
    from .tokenizer_json import read_tokenizer_json

    return read_tokenizer_json(Path(path))


def from_gguf(path: Path | str) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    from ..weights.gguf import GGUFFile

    with GGUFFile.open(Path(path)) as file:
        return from_metadata(file.metadata)


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by GGUF metadata."""
    from .assemble import build_core, token_bytes_of
    from .pretokenize import rule_for
    from .vocabulary import TokenType, end_ids, read_vocabulary

    vocabulary = read_vocabulary(metadata)
    add_bos = vocabulary.add_bos
    if add_bos is None:
        add_bos = rule_for(vocabulary.pre).add_bos
    special = vocabulary.of_type(TokenType.CONTROL)
    core = _built(build_core, vocabulary)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return make_tokenizer(
        vocab_size=len(vocabulary.tokens),
        bos_id=vocabulary.bos_id,
        eos_ids=end_ids(special, vocabulary.eos_id, vocabulary.turn_ids, vocabulary.of_type(TokenType.USER_DEFINED)),
        special=special,
        named={name: vocabulary.tokens[i] for name, i in vocabulary.named.items()},
        chat_template=vocabulary.template,
        core=core,
        inner=core,
        id_to_bytes=token_bytes_of(vocabulary),
        lookup=ids.get,
        head=_wanted(add_bos, vocabulary.bos_id, "bos"),
        tail=_wanted(vocabulary.add_eos, vocabulary.eos_id, "eos"),
        drops_space=vocabulary.space_prefix,
    )


def _built(build: Callable[[Vocabulary], Core], vocabulary: Vocabulary) -> Core:
    try:
        return build(vocabulary)
    except KviltError:
        raise
    except Exception as error:  # the library raises plain Exception for any damage
        raise TokenizerError(f"no tokenizer can be built from this vocabulary: {error}") from error


def _wanted(add: bool, token_id: int | None, name: str) -> tuple[int, ...]:
    if not add:
        return ()
    if token_id is None:
        raise TokenizerError(f"tokenizer.ggml.add_{name}_token is true and the file names no {name} token")
    return (token_id,)
