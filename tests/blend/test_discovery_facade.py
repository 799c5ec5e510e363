"""Documents in plain texts through the facades: found where they were warmed, and only where that is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import write_tiny

from kvilt.blend.recipe import Recipe
from kvilt.config import EngineConfig, RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM, AsyncLLM
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget
from kvilt.text.tokenizer import Tokenizer

ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889 for the world's fair there.\n"
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by Edmund Hillary and Tenzing Norgay.\n" * 2
PROMPT = f"Facts:\n{TWO}And then:\n{ONE}Which of the two is higher?"
LOOSE = Recipe(0.2, "head", min_gain=0.0)

Make = Callable[[], Executor]


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    folder = write_tiny(tmp_path / "model", vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    return lambda: load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))


def test_warmed_documents_are_found_in_a_text(make: Make, tokenizer: Tokenizer) -> None:
    with LLM(make(), tokenizer) as llm:
        llm.warm([ONE, TWO])
        expected = llm.blend(["Facts:\n", TWO, "And then:\n", ONE, "Which of the two is higher?"], max_tokens=1)
        documents = sum(len(llm.documents.ids(text)) for text in (ONE, TWO))
        for stream in (False, True):
            llm.executor.prefixes.clear()
            if stream:
                done = llm.stream(PROMPT, discover=True, recipe=LOOSE, max_tokens=6, temperature=0.0).completion
            else:
                done = llm.generate(PROMPT, discover=True, recipe=LOOSE, max_tokens=6, temperature=0.0)
            used = done.usage
            assert used.blended_reused + used.blended_recomputed == documents
            assert used.recipe == LOOSE.name
            assert used.prompt_tokens == expected.usage.prompt_tokens
        llm.executor.prefixes.clear()
        assert llm.generate(PROMPT, max_tokens=1).usage.recipe == ""


def test_a_model_that_discovers_does_so_for_every_prompt(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def kept() -> Store:
        return Store(Budget(1 << 24), [Disk(tmp_path / "kv", Budget(1 << 24))])

    with kept() as store, LLM(make(), tokenizer, store=store) as llm:
        llm.warm([ONE, TWO])
    # A model that is loaded later reads what the disk has, by itself.
    with kept() as store, LLM(make(), tokenizer, config=EngineConfig(discover=True), store=store) as llm:
        llm.documents.chunks._finder.settle(30)
        assert llm.generate(PROMPT, recipe=LOOSE, max_tokens=1).usage.blended_reused > 0
        llm.executor.prefixes.clear()
        assert llm.generate(PROMPT, recipe=LOOSE, discover=False, max_tokens=1).usage.recipe == ""


def test_the_same_in_an_event_loop_and_for_tenants(make: Make, tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with AsyncLLM(make(), tokenizer) as llm:
            await llm.warm([ONE, TWO], tenant="a")
            for tenant, found in (("b", False), ("a", True)):
                done = await llm.generate(PROMPT, recipe=LOOSE, discover=True, tenant=tenant, max_tokens=1)
                assert (done.usage.blended_reused > 0) == found

    asyncio.run(run())
