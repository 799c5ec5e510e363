"""One registry for each kind of thing that can be added: what other places say about them agrees with it."""

from __future__ import annotations

import pytest
import torch

from kvilt.cli.options import RUNTIME, STORE
from kvilt.models.families.registry import FAMILIES, pairs_qk
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.store.codec_registry import CODECS, codec_named
from kvilt.weights.source import WEIGHT_FORMATS


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_is_what_the_registry_says(name: str) -> None:
    codec = codec_named(name)
    assert (codec.name, codec.lossy) == (name, CODECS[name].lossy)
    assert name in STORE.options["store_codec"].help


@pytest.mark.parametrize("name", KV_DTYPES)
def test_a_kv_dtype_is_torchs_or_says_that_it_packs_values(name: str) -> None:
    dtype = KV_DTYPES[name]
    assert dtype.name == name and (dtype.packed_values or dtype.storage == getattr(torch, name))
    assert name in RUNTIME.options["kv_dtype"].help


def test_families_are_written_in_known_weight_formats() -> None:
    kinds = {one.kind for one in WEIGHT_FORMATS}
    assert len(kinds) == len(WEIGHT_FORMATS)
    assert {dialect.kind for family in FAMILIES for dialect in family.dialects} == kinds
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_the_families_whose_queries_and_keys_are_paired() -> None:
    assert {(one.name, kind) for one in FAMILIES for kind in ("gguf", "hf") if pairs_qk(one.name, kind)} == {
        ("cohere", "gguf"),
        ("cohere", "hf"),
        ("ernie4_5", "gguf"),
        ("ernie4_5", "hf"),
        ("ernie4_5_moe", "gguf"),
        ("ernie4_5_moe", "hf"),
        ("glm", "gguf"),
        ("glm", "hf"),
        ("granite", "gguf"),
        ("granite_hybrid", "gguf"),
        ("llama", "gguf"),
        ("llama4", "gguf"),
        ("llama4", "hf"),
        ("mistral3", "gguf"),
        ("smollm3", "gguf"),
        ("ernie4_5_moe", "gguf"),
        ("ernie4_5_moe", "hf"),
    }
