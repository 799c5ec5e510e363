"""A tokenizer.json as GGUF metadata: tokens, types, merges, and the name of the rule that cuts words.

Takes byte-level BPE. The result is built and compared with the original on a text full of edges before it is given out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError, Unsupported
from .pipeline_steps import steps
from .pretokenize import PRE_RULES, pre_tokenizer
from .tokenizer import Tokenizer, from_file, from_metadata
from .vocabulary import TokenType

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

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
    if data["model"]["type"] != "BPE" or not any(one["type"] == "ByteLevel" for one in steps(core.pre_tokenizer)):
        raise Unsupported("only byte-level BPE tokenizers can be written to GGUF yet; this one is of another kind")
    tokens, types = _tokens(data, rows)
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _rule_name(core, bool(data["model"].get("ignore_merges"))),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": bool(tokenizer.head),
        "tokenizer.ggml.add_eos_token": bool(tokenizer.tail),
        **_named_ids(tokenizer),
    }
    if tokenizer.chat_template is not None:
        values["tokenizer.chat_template"] = tokenizer.chat_template
    if from_metadata(values).encode(PROBE) != tokenizer.encode(PROBE):
        raise TokenizerError("the tokenizer cannot be written to GGUF: its tokens would be others")
    return values


def _named_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by the names that GGUF has for them; of tokens that end an answer it has three."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    found = {names[name]: tokenizer.special.get(text) for name, text in tokenizer.named.items() if name in names}
    found |= dict(zip(("eot", "eom"), [i for i in tokenizer.eos_ids if i != found.get("eos")], strict=False))
    return {f"tokenizer.ggml.{name}_token_id": token for name, token in found.items() if token is not None}


def _tokens(data: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Tokens in id order, as many as the embedding has rows, and their types."""
    known = {token: (i, TokenType.NORMAL) for token, i in data["model"]["vocab"].items()}
    for one in data.get("added_tokens", []):
        known[one["content"]] = (one["id"], TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED)
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
