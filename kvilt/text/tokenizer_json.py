"""Hugging Face tokenizer.json with the small files beside it, read into a Tokenizer.

Takes BPE models that write bytes (byte-level or with byte fallback) and refuses others by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .assemble import ByteAlphabet, spm_bytes
from .specials import SpecialTexts, StripRule
from .tokenizer import Tokenizer, make_tokenizer
from .vocabulary import end_ids

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Core

_MAX_SIDE_FILE_BYTES = 16 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read tokenizer.json (or the folder that holds it); damage raises TokenizerError naming the file."""
    file = path / "tokenizer.json" if path.is_dir() else path
    core = _open(file)
    config = {**_side_file(file, "special_tokens_map.json"), **_side_file(file, "tokenizer_config.json")}
    added: dict[int, AddedToken] = core.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    named = {name: text for name in _NAMED if (text := _text(config.get(name))) is not None}
    bos_id, eos_id = (core.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    head, tail = _frame(core, config, bos_id, eos_id)
    core = _without_specials(core, special)
    decoder = _state(core.decoder)
    return make_tokenizer(
        vocab_size=max([core.get_vocab_size(), *(i + 1 for i in added)]),
        bos_id=bos_id,
        eos_ids=end_ids(special, eos_id, _generation_ends(file)),
        special=special,
        named=named,
        chat_template=_template(file, config),
        core=core,
        inner=_inner(core),
        id_to_bytes=_id_to_bytes(core, decoder, added),
        lookup=core.token_to_id,
        texts=SpecialTexts(special, {token.content: StripRule(token.lstrip, token.rstrip) for token in added.values()}),
        head=head,
        tail=tail,
        drops_space=_drops_space(decoder),
    )


def _open(file: Path) -> Core:
    from tokenizers import Tokenizer as Core

    if not file.is_file():
        raise TokenizerError(f"there is no file {file.name} in {file.parent.name or 'that folder'}")
    try:
        core = Core.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for any damage
        raise TokenizerError(f"{file.name} is damaged or of another kind: {error}") from error
    if type(core.model).__name__ != "BPE":
        raise TokenizerError(f"{file.name} holds a {type(core.model).__name__} model; kvilt reads BPE")
    core.no_padding()
    core.no_truncation()
    core.encode_special_tokens = True
    return core


def _side_file(file: Path, name: str) -> dict[str, Any]:
    path = file.with_name(name)
    if not path.is_file():
        return {}
    if path.stat().st_size > _MAX_SIDE_FILE_BYTES:
        raise TokenizerError(f"{name} is larger than {_MAX_SIDE_FILE_BYTES} bytes")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{name} should hold a JSON object")
    return data


def _text(value: Any) -> str | None:
    """A token's text, written plainly or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(file: Path, config: Mapping[str, Any]) -> str | None:
    beside = file.with_name("chat_template.jinja")
    if beside.is_file():
        if beside.stat().st_size > _MAX_SIDE_FILE_BYTES:
            raise TokenizerError(f"{beside.name} is larger than {_MAX_SIDE_FILE_BYTES} bytes")
        return beside.read_text(encoding="utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name; the one called default is the chat
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _generation_ends(file: Path) -> tuple[int, ...]:
    found = _side_file(file, "generation_config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)


def _frame(
    core: Core, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before and after a text: as the post-processor says, unless the config overrides it."""
    bare = core.encode("a", add_special_tokens=False).ids
    full = core.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    head, tail = tuple(full[:at]), tuple(full[at + len(bare) :])
    return (
        _override(head, config.get("add_bos_token"), bos_id, "bos_token"),
        _override(tail, config.get("add_eos_token"), eos_id, "eos_token"),
    )


def _override(found: tuple[int, ...], add: Any, token_id: int | None, name: str) -> tuple[int, ...]:
    if not isinstance(add, bool):
        return found
    if add and token_id is None:
        raise TokenizerError(f"tokenizer_config.json adds a {name} and names none in the vocabulary")
    return (token_id,) if add and token_id is not None else ()


def _without_specials(core: Core, special: Mapping[str, int]) -> Core:
    """The same pipeline, made unable to spell a special token by merges where it could."""
    from tokenizers import Tokenizer as Core

    probes = [probe for text in special for probe in (text, f"a{text}a", f" {text} ")]
    ids = set(special.values())
    found = core.encode_batch_fast(probes, add_special_tokens=False)
    if all(ids.isdisjoint(encoding.ids) for encoding in found):
        return core
    data = json.loads(core.to_str())
    model = data["model"]
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in special}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
    model["merges"] = [pair for pair in pairs if not any(text in special for text in (*pair, "".join(pair)))]
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["special"]]
    data["post_processor"] = None  # it may name the special tokens
    return Core.from_str(json.dumps(data))


def _state(part: Any) -> dict[str, Any]:
    """A pipeline part as the JSON it stands for."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _inner(core: Core) -> Core:
    """The pipeline for text that does not start a document: a space prefix meant for the first word is left out."""
    from tokenizers import Tokenizer as Core

    if _state(core.pre_tokenizer) and '"prepend_scheme":"first"' in json.dumps(
        _state(core.pre_tokenizer), separators=(",", ":")
    ):
        inner = Core.from_str(core.to_str().replace('"prepend_scheme":"first"', '"prepend_scheme":"never"'))
        inner.encode_special_tokens = True
        return inner
    return core


def _id_to_bytes(core: Core, decoder: Mapping[str, Any], added: Mapping[int, AddedToken]) -> Callable[[int], bytes]:
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        spell = ByteAlphabet().decode
    elif {"ByteFallback", "Metaspace"} & kinds:
        spell = spm_bytes
    else:
        raise TokenizerError(
            f"tokenizer.json decodes by {sorted(kinds) or 'nothing'}; kvilt reads byte-level BPE and SPM"
        )
    texts = {i: token.content.encode() for i, token in added.items()}

    def bytes_of(token_id: int) -> bytes:
        if token_id in texts:
            return texts[token_id]
        token = core.id_to_token(token_id)
        return b"" if token is None else spell(token)

    return bytes_of


def _kinds(decoder: Mapping[str, Any]) -> set[str]:
    inside = decoder.get("decoders", ())
    return {str(decoder.get("type"))} - {"Sequence", "None"} | {str(part.get("type")) for part in inside}


def _drops_space(decoder: Mapping[str, Any]) -> bool:
    parts = decoder.get("decoders") or [decoder]
    strips = any(part.get("type") == "Strip" and part.get("start", 0) > 0 for part in parts)
    joined = any(part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts)
    return strips or joined
