"""A tokenizer.json as GGUF metadata: tokens, types, merges or scores, and the name of the rule that cuts words.

Takes byte-level BPE, and SentencePiece's BPE as transformers writes it. The result is built and compared with the
original on a text full of edges before it is given out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError, Unsupported
from .pipeline_steps import steps
from .pretokenize import PRE_RULES, pre_tokenizer
from .tokenizer import Tokenizer, from_file, from_metadata
from .vocabulary import TokenType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Where rules differ: digits, contractions, case, accents apart from their letters, scripts, signs, slashes and blanks.
PROBE = (
    "Hello World! I'll DON'T they'Re 1 22 333 4444 12345678 x86_64 CamelCase HTTPServer iPhone\n\n  two  spaces\t tab\r"
    '\n\n/* code */ a/b//c != d;; "q" (é e\u0301 n\u0303) 漢字かな交じり文 한국어 Привет мир עברית العربية ไทย 😀👍🏽 '
    "£5 €6.50 $7 ~^`|<>=+ end.  \n \n last\u00a0word\u3000x…—«ok» ½ ² Ⅷ __init__ [1,2,3] 1.5e-3 http://a.b/c?d=e&f#g   "
)


def gguf_vocabulary(folder: Path, rows: int) -> dict[str, Any]:
    """The metadata of the tokenizer in `folder`, for an embedding of so many rows."""
    from tokenizers import Tokenizer as Core

    tokenizer, path = from_file(folder), folder / "tokenizer.json"
    data, core = json.loads(path.read_text()), Core.from_file(str(path))
    tokens, types = _tokens(data, rows)
    values: dict[str, Any] = {
        **_model(data, core, tokens),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": bool(tokenizer.head),
        "tokenizer.ggml.add_eos_token": bool(tokenizer.tail),
        **_named_ids(tokenizer),
    }
    if tokenizer.chat_template is not None:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    if from_metadata(values).encode(PROBE) != tokenizer.encode(PROBE):
        raise TokenizerError("the tokenizer cannot be written to GGUF: its tokens would be others")
    return values


def _model(data: dict[str, Any], core: Core, tokens: list[str]) -> dict[str, Any]:
    """How text becomes tokens."""
    model = data["model"]
    if model["type"] == "BPE" and any(one["type"] == "ByteLevel" for one in steps(core.pre_tokenizer)):
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _rule_name(core, bool(model.get("ignore_merges"))),
            "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
        }
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(model["merges"], tokens),
            "tokenizer.ggml.add_space_prefix": _prefixes_space(core),
        }
    raise Unsupported(
        "only byte-level BPE tokenizers and SentencePiece's BPE can be written to GGUF; this one is of another kind"
    )


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """SentencePiece merges the pair whose token has the highest score: earlier merges have higher ones."""
    ranks: dict[str, int] = {}
    for rank, one in enumerate(merges):
        left, right = one.split(" ") if isinstance(one, str) else one
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _prefixes_space(core: Core) -> bool:
    """Whether a text begins with a space that it does not have."""
    prepends = any(one["type"] == "Prepend" for one in steps(core.normalizer))
    spaced = [one for one in steps(core.pre_tokenizer) if one["type"] == "Metaspace"]
    return prepends or any(one.get("prepend_scheme", "always") != "never" for one in spaced)


def _named_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the names that GGUF has for them; of tokens that end an answer it has three."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    found = {names[name]: tokenizer.special.get(text) for name, text in tokenizer.named.items() if name in names}
    found |= dict(zip(("eot", "eom"), [i for i in tokenizer.eos_ids if i != found.get("eos")], strict=False))
    return {f"tokenizer.ggml.{name}_token_id": token for name, token in found.items() if token is not None}


def _tokens(data: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Tokens in id order, as many as the embedding has rows, and their types."""
    fallback, unknown = data["model"].get("byte_fallback"), data["model"].get("unk_token")
    known = {
        token: (i, TokenType.BYTE if fallback and _BYTE.fullmatch(token) else TokenType.NORMAL)
        for token, i in data["model"]["vocab"].items()
    }
    for one in data.get("added_tokens", []):
        kind = TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED
        known[one["content"]] = (one["id"], TokenType.UNKNOWN if fallback and one["content"] == unknown else kind)
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [int(TokenType.UNUSED)] * rows
    for token, (i, kind) in known.items():
        if not 0 <= i < rows:
            raise TokenizerError(f"the token {token!r} has the id {i}, and the embedding has {rows} rows")
        tokens[i], types[i] = token, int(kind)
    return tokens, types


def _rule_name(core: Core, ignore_merges: bool) -> str:
    """The first known rule that cuts the probe as this tokenizer does."""
    nfc = any(one["type"] == "NFC" for one in steps(core.normalizer))
    wanted = [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(PROBE)]
    for name, rule in PRE_RULES.items():
        if (rule.nfc, rule.ignore_merges) == (nfc, ignore_merges):
            found = pre_tokenizer(rule).pre_tokenize_str(PROBE)
            if [piece for piece, _ in found] == wanted:
                return name
    raise Unsupported("the tokenizer cuts words in a way that no tokenizer.ggml.pre names, so GGUF cannot hold it")
