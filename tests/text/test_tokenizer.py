"""Tokenizers against transformers and sentencepiece, on real text and on hostile text."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import InputError, TokenizerError
from kvilt.text.pretokenize import PRE_RULES
from kvilt.text.tokenizer import Tokenizer, from_gguf, from_metadata
from tests.text.samples import TEXTS

# SmolLM2's vocabulary has no token for the bytes of these, and transformers drops them as well.
_SMOLLM2_ALPHABET = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0xFFFF)


def test_smollm2_ids_and_texts_equal_transformers(smollm2: Tokenizer, smollm2_oracle: Any) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert ids == smollm2_oracle.encode(text, add_special_tokens=False), text
        assert smollm2.decode(ids) == smollm2_oracle.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.slow
def test_the_gguf_reader_of_transformers_agrees_except_for_its_missing_digit_rule(
    smollm2: Tokenizer, smollm2_path: Path
) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    arabic = "2024 ٣٤٥"
    assert oracle.encode(arabic) != smollm2.encode(arabic)  # it knows nothing of `tokenizer.ggml.pre`
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in (*TEXTS, arabic):
        assert smollm2.encode(text) == oracle.encode(text), text


@settings(max_examples=examples(150))
@given(text=st.text(_SMOLLM2_ALPHABET, max_size=60))
def test_byte_level_text_comes_back_as_it_was(smollm2: Tokenizer, smollm2_oracle: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert ids == smollm2_oracle.backend_tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=examples(150))
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_decode_of_any_ids_equals_transformers(smollm2: Tokenizer, smollm2_oracle: Any, ids: list[int]) -> None:
    expected = smollm2_oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert smollm2.decode(ids) == expected
    expected = smollm2_oracle.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert smollm2.decode(ids, skip_special=False) == expected


def test_special_tokens_in_text_are_plain_text(smollm2: Tokenizer) -> None:
    text = "a<|im_end|>b<|endoftext|>"
    ids = smollm2.encode(text)
    assert not set(ids) & set(smollm2.special.values())
    assert smollm2.decode(ids) == text
    marked = smollm2.encode_with_specials(text)
    assert marked[-1] == smollm2.id_of("<|endoftext|>") == 0
    assert smollm2.id_of("<|im_end|>") in marked
    assert smollm2.decode(marked) == "ab"
    assert smollm2.decode(marked, skip_special=False) == text


def test_the_facts_of_smollm2(smollm2: Tokenizer, smollm2_path: Path) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2, 0)
    assert smollm2.named["eos_token"] == "<|im_end|>"
    assert len(smollm2.special) == 17
    assert smollm2.chat_template is not None
    assert smollm2.token_bytes(smollm2.encode(" the")[0]) == b" the"
    assert smollm2.token_bytes(2) == b""
    assert smollm2.token_bytes(60000) == b""  # a padded embedding has rows past the vocabulary
    with pytest.raises(InputError, match="no token id"):
        smollm2.token_bytes(-1)
    with pytest.raises(InputError, match="no token"):
        smollm2.id_of("no such token")
    again = from_gguf(smollm2_path)  # through kvilt's own reader
    assert again.encode(TEXTS[3]) == smollm2.encode(TEXTS[3])


def test_broken_utf8_and_lone_surrogates_become_replacement_characters(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode(b"ok \xff\xfe caf\xc3\xa9 \xe4\xbd")) == "ok \ufffd\ufffd café \ufffd"
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a\ufffdb"
    assert smollm2.decode(smollm2.encode("\ud83d\ude00")) == "😀"
    with pytest.raises(InputError, match="must be a string"):
        smollm2.encode(3)  # type: ignore[arg-type]


def test_building_from_a_real_vocabulary_is_fast(smollm2_metadata: dict[str, Any]) -> None:
    assert _seconds(lambda: from_metadata(smollm2_metadata)) < 60  # 0.1 s on a quiet core


def test_other_threads_run_while_a_long_text_is_tokenized(smollm2: Tokenizer) -> None:
    """No thread is ever made to give way here, so another runs only if the tokenizer lets go of the interpreter."""
    beats, done = [0], threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats[0] += 1
            time.sleep(0.0005)

    text, thread = "Some words that take a while. " * 30000, threading.Thread(target=beat)
    before_s = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1000)
    try:
        before = beats[0]
        smollm2.encode(text)
        after = beats[0]
    finally:
        sys.setswitchinterval(before_s)
        done.set()
        thread.join()
    assert after > before


@pytest.mark.parametrize("text", ["a" * 200_000, " " * 200_000, "\n " * 100_000, "🏳️‍🌈" * 30_000, "(" * 200_000])
def test_pathological_text_takes_linear_time(smollm2: Tokenizer, text: str) -> None:
    assert _seconds(lambda: smollm2.encode(text)) < 60  # hours, where it grows with the square
    assert smollm2.decode(smollm2.encode(text)) == text


def test_a_panic_of_the_regular_expressions_is_a_typed_error(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = from_metadata(bpe_metadata("qwen2"))
    with pytest.raises(InputError, match="white space"):
        tokenizer.encode(" " * 12_000_000 + "x")
    capfd.readouterr()  # the library writes a trace of its own


def test_importing_the_room_loads_neither_torch_nor_jinja() -> None:
    code = (
        "import sys, kvilt.text.tokenizer, kvilt.text.chat, kvilt.text.stops, kvilt.text.detokenizer;"
        "assert not {'torch', 'jinja2', 'tokenizers', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("text", TEXTS)
def test_spm_ids_and_texts_equal_sentencepiece(small_spm: tuple[Any, dict[str, Any]], text: str) -> None:
    oracle, metadata = small_spm
    tokenizer = from_metadata(metadata)
    ids = tokenizer.encode(text, add_special=False)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1, *ids]


@settings(max_examples=examples(200))
@given(text=st.text(st.sampled_from("abcdefghijklmnop  éà\nПривет<tool>|turn.,🙂"), max_size=60))
def test_spm_of_any_text_equals_sentencepiece(small_spm: tuple[Any, dict[str, Any]], text: str) -> None:
    oracle, metadata = small_spm
    if "<tool>" in text:
        return  # after a user-defined token llama.cpp and kvilt put a space, sentencepiece does not
    tokenizer = from_metadata(metadata)
    ids = tokenizer.encode(text, add_special=False)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(ids) == text


def test_spm_tokens_of_every_type(small_spm: tuple[Any, dict[str, Any]]) -> None:
    tokenizer = from_metadata(small_spm[1])
    turn, tool = tokenizer.id_of("<|turn|>"), tokenizer.id_of("<tool>")
    assert tokenizer.special == {"<s>": 1, "</s>": 2, "<|turn|>": turn}
    assert tokenizer.eos_ids == (2,)
    assert turn not in tokenizer.encode("x<|turn|>y</s>")
    assert tokenizer.decode(tokenizer.encode("x<|turn|>y</s>")) == "x<|turn|>y</s>"
    assert tool in tokenizer.encode("x<tool>y")  # a user-defined token counts wherever it is written
    assert tokenizer.token_bytes(tool) == b"<tool>"
    assert tokenizer.token_bytes(tokenizer.id_of("<0x0A>")) == b"\n"
    assert tokenizer.token_bytes(tokenizer.id_of("▁the")) == b" the"
    assert tokenizer.token_bytes(0) == tokenizer.token_bytes(turn) == b""
    parts = tokenizer.encode_with_specials("hello<|turn|>hello")
    assert parts == [*tokenizer.encode("hello", add_special=False), turn, *tokenizer.encode("hello", add_special=False)]


def test_spm_without_byte_tokens_says_unknown(small_spm: tuple[Any, dict[str, Any]]) -> None:
    metadata = dict(small_spm[1])
    metadata["tokenizer.ggml.token_type"] = [5 if kind == 6 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    assert from_metadata(metadata).encode("hello 漢漢", add_special=False)[-1] == 0


@pytest.mark.slow
def test_gemma3_equals_sentencepiece_and_builds_in_seconds(gemma3_metadata: dict[str, Any]) -> None:
    oracle = _gemma_oracle(gemma3_metadata)
    began = time.perf_counter()
    tokenizer = from_metadata(gemma3_metadata)
    assert time.perf_counter() - began < 60  # minutes, where it grows with the square of the vocabulary
    for text in (*TEXTS, "a ▁ b  ▁  c", "<table>x</table>", "".join(TEXTS)):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == oracle.encode(text), text
        assert tokenizer.encode(text) == [2, *ids]
        assert tokenizer.decode(ids) == text.replace("▁", " ")
    assert tokenizer.eos_ids == (1, 106)
    assert tokenizer.special["<start_of_turn>"] == 105
    assert 105 not in tokenizer.encode("<start_of_turn>user")


def test_qwen2_equals_transformers(qwen2: Tokenizer, qwen2_oracle: Any) -> None:
    for text in (*TEXTS, "<tool_call>x</tool_call>"):
        ids = qwen2.encode(text)
        assert ids == qwen2_oracle.encode(text), text
        assert qwen2.decode(ids) == qwen2_oracle.decode(ids, clean_up_tokenization_spaces=False) == _composed(text)
    assert qwen2.eos_ids == (151645, 151643)
    assert qwen2.token_bytes(151900) == b""  # an unused row


@settings(max_examples=examples(150))
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_qwen2_text_comes_back_composed(qwen2: Tokenizer, text: str) -> None:
    assert qwen2.decode(qwen2.encode(text)) == _composed(text)


@pytest.mark.parametrize("pre", sorted(PRE_RULES))
def test_every_pre_rule_keeps_every_byte(pre: str) -> None:
    tokenizer = from_metadata(bpe_metadata(pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == (_composed(text) if PRE_RULES[pre].nfc else text)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'m", " 12345", " HE", "'", "S", "  ", " x", "!!", "\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", " HE", "'", "S", "  ", " x", "!!", "\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "45", " HE", "'S", "  ", " x", "!!\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "5", " HE", "'S", "  ", " x", "!!\n"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", "5", " HE", "'S", "  ", " x", "!!\n"]),
        ("deepseek-v3", ["I", "'m", " ", "123", "45", " HE", "'S", "  ", " x", "!!\n"]),
    ],
)
def test_pre_rules_cut_where_the_published_tokenizers_do(pre: str, words: list[str]) -> None:
    from kvilt.text.pretokenize import pre_tokenizer, rule_for

    text = "I'm 12345 HE'S   x!!\n"
    cuts = pre_tokenizer(rule_for(pre)).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == words


def test_llama3_takes_whole_words_and_starts_with_bos() -> None:
    metadata = bpe_metadata("llama-bpe", extra=["abc"])
    metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<|end|>")
    tokenizer = from_metadata(metadata)
    assert tokenizer.encode("abc") == [tokenizer.bos_id, tokenizer.id_of("abc")]
    assert len(from_metadata(bpe_metadata("gpt-2", extra=["abc"])).encode("abc")) == 3  # no merge leads there


def test_an_unknown_pre_rule_is_refused_by_name() -> None:
    with pytest.raises(TokenizerError, match=r"'klingon'.*llama-bpe"):
        from_metadata(bpe_metadata("klingon"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "bert", "'bert'"),
        ("model", None, "model is missing"),
        ("tokens", None, "no vocabulary"),
        ("tokens", [], "no vocabulary"),
        ("tokens", "abc", "not an array"),
        ("tokens", [1, 2], "other than strings"),
        ("tokens", ["a", "a"], "twice"),
        ("tokens", ["a" * 20000], "characters"),
        ("token_type", [1], "1 entries"),
        ("token_type", "x", "not an array"),
        ("merges", None, "missing"),
        ("merges", [1], "other than strings"),
        ("merges", ["abc"], "two tokens"),
        ("merges", ["a b c"], "two tokens"),
        ("merges", ["a q漢"], "does not fit"),
        ("pre", 3, "pre is of type int"),
        ("bos_token_id", 10**6, "no id"),
        ("bos_token_id", -1, "no id"),
        ("bos_token_id", "1", "no id"),
        ("eos_token_id", True, "no id"),
        ("add_bos_token", 1, "add_bos_token"),
        ("add_bos_token", True, "no bos token"),
    ],
)
def test_damaged_vocabularies_are_refused(field: str, value: Any, message: str) -> None:
    metadata = {**bpe_metadata("gpt-2"), f"tokenizer.ggml.{field}": value}
    with pytest.raises(TokenizerError, match=message):
        from_metadata(metadata)


def test_tokens_that_are_no_utf8_keep_their_bytes() -> None:
    metadata = bpe_metadata("gpt-2", extra=[b"\xe4\xbd".decode("utf-8", "surrogateescape")])
    tokenizer = from_metadata({**metadata, "tokenizer.ggml.add_bos_token": False})
    odd = metadata["tokenizer.ggml.tokens"].index("\udce4\udcbd")
    assert tokenizer.token_bytes(odd) == b"\xe4\xbd"
    assert tokenizer.decode([odd, *tokenizer.encode(b"\xa0".decode("latin-1"))[1:]]) == "你"
    assert tokenizer.decode(tokenizer.encode("你")) == "你"


@pytest.mark.parametrize(
    ("field", "value"),
    [("scores", None), ("scores", [0.0]), ("scores", ["x"]), ("scores", [float("nan")]), ("token_type", [9])],
)
def test_damaged_spm_vocabularies_are_refused(
    small_spm: tuple[Any, dict[str, Any]], field: str, value: list[Any] | None
) -> None:
    size = len(small_spm[1]["tokenizer.ggml.tokens"])
    full = value * size if value not in (None, [0.0]) else value
    with pytest.raises(TokenizerError, match=field):
        from_metadata({**small_spm[1], f"tokenizer.ggml.{field}": full})


def bpe_metadata(pre: str, extra: list[str] | None = None) -> dict[str, Any]:
    """A byte-level vocabulary of single bytes, one merge, and one control token."""
    from kvilt.text.assemble import ByteAlphabet

    tokens = [*ByteAlphabet().byte_of, "ab", *(extra or []), "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["a b"] if not extra else [],
        **({"tokenizer.ggml.add_bos_token": False} if not extra else {}),
    }


def _gemma_oracle(metadata: dict[str, Any]) -> Any:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*columns, strict=True):
        piece = token.replace(" ", "▁") if kind == 4 else token
        model.pieces.add(piece=piece, score=score, type=2 if token == "<unk>" else kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id, model.trainer_spec.pad_id = (
        3,
        2,
        1,
        0,
    )
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
