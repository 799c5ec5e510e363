"""The vocabulary inside GGUF metadata, checked field by field before anything is built from it.

Refuses to know text: it says which tokens there are, not how text becomes tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from ..errors import TokenizerError

MAX_TOKENS = 1 << 23
MAX_TOKEN_CHARS = 1 << 14
_PREFIX = "tokenizer.ggml."
_KINDS = {"gpt2": "BPE", "llama": "SentencePiece", "gemma4": "BPE with SentencePiece's spaces"}
_ESCAPED = re.compile("[\ud800-\udfff]")  # bytes that were no UTF-8, as the file's reader keeps them
# Texts that end a turn or a document where they are tokens of their own.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<EOT>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|tool_response>",  # Gemma 4 waits there for the result of its calls
)


class TokenType(IntEnum):
    """What GGUF says about a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in id order, with what the file says about each and about the whole."""

    kind: str  # "gpt2" (byte-level BPE), "llama" (SentencePiece BPE) or "gemma4" (its spelling, with merges in a list)
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]  # of SentencePiece; empty where merges are listed
    merges: list[str]  # empty for SentencePiece
    bos_id: int | None
    eos_id: int | None
    turn_ids: tuple[int, ...]  # eot and eom, where the file names them
    named: Mapping[str, int]  # bos_token, eos_token, ... as templates call them
    add_bos: bool | None  # None: the file does not say
    add_eos: bool
    space_prefix: bool
    template: str | None

    @property
    def writes_blocks(self) -> bool:
        """Whether U+2581 stands for a space in tokens, and `<0x0A>` for a byte, as in SentencePiece."""
        return self.kind != "gpt2"

    def of_type(self, *types: TokenType) -> dict[str, int]:
        """Text to id of the tokens of these types, in id order."""
        wanted = set(types)
        found = {
            token: i for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind in wanted
        }
        if _ESCAPED.search("".join(found)) is None:
            return found
        # A token that is no UTF-8 has bytes to show and no text to be found by.
        return {token: i for token, i in found.items() if _ESCAPED.search(token) is None}


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Check the `tokenizer.*` fields of GGUF metadata; damage raises TokenizerError naming the field."""
    kind = _kind(metadata)
    spm = kind == "llama"
    tokens = _tokens(metadata)
    size = len(tokens)
    ids = {name: _id(metadata, name, size) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    if spm:  # what SentencePiece models use when the file does not say
        ids = {**ids, **{name: i for name, i in (("bos", 1), ("eos", 2)) if ids[name] is None and i < size}}
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError("tokenizer.chat_template is not a string")
    return Vocabulary(
        kind=kind,
        pre=_typed(metadata, "pre", str, "default"),
        tokens=tokens,
        types=_types(metadata, size),
        scores=_scores(metadata, size) if spm else [],
        merges=[] if spm else _merges(metadata),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        turn_ids=tuple(i for i in (ids["eot"], ids["eom"]) if i is not None),
        named=_named(ids),
        add_bos=_typed(metadata, "add_bos_token", bool, None if kind == "gpt2" else True),
        add_eos=_typed(metadata, "add_eos_token", bool, False),
        space_prefix=_typed(metadata, "add_space_prefix", bool, spm) if spm else False,
        template=template,
    )


def _kind(metadata: Mapping[str, Any]) -> str:
    kind = _typed(metadata, "model", str, None)
    if kind not in _KINDS:
        known = ", ".join(f"{name!r} ({what})" for name, what in _KINDS.items())
        raise TokenizerError(f"tokenizer.ggml.model is {kind!r}; kvilt reads {known}")
    # Files of either model name call this kind by its pre-tokenizer.
    return "gemma4" if kind == "gpt2" and metadata.get(_PREFIX + "pre") == "gemma4" else kind


def end_ids(
    special: Mapping[str, int],
    eos_id: int | None,
    named: tuple[int, ...] = (),
    user_defined: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Every token that ends a generation: the model's eos first, then those whose text says so.

    Some files call such tokens user-defined. `</s>` is one of HTML's tags then, in Gemma's vocabulary for example.
    """
    tokens = {**{text: token for text, token in user_defined.items() if text != "</s>"}, **special}
    texts = [text for text in _ENDS if text in tokens]
    if "<|return|>" in texts and "<|end|>" in texts:
        texts.remove("<|end|>")  # there `<|end|>` closes a part of an answer, and `<|return|>` the answer
    found = [eos_id] if eos_id is not None else []
    return tuple(dict.fromkeys([*found, *named, *(tokens[text] for text in texts)]))


def _typed(metadata: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = metadata.get(_PREFIX + name, default)
    if value is None and default is None and kind is not str:
        return None
    if not isinstance(value, kind):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise TokenizerError(f"{_PREFIX}{name} is {found}; it should be a {kind.__name__}")
    return value


def _array(metadata: Mapping[str, Any], name: str) -> list[Any] | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if hasattr(value, "tolist"):  # a numpy array
        value = value.tolist()
    if not isinstance(value, list):
        raise TokenizerError(f"{_PREFIX}{name} is not an array")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _array(metadata, "tokens")
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is missing or empty; the file holds no vocabulary")
    if len(tokens) > MAX_TOKENS:
        raise TokenizerError(f"tokenizer.ggml.tokens has {len(tokens)} entries and kvilt takes at most {MAX_TOKENS}")
    if set(map(type, tokens)) != {str}:
        raise TokenizerError("tokenizer.ggml.tokens holds something other than strings")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise TokenizerError(f"tokenizer.ggml.tokens holds a token of more than {MAX_TOKEN_CHARS} characters")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("tokenizer.ggml.tokens holds the same token twice")
    return tokens


def _types(metadata: Mapping[str, Any], size: int) -> list[int]:
    types = _array(metadata, "token_type")
    if types is None:
        return [int(TokenType.NORMAL)] * size
    if len(types) != size:
        raise TokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {size} tokens")
    unknown = set(types) - {int(kind) for kind in TokenType}
    if unknown:
        raise TokenizerError(f"tokenizer.ggml.token_type holds the unknown type {unknown.pop()!r}")
    return types


def _scores(metadata: Mapping[str, Any], size: int) -> list[float]:
    scores = _array(metadata, "scores")
    if scores is None or len(scores) != size:
        found = "no" if scores is None else len(scores)
        raise TokenizerError(f"tokenizer.ggml.scores has {found} entries for {size} tokens")
    if not set(map(type, scores)) <= {float, int} or any(score != score for score in scores):
        raise TokenizerError("tokenizer.ggml.scores holds something that is not a number")
    return scores


def _merges(metadata: Mapping[str, Any]) -> list[str]:
    merges = _array(metadata, "merges")
    if merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing; byte-level BPE cannot work without it")
    if merges and set(map(type, merges)) != {str}:
        raise TokenizerError("tokenizer.ggml.merges holds something other than strings")
    return merges


def _id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    field = f"{_PREFIX}{name}_token_id"
    value = metadata.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise TokenizerError(f"{field} is {value!r}, which is no id in a vocabulary of {size}")
    return value


def _named(ids: Mapping[str, int | None]) -> dict[str, int]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {names[key]: i for key, i in ids.items() if key in names and i is not None}
