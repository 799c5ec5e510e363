"""Files that an earlier version wrote are read today, and their KV is used: nothing of it is computed again.

`fixtures/saved_before/make.py` wrote them, and says at which version. A failure here means that users lose what they
saved. If the model's identity differs, look at what goes into it: `repr` of the spec, so a renamed field counts.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures.saved_before.make import (
    DOCUMENT,
    FOLDER,
    GREEDY,
    NEXT_USER,
    OPTIONS,
    PROMPT,
    QUESTION,
    ROUNDED_DOCUMENT,
    SYSTEM,
    TENANT,
    USER,
    WINDOW,
    open_store,
    write_model,
)

import kvilt
from kvilt import LLM
from kvilt.blend.recipe import Recipe
from kvilt.errors import KviltError
from kvilt.executor.counters import TOKENS
from kvilt.kv.cache import KVCache
from kvilt.llm.conversation import Conversation
from kvilt.store.counters import HITS
from kvilt.store.store import Store

FACTS = json.loads((FOLDER / "facts.json").read_text())
IDS = list(PROMPT.encode())
PAGE_TOKENS = 32
BLENDED = Recipe(0.2, min_gain=0.0)  # short documents too


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    write_model(folder / "windowed", WINDOW)
    return write_model(folder)


@pytest.fixture
def load(models: Path) -> Callable[..., LLM]:
    return lambda within="", **options: kvilt.load(models / within, **{**OPTIONS, **options})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy of the files, private to their user as they were when they were written."""
    shutil.copytree(FOLDER, tmp_path / "saved")
    for path in (tmp_path / "saved").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "saved"


def computed(llm: LLM) -> int:
    return int(sum(point["value"] for point in llm.executor.metrics.snapshot()[TOKENS.name]["series"]))


def found(store: Store, **labels: str) -> int:
    series = store.metrics.snapshot()[HITS.name]["series"]
    return int(sum(point["value"] for point in series if labels.items() <= point["labels"].items()))


def ids_of(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special=False)


def test_the_model_is_the_same(load: Callable[..., LLM]) -> None:
    with load() as llm:
        identity = llm.executor.pool.identity()
        assert (identity.model, identity.numerics) == (FACTS["model"], FACTS["numerics"])
        assert llm.generate(PROMPT, GREEDY).token_ids == FACTS["said"]


@pytest.mark.parametrize(
    ("name", "within", "dtype"), [("cache", "", "auto"), ("int8", "", "int8"), ("windowed", "windowed", "auto")]
)
def test_a_saved_cache(load: Callable[..., LLM], saved: Path, name: str, within: str, dtype: str) -> None:
    file = saved / f"{name}.kv"
    with load(within, kv_dtype=dtype) as llm:
        with llm.executor.open_kv_cache(file) as kv:
            assert computed(llm) == 0
            assert kv.tokens() == ids_of(llm, PROMPT)
            assert kv.serialize() == file.read_bytes(), "the format is the same byte by byte"
            warm = llm.generate(QUESTION, GREEDY, kv=kv)
        assert (warm.usage.prefix_hit, warm.usage.computed) == (len(IDS), len(QUESTION))
        llm.executor.prefixes.clear()
        cold = llm.generate(PROMPT + QUESTION, GREEDY)
        assert cold.usage.prefix_hit == 0
        assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_prefixes_in_a_store(load: Callable[..., LLM], saved: Path, dtype: str) -> None:
    with open_store(saved / "store") as store, load(store=store, kv_dtype=dtype) as llm:
        warm = llm.generate(PROMPT, GREEDY)
        pages = len(IDS) // PAGE_TOKENS
        assert warm.usage.prefix_hit == pages * PAGE_TOKENS
        assert found(store, tier="disk", kind="prefix") == pages
    with load(kv_dtype=dtype) as llm:
        assert warm.token_ids == llm.generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize(("text", "codec"), [(DOCUMENT, "raw"), (ROUNDED_DOCUMENT, "k8v4")])
