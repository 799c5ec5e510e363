"""Contract D, what `LlmExecutor` serves and says: adapters, reuse, evictions, a closed executor, races on its table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import write_lora
from small import CONTEXT, Ask, finish, load_mixed, start
from tiny import write_tiny

from kvilt import DecodeInput, Executor, LlmExecutor, PrefillInput, UnifiedBatch, UnifiedItem
from kvilt.batch import Batch
from kvilt.config import EngineConfig, RunConfig
from kvilt.engine.engine import Engine
from kvilt.errors import AdapterUnknown, InputError, ModelClosed
from kvilt.executor.load import load_executor
from kvilt.sampling.params import SamplingParams

A, B = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7], [1, 2, 3]
LONG = [(i * 7 + 3) % 61 for i in range(100)]  # three whole pages and a bit


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    """Sixteen pages, and caches of at most eight of them."""
    page_bytes = 32 * 3 * 2 * 12 * 4
    config = RunConfig(kv_memory=16 * page_bytes, kv_dtype="float32", backend="native", threads=1)
    executor = load_executor(write_tiny(tmp_path / "model"), config)
    yield executor
    executor.close()


@pytest.fixture
def served(executor: Executor) -> Iterator[LlmExecutor]:
    served = LlmExecutor(executor)
    yield served
    served.table.clear()
    assert executor.pool.usage().used == 0


def alone(executor: Executor, ids: list[int], **lora: Any) -> torch.Tensor:
    with executor.create_kv_cache() as kv:
        return executor.step(ids, kv, **lora)[0]


def counted(served: LlmExecutor) -> dict[str, int]:
    found = served.cache_metrics_snapshot()
    assert found is not None
    return found


# Adapters.


def test_rows_with_adapters_and_without_share_a_step(
    executor: Executor, served: LlmExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = executor.load_lora(write_lora(tmp_path / "one", 4, seed=1))
    two = executor.load_lora(write_lora(tmp_path / "two", 9, seed=2))
    kinds: dict[str, dict[str, Any]] = {
        "a": {}, "b": {"lora_id": one}, "c": {"lora_id": one, "lora_scale": 0.5}, "d": {"lora_id": two}
    }  # fmt: skip
    rows: list[int] = []
    run = executor.run
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda batch: rows.append(len(batch.rows)) or run(batch))
        prompts = served.batch_prefill([PrefillInput(name, A, **kind) for name, kind in kinds.items()])
        decoded = served.batch_decode([DecodeInput(name, 4, **kind) for name, kind in kinds.items()])
        mixed = served.unified_decode(
            UnifiedBatch(
                [
                    *(UnifiedItem(name, [8], 13, **kind) for name, kind in kinds.items()),
                    UnifiedItem("e", B, 0, **kinds["d"]),
                ]
            )
        )
        drafts = served.forward_verify([DecodeInput("b", token, lora_id=one) for token in (1, 2)])
    assert rows == [4, 4, 5, 1]
    for i, kind in enumerate(kinds.values()):
        assert torch.equal(prompts[i].logits, alone(executor, A, **kind))
        assert torch.equal(decoded[i].logits, alone(executor, [*A, 4], **kind))
        assert torch.equal(mixed[i], alone(executor, [*A, 4, 8], **kind))
    assert torch.equal(mixed[4], alone(executor, B, **kinds["d"]))
    assert torch.equal(drafts[1].logits, alone(executor, [*A, 4, 8, 1, 2], lora_id=one))
    assert len({tuple(output.logits.tolist()) for output in prompts}) == 4
    served.release_cache("e")


def test_a_cache_never_goes_on_with_another_adapter(executor: Executor, served: LlmExecutor, tmp_path: Path) -> None:
    lora = executor.load_lora(write_lora(tmp_path / "one"))
    served.prefill(PrefillInput("a", A, lora_id=lora))
    for wrong in ({}, {"lora_id": lora, "lora_scale": 0.5}, {"lora_id": 99}):
        with pytest.raises((InputError, AdapterUnknown)):
            served.decode(DecodeInput("a", 1, **wrong))
    with pytest.raises(InputError, match="same adapter"):
        served.forward_verify([DecodeInput("a", 1, lora_id=lora), DecodeInput("a", 2)])
    assert torch.equal(served.decode(DecodeInput("a", 1, lora_id=lora)).logits, alone(executor, [*A, 1], lora_id=lora))
    before = counted(served)
    again = served.prefill(PrefillInput("a", [*A, 9]))  # the same beginning, but KV of an adapter: computed again
    assert torch.equal(again.logits, alone(executor, [*A, 9]))
    assert counted(served)["misses"] - before["misses"] == 1


def test_an_adapter_that_tokens_switch_on(executor: Executor, served: LlmExecutor, tmp_path: Path) -> None:
    lora = executor.load_lora(write_lora(tmp_path / "called", alora_invocation_tokens=[44, 21]))
    served.prefill(PrefillInput("a", A, lora_id=lora))
    output = served.decode(DecodeInput("a", 6, lora_id=lora))
    assert torch.equal(output.logits, alone(executor, [*A, 6], lora_id=lora))
    with pytest.raises(InputError, match="switched on"):
        served.prefill(PrefillInput("b", B, lora_id=lora))


# Reuse.


def test_the_same_prompt_under_a_new_id_is_a_hit(executor: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", LONG))
    computed = executor.metrics.snapshot()["kvilt_computed_tokens_total"]["series"][0]["value"]
    before = counted(served)
    output = served.prefill(PrefillInput("b", LONG))
    after = counted(served)
    assert [after[name] - before[name] for name in ("hits", "misses", "saved_tokens")] == [1, 0, 96]
    assert (before["pages_shared"], after["pages_shared"]) == (0, 3)
    total = executor.metrics.snapshot()["kvilt_computed_tokens_total"]["series"][0]["value"]
    assert total - computed == len(LONG) - 96
    assert torch.equal(output.logits, alone(executor, LONG))
    served.release_cache("a")
    assert counted(served)["pages_shared"] == 0


def test_all_of_a_known_prompt_but_its_last_token_is_reused(executor: Executor, served: LlmExecutor) -> None:
    """Also where whole pages end just before the last token."""
    prompt = LONG[:97]
    served.prefill(PrefillInput("a", prompt))
    before = counted(served)["saved_tokens"]
    served.prefill(PrefillInput("b", prompt))
    assert counted(served)["saved_tokens"] - before == 96


def test_a_prompt_takes_the_longer_of_its_own_cache_and_the_index(executor: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", LONG[:10]))
    served.prefill(PrefillInput("b", LONG))
    before = counted(served)["saved_tokens"]
    output = served.prefill(PrefillInput("a", LONG))
    assert counted(served)["saved_tokens"] - before == 96
    assert torch.equal(output.logits, alone(executor, LONG))
    again = served.prefill(PrefillInput("a", [*LONG, 3]))  # now its own cache has more
    assert counted(served)["saved_tokens"] - before == 96 + len(LONG)
    assert torch.equal(again.logits, alone(executor, [*LONG, 3]))


def test_a_first_chunk_is_looked_up_too(executor: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", LONG))
    served.release_cache("a")
    before = counted(served)
    items = [UnifiedItem("b", LONG[:70], 0, is_final_chunk=False)]
    assert served.unified_decode(UnifiedBatch(items)) == [None]
    (logits,) = served.unified_decode(UnifiedBatch([UnifiedItem("b", LONG[70:], 70)]))
    assert torch.equal(logits, alone(executor, LONG))
    assert counted(served)["saved_tokens"] - before["saved_tokens"] == 64


def test_what_was_generated_is_found_after_its_release(executor: Executor, served: LlmExecutor) -> None:
    said = list(LONG[:60])
    served.prefill(PrefillInput("a", said))
    for token in (1, 2, 3, 4, 5):
        served.decode(DecodeInput("a", token))
        said.append(token)
    served.release_cache("a")
    before = counted(served)
    output = served.prefill(PrefillInput("b", [*said, 7]))
    assert counted(served)["saved_tokens"] - before["saved_tokens"] == 64
    assert torch.equal(output.logits, alone(executor, [*said, 7]))


def test_kv_of_an_adapter_is_no_hit_for_others(executor: Executor, served: LlmExecutor, tmp_path: Path) -> None:
    lora = executor.load_lora(write_lora(tmp_path / "one"))
    served.prefill(PrefillInput("a", LONG, lora_id=lora))
    before = counted(served)
    assert torch.equal(served.prefill(PrefillInput("b", LONG)).logits, alone(executor, LONG))
    assert counted(served)["hits"] == before["hits"]
    served.release_cache("b")
    served.release_cache("a")
    served.prefill(PrefillInput("c", LONG, lora_id=lora))
    assert counted(served)["hits"] - before["hits"] == 1


def test_what_the_engine_reused_is_visible(executor: Executor, served: LlmExecutor) -> None:
    engine = Engine(executor, EngineConfig(step_tokens=64, max_rows=4))
    before = counted(served)
    for _ in range(2):
        start(engine, Ask(tuple(LONG), SamplingParams(max_tokens=2)))
        finish(engine)
    after = counted(served)
    assert [after[name] - before[name] for name in ("hits", "misses", "saved_tokens")] == [1, 1, 96]
    output = served.prefill(PrefillInput("a", LONG))  # and the other way round
    assert counted(served)["saved_tokens"] - after["saved_tokens"] == 96
    assert torch.equal(output.logits, alone(executor, LONG))


def test_evictions_are_counted_where_hits_are(executor: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", LONG))
    served.release_cache("a")
    before = counted(served)
    assert (before["evictions"], before["pages_cached"]) == (0, 3)
    served.batch_prefill([PrefillInput(name, [token] * 8 * 32) for name, token in (("b", 40), ("c", 41))])  # every page
    after = counted(served)
    assert after["evictions"] == 3
    served.table.clear()
    served.prefill(PrefillInput("a", LONG))
    assert counted(served)["misses"] - after["misses"] == 1


# Windows with few pages.


def test_prompts_that_are_longer_than_a_step_may_be(tmp_path: Path) -> None:
    """A pool may have few pages for windows; then a forward takes as many tokens as they have room for."""
    executor = load_mixed(tmp_path, [40, 9])
    served, most = LlmExecutor(executor), executor.pool.step_tokens
    assert most == 32
    assert served.kv_capacity() == CONTEXT, "the windows hold any length"
    prompt = [(i * 7) % 61 for i in range(400)]
    output = served.prefill(PrefillInput("a", prompt))
    drafts = served.forward_verify([DecodeInput("a", token) for token in range(40)])  # more than a step as well
    served.release_cache("a")
    expected = executor.score([*prompt, *range(40)]).logprobs
    assert torch.equal(output.logits, alone(executor, prompt))
    for n, one in enumerate(drafts[:-1]):
        logprob = one.logits.log_softmax(-1)[n + 1]
        torch.testing.assert_close(logprob, expected[len(prompt) + n], rtol=1e-4, atol=1e-4)
    items = [UnifiedItem("b", prompt[:150], 0, is_final_chunk=False), UnifiedItem("c", B, 0)]
    found = served.unified_decode(UnifiedBatch(items))
    assert found[0] is None and torch.equal(found[1], alone(executor, B))
    exact = [
        UnifiedItem("d", prompt[:most], 0),
        UnifiedItem("e", prompt[: most + 1], 0),
    ]
    for one, item in zip(served.unified_decode(UnifiedBatch(exact)), exact, strict=True):
        assert one is not None and torch.equal(one, alone(executor, list(item.tokens)))
    for name in ("d", "e"):
        served.release_cache(name)
    with executor.create_kv_cache() as held:
        executor.prefill(prompt[:150], held)
        assert (served.kv_capacity() or 0) < CONTEXT, "with windows in use there is room for less"
    served.table.clear()
    assert executor.pool.usage().used == 0


def test_a_step_that_fails_keeps_no_page(
    executor: Executor, served: LlmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("a kernel broke")

    served.prefill(PrefillInput("a", LONG[:30]))
    used = executor.pool.usage().used
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", fail)
        for call in (
            lambda: served.forward_verify([DecodeInput("a", token) for token in range(8)]),  # a second page
            lambda: served.prefill(PrefillInput("b", LONG)),
        ):
            with pytest.raises(RuntimeError):
                call()
            assert executor.pool.usage().used == used
    assert torch.equal(served.decode(DecodeInput("a", 4)).logits, alone(executor, [*LONG[:30], 4]))


# Closed.


def test_a_closed_executor_says_so(tmp_path: Path) -> None:
    executor = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 20, threads=1))
    served = LlmExecutor(executor)
    served.prefill(PrefillInput("a", A))
    before, could = served.status(), served.capabilities()
    assert (before.closed, could.closed, could.lora, could.drafts, could.blending) == (False, False, True, True, True)
    assert could.max_rows == min(executor.pool.group_pages) and served.kv_capacity()
    executor.close()
    can, status = served.capabilities(), served.status()
    assert (can.closed, can.lora, can.drafts, can.blending, can.max_rows) == (True, False, False, False, 0)
    assert (can.family, can.layer_groups, can.kv_dtypes) == (could.family, could.layer_groups, could.kv_dtypes)
    assert (status.closed, status.busy, status.caches, status.tokens) == (True, False, 1, len(A))
    assert served.kv_capacity() == 0
    with pytest.raises(ModelClosed):
        served.decode(DecodeInput("a", 1))
    served.release_cache("a")
    assert (served.status().caches, served.status().pages_used) == (0, 0)


# Races.


@pytest.mark.parametrize(
    "other",
    [
        lambda served: served.release_cache("a"),
        lambda served: served.truncate_kv_for_cache_id("a", 1),
        lambda served: served.prefill(PrefillInput("a", B)),
    ],
    ids=["release", "truncate", "prefill"],
)
def test_no_other_call_comes_between_the_parts_of_one(
    executor: Executor, served: LlmExecutor, monkeypatch: pytest.MonkeyPatch, other: Callable[[LlmExecutor], object]
) -> None:
    """A second thread that would change the same cache waits until the first call has committed what it ran."""
    served.prefill(PrefillInput("a", A))
    run, inside, done = executor.run, threading.Event(), threading.Event()

    def second() -> None:
        assert inside.wait(300)
        other(served)
        done.set()

    def slow(batch: Batch) -> object:
        monkeypatch.setattr(executor, "run", run)
        inside.set()
        assert not done.wait(0.3), "the other call did not wait"
        return run(batch)

    monkeypatch.setattr(executor, "run", slow)
    thread = threading.Thread(target=second)
    thread.start()
    output = served.decode(DecodeInput("a", 4))
    thread.join(300)
    assert done.is_set()
    assert output.cache.length == len(A) + 1
    assert torch.equal(output.logits, alone(executor, [*A, 4]))
