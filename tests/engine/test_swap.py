"""Pages that leave for host memory and come back, with copies that arrive as late as they may: no token changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from late_copies import LateStream, staged
from small import Ask, load_small, run, start

from kvilt.config import EngineConfig
from kvilt.engine import engine as engine_module
from kvilt.engine.counters import RESTORED
from kvilt.engine.engine import Engine
from kvilt.engine.features.prefix_restore import PrefixRestore
from kvilt.executor.protocol import Executor
from kvilt.metrics import Metrics
from kvilt.sampling.params import SamplingParams
from kvilt.store.store import Store
from kvilt.store.tier import Budget

PROMPTS = [tuple((k * i + i // 5) % 60 for i in range(120)) for k in (3, 7, 11)]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def test_swapped_pages_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = load_small(tmp_path, 8, None, "reference")  # room for one prompt and a half
    alone = [Ask(one, GREEDY).alone(executor) for one in PROMPTS]
    executor.prefixes.clear()
    monkeypatch.setattr(executor.pool.ops, "host_copies", staged(LateStream()))
    # As on a GPU: on the CPU a store that has only memory would keep the same bytes twice.
    monkeypatch.setattr(engine_module, "_prefix_restore", swapping)
    with Store(Budget(1 << 26)) as store:
        engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=8), store=store)
        for _ in range(2):
            ears = [start(engine, Ask(one, GREEDY)) for one in PROMPTS]
            run(engine, lambda ears=ears: all(ear.over for ear in ears))  # type: ignore[misc]
            assert [ear.tokens[0] for ear in ears] == alone
        assert sum(one["value"] for one in engine.metrics.snapshot()[RESTORED.name]["series"]) > 0


def swapping(
    executor: Executor, store: Store, _config: EngineConfig, metrics: Metrics, wake: Callable[[], None]
) -> PrefixRestore:
    return PrefixRestore(executor, store, 32, metrics, wake)
