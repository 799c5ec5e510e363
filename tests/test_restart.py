"""A model is closed and loaded again, with a store between: prompts stay warm, and answers are the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvilt.llm import load, load_async
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

OPTIONS = {"threads": 1, "kv_memory": "128M", "max_context": 512}
RULES = "You answer questions about towers. " + "Each answer names a tower, a city and a height in metres. " * 8
ASKED = [{"role": "system", "content": RULES}, {"role": "user", "content": "Which one is in Paris?"}]


def on_disk(folder: Path) -> Store:
    return Store(
        Budget(1 << 28), [Disk(folder, Budget(1 << 30))], limits=StoreLimits(lookup_s=300, layer_s=300, close_s=300)
    )


def test_a_restart_keeps_warm_prompts(smollm2_path: Path, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store, load(smollm2_path, store=store, **OPTIONS) as llm:
        cold = llm.chat(ASKED, max_tokens=8, temperature=0.0)
        assert cold.usage.prefix_hit == 0
    with on_disk(tmp_path) as store, load(smollm2_path, store=store, **OPTIONS) as llm:
        warm = llm.chat(ASKED, max_tokens=8, temperature=0.0)
        assert warm.token_ids == cold.token_ids
        assert warm.usage.prefix_hit == warm.usage.prompt_tokens // 32 * 32
        assert warm.usage.computed + warm.usage.prefix_hit == warm.usage.prompt_tokens

    async def answers() -> None:
        async with load_async(smollm2_path, store=store, **OPTIONS) as served:
            for tenant, found in (("", warm.usage.prefix_hit), ("somebody else", 0)):
                done = await served.chat(ASKED, max_tokens=8, temperature=0.0, tenant=tenant)
                assert done.token_ids == cold.token_ids
                assert done.usage.prefix_hit == found

    with on_disk(tmp_path) as store:
        asyncio.run(answers())
