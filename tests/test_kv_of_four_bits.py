"""KV in `k8v4` through every verb: what is forked, stored, loaded or moved gives the bits of a fresh run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvilt
from kvilt.errors import Unsupported
from kvilt.executor.load import PAGE_TOKENS
from kvilt.models.assemble import read_spec
from kvilt.models.spec import kv_layout
from kvilt.ops.kv_dtypes import K8V4
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget
from kvilt.weights.source import open_checkpoint
from tests.models.families import random_model, write_checkpoint
from tests.tiny import write_tiny_of_bytes

GREEDY = kvilt.SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
PROMPT = "The cache is a value that you hold: you can fork it, cut it, store it and move it. " * 3
QUESTION = "What is it?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_of_bytes(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[kvilt.LLM]:
    with kvilt.load(folder, kv_memory="16M", kv_dtype="k8v4", threads=2) as made:
        yield made


def said(completion: kvilt.Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.logprobs


def test_handles_go_on_as_a_fresh_run_does(llm: kvilt.LLM, tmp_path: Path) -> None:
    fresh = said(llm.generate(PROMPT + QUESTION, GREEDY))
    llm.executor.prefixes.clear()
    with llm.prefill(PROMPT) as kv:
        assert kv.layout.groups[0].shape.dtype is K8V4
        kv.save(tmp_path / "saved.kv")
        length, shorter = kv.num_entries, llm.prefill(PROMPT + "and more")
        shorter.truncate(length)
        with (
            kv.fork() as fork,
            llm.executor.create_kv_cache(2) as both,
            llm.open(tmp_path / "saved.kv") as opened,
            shorter,
        ):
            both.broadcast_and_copy_from(kv)
            assert both.lengths == (length, length)
            assert fork.serialize() == kv.serialize() == opened.serialize() == shorter.serialize()
            for one in (fork, opened, shorter):
                assert said(llm.generate(QUESTION, GREEDY, kv=one)) == fresh


def test_a_store_gives_prefixes_and_documents_back(folder: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with (
            Store(Budget(1 << 22), [Disk(tmp_path / "kv", Budget(1 << 24))]) as store,
            kvilt.load(folder, kv_memory="16M", kv_dtype="k8v4", threads=2, store=store) as llm,
        ):
            whole = llm.generate(PROMPT, GREEDY)
            blended = llm.generate(QUESTION, GREEDY, documents=[PROMPT, PROMPT[5:]])
            found.append((said(whole), said(blended), whole.usage.prefix_hit))
    assert found[0][:2] == found[1][:2]
    assert found[1][2] >= len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS


def test_a_replaced_span_moves_what_stands_behind_it(llm: kvilt.LLM) -> None:
    """The whole repaired is computed anew; with less, KV behind the span is unpacked, turned and packed again."""
    text = PROMPT.replace("hold", "own", 1)
    start = PROMPT.index("hold")
    with llm.prefill(PROMPT) as kv:
        for repair in (1.0, 0.2):
            with llm.replace(kv, start, start + 4, "own", repair=repair) as changed:
                assert changed.tokens() == llm.tokenizer.encode(text)
                made = llm.generate(QUESTION, GREEDY, kv=changed)
                if repair == 1.0:
                    assert said(made) == said(llm.generate(text + QUESTION, GREEDY))


def test_values_that_are_keys_as_well_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(random_model("deepseek-v2"), tmp_path))
    with checkpoint.tensors:
        spec = read_spec(checkpoint)
    with pytest.raises(Unsupported, match="k8v4 packs values of 4 bits in pairs, not those that are keys as well"):
        kv_layout(spec, PAGE_TOKENS, K8V4)
