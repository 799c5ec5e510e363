"""Streamed text: the deltas join to the full decode, and no character is ever broken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.text.detokenizer import Detokenizer
from kvilt.text.tokenizer import Tokenizer, from_metadata
from tests.text.samples import TEXTS


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_delta_holds_a_broken_character(smollm2: Tokenizer, text: str) -> None:
    deltas = streamed(smollm2, smollm2.encode(text))
    assert "".join(deltas) == text
    assert deltas[-1] == ""  # nothing was left to flush
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


@settings(max_examples=examples(200))
@given(ids=st.lists(st.integers(0, 49300), max_size=40), skip=st.booleans())
def test_deltas_of_any_ids_join_to_the_decode(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(streamed(smollm2, ids, skip_special=skip)) == smollm2.decode(ids, skip_special=skip)


@settings(max_examples=examples(200))
@given(data=st.binary(max_size=20))
def test_any_bytes_come_out_as_python_decodes_them(small_spm: tuple[Any, dict[str, Any]], data: bytes) -> None:
    tokenizer = from_metadata(small_spm[1])
    ids = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in data]
    expected = data.decode("utf-8", "replace")
    expected = expected[1:] if expected.startswith(" ") else expected
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == expected


@settings(max_examples=examples(200))
@given(data=st.data())
def test_spm_deltas_of_any_ids_join_to_the_decode(small_spm: tuple[Any, dict[str, Any]], data: st.DataObject) -> None:
    tokenizer = from_metadata(small_spm[1])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_the_space_that_encode_added_is_dropped_once_and_only_at_the_start(
    small_spm: tuple[Any, dict[str, Any]],
) -> None:
    tokenizer = from_metadata(small_spm[1])
    the = tokenizer.id_of("▁the")
    assert streamed(tokenizer, [1, the, the]) == ["", "the", " the", ""]
    assert streamed(tokenizer, [the, the], at_start=False) == [" the", " the", ""]


def test_an_unfinished_character_waits_and_is_flushed_at_the_end(small_spm: tuple[Any, dict[str, Any]]) -> None:
    tokenizer = from_metadata(small_spm[1])
    euro = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert streamed(tokenizer, euro) == ["", "", "€", ""]
    assert streamed(tokenizer, euro[:2]) == ["", "", "\ufffd"]
    assert streamed(tokenizer, [*euro[:2], tokenizer.id_of("▁the")]) == ["", "", "\ufffd the", ""]


def test_the_cost_of_a_token_does_not_grow_with_the_stream(smollm2: Tokenizer) -> None:
    ids, spelt = smollm2.encode("word " * 1000), []
    counted = SimpleNamespace(
        token_bytes=lambda token_id: (spelt.append(token_id), smollm2.token_bytes(token_id))[1],
        drops_space=smollm2.drops_space,
    )
    detokenizer = Detokenizer(counted)  # type: ignore[arg-type]
    for token_id in ids:
        detokenizer.add(token_id)
    assert spelt == ids, "each token is spelt once"
