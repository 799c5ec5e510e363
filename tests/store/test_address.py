"""Keys: equal exactly when everything that decides KV is equal."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvilt.errors import InputError
from kvilt.kv.identity import Identity
from kvilt.kv.layout import Full, KVLayout, LayerGroup, Window
from kvilt.kv.owner import part_of
from kvilt.ops.contract import PageShape
from kvilt.ops.kv_dtypes import FLOAT16
from kvilt.store.address import (
    LayerForm,
    chunk_address,
    form_of,
    page_address,
    page_addresses,
    row_address,
    tenant_of,
    token_bytes,
    tokens_of,
)

FORM = (LayerForm(2, 8, 8, "float16"),) * 3
IDENTITY = Identity("model", "numerics", "adapter", "exact", "salt")
PAGE = 4
LAYOUT = KVLayout(
    (
        LayerGroup(Full(), (1,), PageShape(1, PAGE, 1, 4, 4, FLOAT16)),
        LayerGroup(Window(6), (0, 2), PageShape(2, PAGE, 2, 4, 2, FLOAT16)),
    )
)
TOKEN = st.one_of(st.integers(0, 2**63 - 1), st.binary(min_size=32, max_size=32))
TOKENS = st.lists(TOKEN, max_size=12)


@given(TOKENS, TOKENS)
def test_tokens_and_their_bytes_say_the_same(one: list[Any], other: list[Any]) -> None:
    assert tokens_of(token_bytes(one)) == one
    assert (token_bytes(one) == token_bytes(other)) == (one == other)
    keys = [chunk_address(IDENTITY, tokens, FORM).key for tokens in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@pytest.mark.parametrize("field", ["model", "numerics", "adapter", "origin", "salt"])
def test_every_part_of_an_identity_has_its_own_key(field: str) -> None:
    other = dataclasses.replace(IDENTITY, **{field: "another"})
    assert chunk_address(other, [1, 2], FORM).key != chunk_address(IDENTITY, [1, 2], FORM).key


def test_fields_do_not_run_into_each_other() -> None:
    one = Identity("ab", "c")
    other = Identity("a", "bc")
    assert chunk_address(one, [1], FORM).key != chunk_address(other, [1], FORM).key


def test_kinds_forms_codecs_and_secrets_have_their_own_keys() -> None:
    chunk = chunk_address(IDENTITY, [1, 2, 3, 4], form_of(LAYOUT))
    row = row_address(IDENTITY, [1, 2, 3, 4], LAYOUT)
    page = page_address(IDENTITY, [1, 2, 3, 4], LAYOUT, 0)
    floats = chunk_address(IDENTITY, [1, 2, 3, 4], form_of(LAYOUT, torch.float32))
    rounded = chunk.key_under(b"int8", b"")
    keys = [chunk.key, row.key, page.key, floats.key, rounded, chunk.key_under(b"k8v4", b"")]
    keys += [chunk.key_under(b"", b"secret"), chunk.key_under(b"", b"other"), chunk.key_under(b"int8", b"secret")]
    assert len(set(keys)) == len(keys)
    assert chunk.key_under(b"", b"") == chunk.key


def test_a_tenant_is_named_without_its_salt() -> None:
    assert "salt" not in tenant_of("salt")
    assert tenant_of("salt") != tenant_of("Salt")


def test_salts_of_a_key_have_addresses_of_their_own_and_one_owner() -> None:
    whole, one, other, foreign = (
        chunk_address(dataclasses.replace(IDENTITY, salt=salt), [1], FORM)
        for salt in ("a", part_of("a", "x"), "a/y", "b/x")
    )
    assert len({whole.key, one.key, other.key, foreign.key}) == 4
    assert len({whole.tenant, one.tenant, other.tenant, foreign.tenant}) == 4
    assert whole.owner == one.owner == other.owner == whole.tenant != foreign.owner
    assert "a/x" not in one.tenant


@given(st.lists(TOKEN, min_size=0, max_size=21), st.integers(0, 5))
def test_pages_are_found_by_the_keys_they_were_put_under(tokens: list[Any], skipped: int) -> None:
    found = list(page_addresses(IDENTITY, tokens, LAYOUT, PAGE, skipped * PAGE))
    ends = range((skipped + 1) * PAGE, len(tokens) + 1, PAGE)
    assert [one.tokens for one in found] == list(ends)
    for one in found:
        put = page_address(IDENTITY, tokens[: one.tokens], LAYOUT, one.tokens - PAGE)
        assert (put.key, put.content, put.form) == (one.key, one.content, one.form)


def test_a_page_needs_a_window_only_where_the_next_query_sees_it() -> None:
    found = list(page_addresses(IDENTITY, list(range(16)), LAYOUT, PAGE))
    # The query at 16 sees positions 11 to 15 of layers 0 and 2; layer 1 sees everything.
    assert [one.firsts for one in found] == [(4, 0, 4), (8, 4, 8), (8, 8, 8), (12, 12, 12)]


@pytest.mark.parametrize("tokens", [[-1], [2**63], [b"short"], ["text"], [1.5], [0, -7, bytes(32)]])
def test_what_is_no_token_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(InputError):
        chunk_address(IDENTITY, tokens, FORM)


def test_an_address_has_layers_and_pages_begin_where_pages_begin() -> None:
    with pytest.raises(InputError, match="layers"):
        chunk_address(IDENTITY, [1], ())
    with pytest.raises(InputError, match="page"):
        list(page_addresses(IDENTITY, [1, 2, 3, 4], LAYOUT, PAGE, start=2))
    with pytest.raises(InputError, match="complex64"):
        form_of(LAYOUT, torch.complex64)


def test_a_key_does_not_change_between_versions_of_this_code() -> None:
    """Whoever changes what a key is made of changes FORMAT too: old records must not be found under new meanings."""
    key = chunk_address(IDENTITY, [1, 2, hashlib.sha256(b"x").digest()], FORM).key
    assert key.hex() == "d521579e8c3f1ae2a06eb36791ac877439dd8a2513e4d448f2763e77ae9a4424"
