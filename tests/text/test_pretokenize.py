"""Every pre-tokenizer of GGUF files against the published tokenizers, rebuilt here with the same vocabulary."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples, some
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import TokenizerError
from kvilt.text.pretokenize import PRE_RULES, rule_for
from kvilt.text.tokenizer import Tokenizer, from_file, from_metadata
from tests.text.samples import TEXTS

PIECES = [
    *("é", "e\u0301", "ñ", "n\u0303", "\u0301", "가", "\u1100\u1161", "Å", "A\u030a", "ﬁ", "ς", "ǅ", "नि", "ก็"),
    *("👩‍👩‍👧", "🏳️‍🌈", "👍🏽", "😀", "中文", "漢", "カタ", "ひら", "안녕", "、", "。", "々"),
    *("1", "12", "1234567", "٣٤", "²", "Ⅷ", "½", "3.14", "1,000"),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", " \n ", "\n  "),
    *("'s", "'T", "'re", "'LL", "'", "’s", "don't", "I'M"),
    *("a", "B", "fooBar", "HTTPServer", "snake_case", "ß", "if(x==1){", "!!", "//", "<|end|>", "...", "$+=", "-"),
]
fuzzed = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=24)

I = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # noqa: E741 - the tables below repeat it
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
UP_K, LOW_K = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
OTHER = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {  # as tokenizer.json files write them
    "llama-bpe": rf"{I}|{OTHER}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}",
    "qwen2": rf"{I}|{OTHER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}",
    "qwen35": rf"{I}|{OTHER}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{TAIL}",
    "tekken": rf"{OTHER}{UP}*{LOW}+|{OTHER}{UP}+{LOW}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}",
    "gpt-4o": rf"{OTHER}{UP}*{LOW}+{I}?|{OTHER}{UP}+{LOW}*{I}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}",
    "kimi-k2": rf"[\p{{Han}}]+|{OTHER}{UP_K}*{LOW_K}+{I}?|{OTHER}{UP_K}+{LOW_K}*{I}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}",
}
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
LIKE = {  # other names of one published pattern
    "llama-bpe": "llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral dbrx smaug-bpe glm4 chatglm-bpe",
    "gpt-4o": "llama4",
    "gpt-2": "olmo",
    "smollm": "starcoder refact command-r",
}
NAMES = [*PATTERNS, "gpt-2", "smollm", "deepseek-v3", "deepseek-llm", "deepseek-coder"]
NAMES += [name for names in LIKE.values() for name in names.split()]
NFC = {"qwen2", "olmo", "command-r"}


def chain(name: str) -> Any:
    """The pre-tokenizer of the published tokenizer that a name stands for."""
    from tokenizers import Regex, pre_tokenizers

    name = next((first for first, others in LIKE.items() if name in others.split()), name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    match name:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "deepseek-v3":
            splits: tuple[str, ...] = DEEPSEEK_V3
        case "deepseek-llm" | "deepseek-coder":
            splits = rule_for(name).splits[:-1]  # a page of letters; the digits alone are written another way
        case _:
            splits = (PATTERNS[name],)
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    cuts += [digits] if name.startswith("deepseek-") and name != "deepseek-v3" else []
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Merges learned from these texts without any cut, so that a wrong cut shows in the ids."""
    import json

    from tokenizers import Tokenizer as Core
    from tokenizers import models, pre_tokenizers, trainers

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    corpus = [*TEXTS, *(f"{a}{b}" for a in PIECES for b in PIECES)]
    core.train_from_iterator(corpus, trainer)
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@pytest.fixture(scope="module")
def pairs(trained: Any) -> Callable[[str], tuple[Tokenizer, Any]]:
    """kvilt's tokenizer and the oracle of a name, each made once."""
    from functools import cache

    from tokenizers import Tokenizer as Core
    from tokenizers import models, normalizers

    vocab, merges = trained

    @cache
    def made(name: str) -> tuple[Tokenizer, Any]:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.add_bos_token": False,
        }
        oracle = Core(models.BPE(vocab, merges, ignore_merges=rule_for(name).ignore_merges))
        oracle.pre_tokenizer = chain(name)
        if name in NFC:
            oracle.normalizer = normalizers.NFC()
        return from_metadata(metadata), oracle

    return made


@pytest.mark.parametrize("name", some(NAMES, keep=11))
def test_ids_equal_the_published_pipeline(pairs: Any, name: str) -> None:
    tokenizer, oracle = pairs(name)
    assert rule_for(name).nfc == (name in NFC)

    @settings(max_examples=examples(150))
    @given(text=fuzzed)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == (unicodedata.normalize("NFC", text) if name in NFC else text)

    check()
    for text in TEXTS:
        assert tokenizer.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text


