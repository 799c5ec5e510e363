"""The quality gate through the facades: asked for by configuration, kept beside the documents, off unless wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

from kvilt.blend.recipe import Recipe
from kvilt.cli.options import SERVER
from kvilt.cli.serve import gate_of
from kvilt.config import EngineConfig, GateConfig, RunConfig
from kvilt.engine.features.quality_checks import DROPPED
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.llm import LLM, AsyncLLM
from kvilt.store.disk import Disk
from kvilt.store.store import Store
from kvilt.store.tier import Budget
from kvilt.text.tokenizer import Tokenizer

PARTS = ["Facts: ", "One stands here and is long enough. ", "Another one stands there. ", "So what?"]
REUSE = Recipe(0.0, "head", min_gain=0.0)
EAGER = GateConfig(every=1, max_kl=1e-4, least=2)

Make = Callable[[], Executor]


@pytest.fixture
def make(tokenizer: Tokenizer, tmp_path: Path) -> Make:
    folder = write_tiny(tmp_path / "model", vocab_size=tokenizer.vocab_size, max_position_embeddings=512)
    return lambda: load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))


def asked(llm: LLM, count: int, **fields: Any) -> list[str]:
    done = [llm.blend(PARTS, recipe=REUSE, max_tokens=30, temperature=0.0, **fields) for _ in range(count)]
    for one in done:
        used = one.usage
        assert used.prompt_tokens == used.computed + used.prefix_hit + used.blended_reused + used.blended_recomputed
    return [one.usage.recipe for one in done]


def test_off_unless_it_is_wanted(make: Make, tokenizer: Tokenizer) -> None:
    with LLM(make(), tokenizer) as llm:
        assert set(asked(llm, 3)) == {REUSE.name}
        assert llm.certificates() == []


def test_usage_names_what_was_done_and_a_restart_remembers(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    with Store(Budget(1 << 24), [Disk(folder, Budget(1 << 24))]) as store:
        with LLM(make(), tokenizer, store=store, gate=EAGER) as llm:
            seen = asked(llm, 30)
            (known,) = llm.certificates()
        assert seen[0] == REUSE.name
        assert seen[-1] == f"full/1 instead of {REUSE.name}"
        assert known.falls_back
    assert (folder / "certificates.json").is_file()
    with (
        Store(Budget(1 << 24), [Disk(folder, Budget(1 << 24))]) as store,
        LLM(make(), tokenizer, store=store, gate=EAGER) as llm,
    ):
        assert asked(llm, 1) == seen[-1:]
        assert llm.blend(PARTS, recipe=Recipe.of(REUSE, gate=False), max_tokens=1).usage.recipe == REUSE.name


def test_a_path_of_its_own(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    with LLM(make(), tokenizer, gate=GateConfig(every=1, path=path)) as llm:
        asked(llm, 3)
    assert path.is_file()


def test_comparisons_run_by_themselves_and_stand_in_no_way_of_an_end(make: Make, tokenizer: Tokenizer) -> None:
    async def run() -> None:
        async with AsyncLLM(make(), tokenizer, config=EngineConfig(), gate=GateConfig(every=1, act=False)) as llm:
            done = await llm.blend(PARTS, recipe=REUSE, max_tokens=2, temperature=0.0)
            assert done.usage.recipe == REUSE.name
            while llm.certificates()[0].count < 1:  # nobody asks for anything meanwhile
                await asyncio.sleep(0.01)
            await llm.blend(PARTS, recipe=REUSE, max_tokens=1)
            assert await llm.drain(30)
        (known,) = llm.certificates()
        dropped = llm.engine.metrics.snapshot()[DROPPED.name]["series"]
        assert known.count + sum(point["value"] for point in dropped) == 2

    asyncio.run(run())


def test_a_server_has_one() -> None:
    defaults = {name: option.default for name, option in SERVER.options.items()}
    assert gate_of(defaults) == GateConfig()
    given = {**defaults, "gate_every": 0, "gate_max_kl": 0.5, "gate_act": False, "gate_path": "/x/y"}
    assert gate_of(given) == GateConfig(every=0, max_kl=0.5, act=False, path=Path("/x/y"))