def test_documents_in_a_store(load: Callable[..., LLM], saved: Path, tmp_path: Path, text: str, codec: str) -> None:
    with open_store(saved / "store", codec) as store, load(store=store) as llm:
        (known,) = llm.warm([text])
        assert (known.found, known.tokens) == (True, len(llm.documents.ids(text)))
        warm = llm.generate(QUESTION, GREEDY, documents=[text], recipe=BLENDED)
        assert warm.usage.documents_computed == 0
        assert warm.usage.blended_reused > 0
        assert found(store, tier="disk", kind="chunk") == 1
    with open_store(tmp_path / "empty", codec) as store, load(store=store) as llm:
        cold = llm.generate(QUESTION, GREEDY, documents=[text], recipe=BLENDED)
        assert cold.usage.documents_computed > 0
    assert warm.token_ids == cold.token_ids


def test_a_whole_cache_in_a_store(load: Callable[..., LLM], saved: Path) -> None:
    with open_store(saved / "store") as store, load() as llm:
        pool = llm.executor.pool
        row = store.open_row(pool.identity(), pool.layout, ids_of(llm, PROMPT))
        with KVCache.of_images(pool, [row.image(pool.layout)], 512) as kv:
            assert row.tier == "disk"
            assert kv.serialize() == (saved / "cache.kv").read_bytes()
            assert llm.generate(QUESTION, GREEDY, kv=kv).usage.prefix_hit == len(IDS)


def test_a_handle_with_its_note(models: Path, saved: Path) -> None:
    async def check() -> tuple[Any, Any]:
        with open_store(saved / "store") as store:
            async with kvilt.load_async(models, store=store, **OPTIONS) as served:
                (handle,) = await served.kv.owned(tenant=TENANT)
                assert (handle.id, handle.tokens, handle.resident) == (FACTS["handle"], len(IDS), False)
                assert list(served.kv.tokens(handle.id, tenant=TENANT)) == served.tokenizer.encode(PROMPT)
                warm = await served.generate(QUESTION, GREEDY, kv=handle.id, tenant=TENANT)
                pages = len(IDS) // PAGE_TOKENS  # in the store; the rest of the handle's KV is computed again
                assert found(store, tier="disk", kind="prefix") == pages
                assert warm.usage.prefix_hit == pages * PAGE_TOKENS
                cold = await served.generate(PROMPT + QUESTION, GREEDY, tenant="another")
                assert cold.usage.prefix_hit == 0
                return warm, cold

    warm, cold = asyncio.run(check())
    assert warm.token_ids == cold.token_ids


def test_a_saved_handle(models: Path, saved: Path) -> None:
    async def check() -> None:
        async with kvilt.load_async(models, **OPTIONS) as served:
            with pytest.raises(KviltError):
                await served.kv.restore(saved / "handle.kv", tenant="another")
            handle = await served.kv.restore(saved / "handle.kv", tenant=TENANT)
            assert (handle.tokens, handle.resident) == (len(IDS), True)
            warm = await served.generate(QUESTION, GREEDY, kv=handle.id, tenant=TENANT)
            assert warm.usage.prefix_hit == len(IDS)
            cold = await served.generate(PROMPT + QUESTION, GREEDY, tenant="another")
            assert warm.token_ids == cold.token_ids

    asyncio.run(check())


def test_a_saved_chat(load: Callable[..., LLM], saved: Path) -> None:
    with load() as llm:
        loaded = Conversation.load(llm, saved / "chat.json")
        with loaded.conversation as chat:
            assert (loaded.computed, computed(llm), chat.missing) == (0, 0, 1)
            assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]
            assert (chat.messages[0]["content"], chat.messages[1]["content"]) == (SYSTEM, USER)
            past = len(chat.ids)
            warm = [*chat.say(NEXT_USER, GREEDY)]
            assert chat.last is not None
            assert chat.last.usage.prefix_hit == past - 1
            with Conversation(llm, SYSTEM, chat.turns[:1]) as cold:
                llm.executor.prefixes.clear()
                assert [*cold.say(NEXT_USER, GREEDY)] == warm
                assert cold.last is not None
                assert cold.last.usage.prefix_hit == 0
                assert cold.ids == chat.ids
            chat.save(saved / "chat.json", "tiny")
        with Conversation.load(llm, saved / "chat.json").conversation as chat:
            assert len(chat.turns) == 2
