"""Long texts: refused by their length where they cannot fit, tokenized in pieces where they might."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvilt.errors import ContextOverflow
from kvilt.text import token_sizes
from kvilt.text.chat import ChatTemplate
from kvilt.text.pipeline import Pipeline
from kvilt.text.pretokenize import PRE_RULES
from kvilt.text.tokenizer import Tokenizer, from_file, from_metadata
from tests.text.samples import TEXTS
from tests.text.test_tokenizer import bpe_metadata
from tests.text.test_tokenizer_json import spm_folder

# What rules treat in different ways, and accents that are composed.
_CHARS = " \n\r\t/'!-.1²٣aZéßжωДع字あ가ᄀ\u1161\u11a8e\u0301\u0308K≠=\u0338\xa0\u3000\u200b▁<>_👍𝒳"
_WORDS = "\r\n|'s|'LL| a|\n字|ab| the|<tool>|hello|  |\n\n|//|...|x y|1 2|! a|é b|字 字|a\nb|!\nb|<tool> a|▁ a"
_PIECES = (*_CHARS, *_WORDS.split("|"))
HOSTILE = st.one_of(
    st.lists(st.sampled_from(_PIECES), max_size=40).map("".join),
    st.lists(st.sampled_from(TEXTS), max_size=4).map("".join),
    st.text(max_size=60),
)
_PRES = sorted({rule.splits: pre for pre, rule in PRE_RULES.items()}.values())
_REAL = ("smollm2", "qwen2", "gemma3")


@pytest.fixture(scope="session", params=(*_REAL, "spm", "spm-bare", "json", "json-first", *_PRES))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every kind of tokenizer: real ones, SentencePiece with and without a prefix, files, every rule."""
    name = request.param
    if name in _REAL:
        return request.getfixturevalue(name)
    if name in _PRES:
        return from_metadata(bpe_metadata(name))
    metadata = request.getfixturevalue("small_spm")[1]
    if name.startswith("spm"):
        return from_metadata({**metadata, "tokenizer.ggml.add_space_prefix": name == "spm"})
    scheme = "legacy" if name == "json" else "first"
    return from_file(spm_folder(tmp_path_factory.mktemp("spm"), metadata, scheme))


def whole(pipeline: Pipeline, text: str) -> list[int]:
    return list(pipeline.core.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def words(pipeline: Pipeline, text: str) -> list[str]:
    """What is merged by itself; small vocabularies have too few merges to show where words end."""
    core = pipeline.core
    if core.pre_tokenizer is None:
        return []
    text = text if core.normalizer is None else core.normalizer.normalize_str(text)
    return [word for word, _ in core.pre_tokenizer.pre_tokenize_str(text)]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    pipeline = tokenizer.core
    if pipeline.cuts is None:
        return
    text = text.encode("utf-8", "replace").decode()
    pieces = list(pipeline.cuts.pieces(text, 1))
    assert [token for piece in pieces for token in whole(pipeline, piece)] == whole(pipeline, text)
    assert [word for piece in pieces for word in words(pipeline, piece)] == words(pipeline, text)


def test_all_but_two_rules_can_be_cut() -> None:
    uncut = {pre for pre in PRE_RULES if from_metadata(bpe_metadata(pre)).core.cuts is None}
    assert uncut == {"deepseek-llm", "deepseek-coder"}  # no rule of theirs cuts every space from the word before


def test_cuts_are_found(tokenizer: Tokenizer) -> None:
    if tokenizer.core.cuts is not None:
        assert len(list(tokenizer.core.cuts.pieces("many words " * 20, 4))) > 10


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_no_text_has_fewer_tokens_than_its_length_says(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_sizes, "CHUNK_CHARS", 5)
    assert tokenizer.core.sizes.min_tokens(text, 10**9) <= len(tokenizer.core.ids(text))


def test_letters_composed_over_the_seam_of_two_chunks_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = from_metadata(bpe_metadata("qwen2"))
    for chars in (1, 2, 3, 4):
        monkeypatch.setattr(token_sizes, "CHUNK_CHARS", chars)
        for text in ("ᄀ\u1161\u11a8" * 3, "e\u0301\u0323" * 3, "α\u0313\u0300\u0345" * 3):
            assert tokenizer.core.sizes.min_tokens(text, 10**9) <= len(tokenizer.core.ids(text))


def test_bytes_without_a_token_do_not_count(smollm2: Tokenizer) -> None:
    lost = token_sizes.normalizer_effect(smollm2.core.core).lost
    text = next(chr(byte) for byte in lost if byte < 0x80) * 1000
    assert smollm2.core.ids(text) == []
    assert smollm2.core.sizes.min_tokens(text, 10**9) == 0


@pytest.mark.parametrize("tokenizer", ["gemma3", "spm", "json", "json-first"], indirect=True)
def test_blocks_count_as_the_spaces_that_they_stand_for(tokenizer: Tokenizer) -> None:
    text = "▁" * 300
    assert tokenizer.core.sizes.min_tokens(text, 10**9) <= len(tokenizer.core.ids(text))


@pytest.mark.parametrize("name", _REAL)
def test_the_largest_tokens_are_within_the_bound(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    largest = sorted(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)), reverse=True)[:200]
    for token in largest:
        text = tokenizer.decode([token]) * 50
        assert tokenizer.core.sizes.min_tokens(text, 10**9) <= len(tokenizer.core.ids(text))