def test_qwen2_composes_accents_and_qwen35_keeps_them_apart(pairs: Any) -> None:
    composed, decomposed = "é Å 가", "e\u0301 A\u030a \u1100\u1161"
    qwen2, _ = pairs("qwen2")
    assert qwen2.encode(composed) == qwen2.encode(decomposed)
    qwen35, _ = pairs("qwen35")
    assert qwen35.encode(composed) != qwen35.encode(decomposed)
    assert qwen35.decode(qwen35.encode(decomposed)) == decomposed


@pytest.mark.parametrize("composes", [True, False])
def test_a_tokenizer_json_composes_accents_only_where_it_says_so(pairs: Any, tmp_path: Path, composes: bool) -> None:
    """Its normalizer decides; the splits of Qwen 3.5 alone say nothing."""
    from tokenizers import decoders, normalizers

    core, (composed, decomposed) = copy.deepcopy(pairs("qwen35")[1]), ("é Å 가", "e\u0301 A\u030a \u1100\u1161")
    if composes:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = from_file(tmp_path)
    assert (tokenizer.encode(composed) == tokenizer.encode(decomposed)) is composes
    for text in (composed, decomposed):
        assert tokenizer.encode(text) == core.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
def test_cohere_and_gpt_neox_compose_as_transformers_does(trained: Any) -> None:
    """These two published classes say that `command-r` and `olmo` (GPT-NeoX's vocabulary) normalise."""
    from transformers import CohereTokenizerFast, GPTNeoXTokenizerFast

    for name in (CohereTokenizerFast, GPTNeoXTokenizerFast):
        oracle = name(vocab=dict(trained[0]), merges=list(trained[1]))
        assert oracle.backend_tokenizer.normalizer.normalize_str("e\u0301") == "é"


@pytest.mark.parametrize(("name", "nearest"), [("qwen3.5", "qwen35"), ("lama-bpe", "llama-bpe"), ("gpt4o", "gpt-4o")])
def test_an_unknown_name_is_refused_in_one_sentence_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TokenizerError, match=rf"'{name}'.*nearest it knows is '{nearest}'") as refused:
        rule_for(name)
    assert ". " not in str(refused.value).replace("3. ", "")
    assert all(known in str(refused.value) for known in PRE_RULES)


@pytest.fixture(scope="module")
def gemma4() -> tuple[Tokenizer, Any]:
    """A vocabulary of characters with blocks for spaces and byte tokens; the oracle is Gemma's class."""
    from transformers import GemmaTokenizerFast

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    head = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool_call>", "<turn|>", "<|tool_response>"]
    letters = sorted(set("▁abcdehlorstw\n,.éñ中123"))
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("▁", "▁"), ("▁▁", "▁▁"), ("l", "l"), ("h", "e")]
    merges += [("he", "ll"), ("hell", "o"), ("▁", "hello"), ("o", "r"), ("▁", "w"), ("▁w", "or"), ("t", "h")]
    merges += [("▁", "th"), ("e", "▁th"), ("1", "2"), ("12", "3")]
    tokens = [*head, *bytes_, *letters, *("".join(pair) for pair in merges)]
    types = [3, 3, 3, 2, 3, 4, 3, 4, *[6] * 256, *[1] * (len(letters) + len(merges))]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    oracle = GemmaTokenizerFast(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    return from_metadata(metadata), oracle.backend_tokenizer


@settings(max_examples=examples(300))
@given(
    text=st.lists(st.sampled_from([*"helo wrt\n12é中e\u0301😀▁", "  ", "the ", " th", "\n\n\n"]), max_size=24).map(
        "".join
    )
)
def test_gemma4_equals_gemma_of_transformers(gemma4: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, oracle = gemma4
    ids = tokenizer.encode(text, add_special=False)
    assert ids == oracle.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert tokenizer.encode(text) == [2, *ids]


def test_the_facts_of_gemma4(gemma4: tuple[Tokenizer, Any]) -> None:
    tokenizer, _ = gemma4
    assert tokenizer.eos_ids == (1, 6, 7)  # its eos, the end of a turn, and where it waits for a tool
    assert tokenizer.encode("a<|tool_call>", add_special=False)[-1] == 5
    assert 6 not in tokenizer.encode("<turn|>")
    assert tokenizer.token_bytes(tokenizer.id_of("<0xFF>")) == b"\xff"


def test_gemma4_is_known_by_its_pre_tokenizer_too_and_refuses_damage() -> None:
    tokens = ["<bos>", "a", "b", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert from_metadata(metadata).encode("ab") == [0, 3]
    with pytest.raises(TokenizerError, match="does not fit"):
        from_metadata({**metadata, "tokenizer.ggml.merges": ["a c"]})
