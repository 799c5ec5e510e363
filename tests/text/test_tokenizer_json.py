"""tokenizer.json and the files beside it, against transformers reading the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvilt.errors import TokenizerError
from kvilt.text.assemble import merges_of
from kvilt.text.tokenizer import from_file
from tests.text.samples import TEXTS


@pytest.fixture(scope="session")
def byte_level_folder(smollm2_oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face folder, written by transformers."""
    folder = tmp_path_factory.mktemp("byte_level")
    smollm2_oracle.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    return folder


def spm_folder(folder: Path, metadata: dict[str, Any], prepend: str) -> Path:
    """A SentencePiece model as Hugging Face converts it: `prepend` is legacy (every text) or first."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Core

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = merges_of(vocab, metadata["tokenizer.ggml.scores"])  # control pieces included, as some files have it
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    for token, kind in zip(tokens, types, strict=True):
        if kind in (2, 3, 4):
            core.add_tokens([AddedToken(token, special=kind != 4, normalized=False)])
    core.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>"}
    config = {"bos_token": "<s>", "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_byte_level_folder_equals_transformers(byte_level_folder: Path, smollm2_oracle: Any) -> None:
    tokenizer = from_file(byte_level_folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == smollm2_oracle.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 5, 0)
    assert tokenizer.special["<|im_end|>"] == tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.chat_template == smollm2_oracle.chat_template
    assert tokenizer.named["eos_token"] == "<|im_end|>"
    assert not set(tokenizer.encode("<|im_end|>a<|im_start|>")) & set(tokenizer.special.values())
    assert tokenizer.encode_with_specials("x<|im_end|>y") == smollm2_oracle.encode("x<|im_end|>y")


@pytest.mark.parametrize("prepend", ["legacy", "first"])
def test_spm_folder_equals_transformers(small_spm: tuple[Any, dict[str, Any]], tmp_path: Path, prepend: str) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = from_file(spm_folder(tmp_path, small_spm[1], prepend) / "tokenizer.json")
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        if prepend == "legacy":  # the other scheme takes a leading space of the text for its own
            assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special=False) == oracle.decode(ids, clean_up_tokenization_spaces=False)
    marked = "hello<|turn|>hello there</s> the"
    assert tokenizer.encode_with_specials(marked) == oracle.encode(marked, add_special_tokens=False)
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2,)


def test_special_tokens_that_merges_could_spell_stay_plain(
    small_spm: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """Some published files have merges that lead to a control token; text must not take that way."""
    metadata = {key: list(value) if isinstance(value, list) else value for key, value in small_spm[1].items()}
    metadata["tokenizer.ggml.tokens"] += ["<s", "</s", "s>"]
    metadata["tokenizer.ggml.scores"] += [0.5, 0.5, -100.0]
    metadata["tokenizer.ggml.token_type"] += [1, 1, 1]
    tokenizer = from_file(spm_folder(tmp_path, metadata, "legacy"))
    for text in ("<s>", "a<s>b", "</s></s>", "x </s> y"):
        ids = tokenizer.encode(text, add_special=False)
        assert not {1, 2} & set(ids)
        assert tokenizer.decode(ids) == text


def test_the_config_beside_it_decides_about_bos(small_spm: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    spm_folder(tmp_path, small_spm[1], "legacy")
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = from_file(tmp_path).encode("hello")
    assert ids[0] != 1
    assert ids[-1] == 2


def test_a_template_file_wins_over_the_config(byte_level_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level_folder / name).read_bytes())
    named = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert from_file(tmp_path).chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert from_file(tmp_path).chat_template == "from the file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"version": "1.0", "model": {"type": "BPE"}}', "damaged"),
        ('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}', "WordLevel"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "decodes by"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=message):
        from_file(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_damaged_side_files_are_refused(byte_level_folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((byte_level_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        from_file(tmp_path)