@pytest.mark.parametrize("name", _REAL)
def test_real_vocabularies_have_tight_bounds(name: str, request: pytest.FixtureRequest) -> None:
    sizes = request.getfixturevalue(name).core.sizes
    assert sizes.min_tokens("7" * 1000, 10**9) == 1000
    assert sizes.min_tokens("z" * 1000, 10**9) >= 1000 // 48
    assert sizes.min_tokens("字" * 1000, 10**9) >= 3000 // 64
    assert sizes.max_bytes(1000) <= 128_000


def test_python_composes_as_the_library_does() -> None:
    from tokenizers import normalizers

    blocks = (range(0x20, 0x3400), range(0xA000, 0xD800), range(0xE000, 0x20000), range(0x2F800, 0x2FA20))
    chars = [chr(code) for block in blocks for code in block if code != 0x85]
    apart = normalizers.NFD().normalize_str("\n".join(chars))
    assert unicodedata.normalize("NFC", apart) == normalizers.NFC().normalize_str(apart)


class CountingCore:
    """A pipeline's library that counts the characters it is given."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._core.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.fixture
def counted(smollm2: Tokenizer) -> Iterator[Callable[[], int]]:
    pipeline = smollm2.core
    core = pipeline.core
    counting = CountingCore(core)
    pipeline.core = counting  # type: ignore[assignment]
    yield lambda: counting.chars
    pipeline.core = core


@pytest.mark.parametrize(
    "text", ["a" * (8 << 20), "word and " * (1 << 20), "7" * 200_000, "字" * 400_000, b"1" * 100_000]
)
def test_a_text_that_cannot_fit_is_not_tokenized(smollm2: Tokenizer, counted: Callable[[], int], text: str) -> None:
    with pytest.raises(ContextOverflow) as caught:
        smollm2.encode(text, limit=8192)
    assert caught.value.tokens > caught.value.limit == 8192
    assert counted() == 0


def test_a_text_that_might_fit_is_tokenized_as_far_as_it_does(smollm2: Tokenizer, counted: Callable[[], int]) -> None:
    with pytest.raises(ContextOverflow, match="at least"):
        smollm2.encode("One or two words, and some more. " * 5000, limit=8192)
    assert counted() < 8192 * 8


def test_the_limit_counts_every_token(smollm2: Tokenizer, small_spm: tuple[Any, dict[str, Any]]) -> None:
    framed = from_metadata({**small_spm[1], "tokenizer.ggml.add_eos_token": True})
    for tokenizer in (smollm2, framed):
        ids = tokenizer.encode("one two three")
        assert tokenizer.encode("one two three", limit=len(ids)) == ids
        with pytest.raises(ContextOverflow):
            tokenizer.encode("one two three", limit=len(ids) - 1)
        parts = ["one", 1, " two"]
        together = tokenizer.encode_parts(parts)
        assert tokenizer.encode_parts(parts, limit=len(together)) == together
        for less in range(len(together)):
            with pytest.raises(ContextOverflow):
                tokenizer.encode_parts(parts, limit=less)


def test_long_texts_come_out_as_at_once(smollm2: Tokenizer) -> None:
    text = "".join(TEXTS) * 200
    assert len(text) > 100_000
    assert smollm2.encode(text) == whole(smollm2.core, text)


def test_a_short_chat_needs_no_sizes_of_tokens(smollm2: Tokenizer) -> None:
    """The sizes of all tokens take longer than a short prompt does."""
    fresh = Pipeline(smollm2.core.core, lambda: map(smollm2.token_bytes, range(smollm2.vocab_size)))
    tokenizer = replace(smollm2, core=fresh, inner=fresh)
    template = ChatTemplate.of(tokenizer)
    template.render_prompt(tokenizer, [{"role": "user", "content": "a" * 80}], limit=100)
    assert "sizes" not in vars(fresh)
    template.render_prompt(tokenizer, [{"role": "user", "content": "a" * 200}], limit=100)
    assert "sizes" in vars(fresh)
    with pytest.raises(ContextOverflow):
        template.render_prompt(tokenizer, [{"role": "user", "content": "a" * 20_000}], limit=100)
