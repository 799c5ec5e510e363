"""Contract D: the executor of a scheduler, sentence by sentence, on `kvilt.LlmExecutor`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import write_tiny, write_tiny_mixed

from kvilt import Executor, LlmExecutor
from kvilt.batch import Batch, Ids, Last, Row
from kvilt.compat.exchange import CacheHandle, DecodeInput, PrefillInput, UnifiedBatch, UnifiedItem
from kvilt.config import RunConfig
from kvilt.errors import ContextOverflow, InputError, TruncateError
from kvilt.executor.load import load_executor
from kvilt.weights.safetensors import SafetensorsFiles
from kvilt.weights.tensor_storage import TensorStorage

A = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]
B = [1, 2, 3]
C = [40] * 33


@pytest.fixture
def served(tiny: Executor) -> Iterator[LlmExecutor]:
    executor = LlmExecutor(tiny)
    yield executor
    for cache_id in "abcd":
        executor.release_cache(cache_id)
    assert tiny.pool.usage().used == 0


class Forwards:
    """Counts the forwards of an executor, and their rows."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        run = executor.run

        def counting(batch: Batch) -> object:
            self.rows.append(len(batch.rows))
            return run(batch)

        monkeypatch.setattr(executor, "run", counting)


@pytest.fixture
def forwards(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    return Forwards(tiny, monkeypatch)


def alone(executor: Executor, ids: list[int]) -> torch.Tensor:
    """Logits of every position of a prompt that is alone in its forward."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        return type(executor).run(executor, Batch.of([Row(Ids(ids), range(len(ids)), kv, want=Last(len(ids)))])).values


def close(ours: torch.Tensor | None, theirs: torch.Tensor) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_batch_prefill_is_one_forward(tiny: Executor, served: LlmExecutor, forwards: Forwards) -> None:
    """ "Batched prefill: combine all prompts into ONE model.unified_forward call so launch / kernel-overhead is
    amortized across the cohort." Here there is no fallback: it is one forward, ragged."""
    outputs = served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B), PrefillInput("c", C)])
    assert forwards.rows == [3]
    for output, prompt, name in zip(outputs, (A, B, C), "abc", strict=True):
        close(output.logits, alone(tiny, prompt)[-1])
        assert output.logits.shape == (tiny.spec.vocab_size,)
        assert output.cache == CacheHandle(name, len(prompt))


def test_batch_decode_batches_attention(tiny: Executor, served: LlmExecutor, forwards: Forwards) -> None:
    """ "Does not yet do true attention batching (each cache has its own kv_len)": here it does, in one forward."""
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B), PrefillInput("c", C)])
    outputs = served.batch_decode([DecodeInput("c", 4), DecodeInput("a", 5), DecodeInput("b", 6)])
    assert forwards.rows == [3, 3]
    for output, ids in zip(outputs, ([*C, 4], [*A, 5], [*B, 6]), strict=True):
        close(output.logits, alone(tiny, ids)[-1])
        assert output.cache.length == len(ids)


def test_prefill_and_decode_are_the_batch_of_one(tiny: Executor, served: LlmExecutor) -> None:
    close(served.prefill(PrefillInput("a", A)).logits, alone(tiny, A)[-1])
    close(served.decode(DecodeInput("a", 9)).logits, alone(tiny, [*A, 9])[-1])


def test_unified_decode_mixes_chunks_and_decodes(tiny: Executor, served: LlmExecutor, forwards: Forwards) -> None:
    """ "Unified mixed-batch dispatch (chunked-prefill API)." One forward, logits where a chunk is final, order kept."""
    served.prefill(PrefillInput("d", B))
    first = served.unified_decode(
        UnifiedBatch(
            [
                UnifiedItem("a", A[:5], 0, is_final_chunk=False),
                UnifiedItem("d", [8], 3),
                UnifiedItem("b", B, 0),
                UnifiedItem("c", C[:20], 0, is_final_chunk=False),
            ]
        )
    )
    assert [logits is None for logits in first] == [True, False, False, True]
    close(first[1], alone(tiny, [*B, 8])[-1])
    close(first[2], alone(tiny, B)[-1])
    second = served.unified_decode(
        UnifiedBatch([UnifiedItem("c", C[20:], 20), UnifiedItem("a", A[5:], 5), UnifiedItem("b", [7], 3)])
    )
    close(second[0], alone(tiny, C)[-1])
    close(second[1], alone(tiny, A)[-1])
    close(second[2], alone(tiny, [*B, 7])[-1])
    assert forwards.rows == [1, 4, 3]


def test_forward_verify_gives_one_row_of_logits_per_position(
    tiny: Executor, served: LlmExecutor, forwards: Forwards
) -> None:
    """ "N+1 tokens, producing one logits row per position." """
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    drafts = [DecodeInput("a", 1), DecodeInput("b", 9), DecodeInput("a", 2), DecodeInput("a", 3), DecodeInput("b", 8)]
    outputs = served.forward_verify(drafts)
    assert forwards.rows == [2, 2]
    expected_a, expected_b = alone(tiny, [*A, 1, 2, 3])[-3:], alone(tiny, [*B, 9, 8])[-2:]
    for output, row in zip(
        outputs, (expected_a[0], expected_b[0], expected_a[1], expected_a[2], expected_b[1]), strict=True
    ):
        close(output.logits, row)
    assert [output.cache.length for output in outputs] == [13, 4, 14, 15, 5]


def test_truncate_after_rejection(tiny: Executor, served: LlmExecutor) -> None:
    """ "Used by speculative decoding on partial rejection so the next iteration sees a KV prefix that matches the
    accepted token stream." """
    stale = served.prefill(PrefillInput("a", A)).cache
    handle = served.forward_verify([DecodeInput("a", token) for token in (1, 2, 3)])[-1].cache
    for wrong in (stale, CacheHandle("a", 0), CacheHandle("a", len(A) + 4)):
        with pytest.raises(InputError, match=rf"handle of cache 'a' says {wrong.length} tokens .* holds {len(A) + 3}"):
            served.truncate_kv(wrong, len(A) + 1)
    with pytest.raises(InputError, match="no cache 'x'"):
        served.truncate_kv(CacheHandle("x", 0), 0)
    handle = served.truncate_kv(handle, len(A) + 1)
    assert handle == CacheHandle("a", len(A) + 1)
    close(served.decode(DecodeInput("a", 9)).logits, alone(tiny, [*A, 1, 9])[-1])


def test_truncate_kv_for_cache_id(tiny: Executor, served: LlmExecutor) -> None:
    """ "Roll the KV cache for cache_id back to new_len positions." Whole pages go back to the pool."""
    served.prefill(PrefillInput("c", C))
    used = tiny.pool.usage().used
    served.truncate_kv_for_cache_id("c", 30)
    assert tiny.pool.usage().used < used
    close(served.decode(DecodeInput("c", 1)).logits, alone(tiny, [*C[:30], 1])[-1])


def test_truncate_refuses_growth_and_unknown_ids(served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", A))
    for length in (len(A) + 1, -1):
        with pytest.raises(TruncateError):
            served.truncate_kv_for_cache_id("a", length)
        with pytest.raises(TruncateError):
            served.truncate_kv(CacheHandle("a", len(A)), length)
    with pytest.raises(InputError, match="'x'"):
        served.truncate_kv_for_cache_id("x", 0)


def test_release_cache_is_idempotent(tiny: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", A))
    served.release_cache("a")
    served.release_cache("a")
    served.release_cache("never seen")
    assert tiny.pool.usage().used == 0
    with pytest.raises(InputError, match="prefill it first"):
        served.decode(DecodeInput("a", 1))


def test_kv_capacity_is_what_a_cache_may_hold_now(tmp_path: Path) -> None:
    executor = load_executor(
        write_tiny(tmp_path), RunConfig(kv_memory=6 * 32 * 3 * 2 * 12 * 2, kv_dtype="float16")
    )  # six pages
    served = LlmExecutor(executor)
    assert served.kv_capacity() == 6 * 32
    served.prefill(PrefillInput("a", C))  # two pages
    assert served.kv_capacity() == 4 * 32
    served.release_cache("a")
    assert served.kv_capacity() == 6 * 32
    short = LlmExecutor(load_executor(tmp_path, RunConfig(kv_memory=1 << 20, max_context=40)))
    assert short.kv_capacity() == 40


def test_capabilities_follow_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ferrum returns constants; here another configuration gives other capabilities."""
    plain = LlmExecutor(
        load_executor(write_tiny(tmp_path / "full"), RunConfig(kv_memory=1 << 20, backend="native"))
    ).capabilities()
    other = LlmExecutor(
        load_executor(
            write_tiny(tmp_path / "window", sliding_window=9),
            RunConfig(kv_memory=1 << 19, max_context=100, kv_dtype="bfloat16", backend="reference"),
        )
    ).capabilities()
    monkeypatch.setattr("kvilt.executor.load.PAGE_TOKENS", 16)
    third = load_executor(write_tiny_mixed(tmp_path / "mixed", 9), RunConfig(kv_memory=1 << 20, threads=1))
    mixed = LlmExecutor(third).capabilities()
    assert (plain.family, mixed.family) == ("llama", "qwen2")
    assert (plain.page_tokens, mixed.page_tokens) == (32, 16)
    assert (plain.device, plain.devices) == ("cpu", ("cpu",))
    with monkeypatch.context() as patch:
        patch.setattr(third.pool, "device", torch.device("meta"))
        moved = LlmExecutor(third).capabilities()
        assert (moved.device, moved.devices) == ("meta", ("meta",))
    assert (plain.kv_dtypes, mixed.layer_groups) == (("float16",), ("full", "window"))
    assert mixed.kv_dtypes == tuple(group.shape.dtype.name for group in third.layout.groups)
    assert (plain.lora, plain.drafts, plain.blending, plain.closed) == (True, True, True, False)
    assert (plain.layer_groups, other.layer_groups) == (("full",), ("window",))
    assert (plain.max_context, other.max_context) == (256, 100)
    assert (plain.kv_dtype, other.kv_dtype) == ("float16", "bfloat16")
    assert plain.max_rows == (1 << 20) // (32 * 3 * 2 * 12 * 2) and other.max_rows == plain.max_rows // 2
    assert (plain.backend, other.backend) == ("native", "reference")
    assert plain.numerics.startswith("native")
    assert plain.expanded_formats == ()  # its weights are floats
    assert (plain.deterministic, other.deterministic) == (True, False)


def test_capabilities_name_formats_that_are_held_as_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if the file had tensors in three formats: the native backend has no kernels for one of them."""
    formats, places = ["IQ2_S", "Q4_K", "F16"], dict[str, int]()

    def storage(_source: object, name: str) -> TensorStorage:
        place = places.setdefault(name, len(places))
        return TensorStorage(formats[place] if place < len(formats) else "F32", 1)

    monkeypatch.setattr(SafetensorsFiles, "storage", storage)
    executor = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 20, backend="native"))
    found = LlmExecutor(executor).capabilities()
    assert found.expanded_formats == ("IQ2_S",)
    assert found.weight_kernels == (
        "F16: float16 tiles",
        "F32: float32 tiles",
        "IQ2_S: float32 tiles, unpacked at load",
        "Q4_K: q4_k tiles",
    )


def test_status_follows_the_truth(tiny: Executor, served: LlmExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = served.status()
    assert (empty.busy, empty.caches, empty.tokens, empty.pages_used) == (False, 0, 0, 0)
    served.batch_prefill([PrefillInput("a", A), PrefillInput("c", C)])
    full = served.status()
    assert (full.caches, full.tokens) == (2, len(A) + len(C))
    assert full.pages_used == tiny.pool.usage().used > 0
    assert full.pages_used + full.pages_free == full.pages_total
    seen = []
    decoder = tiny._decoder
    monkeypatch.setattr(tiny._replay, "_recorder", None)  # a replayed step does not pass the decoder
    monkeypatch.setattr(tiny, "_decoder", lambda *args: seen.append(served.status().busy) or decoder(*args))
    monkeypatch.setattr(type(tiny), "spec", property(lambda _self: decoder.spec))
    served.decode(DecodeInput("a", 1))
    assert seen == [True]


def test_cache_metrics_are_counted(tiny: Executor, served: LlmExecutor) -> None:
    """A second prompt with the same beginning under the same id computes only the rest."""
    start = served.cache_metrics_snapshot()
    assert start["pages_used"] == 0
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    computed = tiny.metrics.snapshot()["kvilt_computed_tokens_total"]["series"][0]["value"]
    close(served.prefill(PrefillInput("a", [*A, 1, 2])).logits, alone(tiny, [*A, 1, 2])[-1])
    after = served.cache_metrics_snapshot()
    assert [after[name] - start[name] for name in ("hits", "misses", "saved_tokens")] == [1, 2, len(A)]
    assert after["pages_used"] + after["pages_free"] == tiny.pool.usage().total
    assert after["bytes_used"] == tiny.pool.usage().used_bytes > 0
    total = tiny.metrics.snapshot()["kvilt_computed_tokens_total"]["series"][0]["value"]
    assert total - computed == 2 + len(A) + 2  # ours, and the one beside it that checks


def test_a_prompt_that_differs_starts_where_it_differs(tiny: Executor, served: LlmExecutor) -> None:
    served.prefill(PrefillInput("a", A))
    before, changed = served.cache_metrics_snapshot(), [*A[:7], 50, 51]
    close(served.prefill(PrefillInput("a", changed)).logits, alone(tiny, changed)[-1])
    assert served.cache_metrics_snapshot()["saved_tokens"] - before["saved_tokens"] == 7
    close(served.prefill(PrefillInput("a", changed)).logits, alone(tiny, changed)[-1])  # the very same again


def test_lora_metrics_are_counted(tiny: Executor, served: LlmExecutor) -> None:
    before = served.lora_metrics_snapshot()["rows"].get("base", 0)
    served.batch_prefill([PrefillInput("a", A), PrefillInput("b", B)])
    after = served.lora_metrics_snapshot()
    assert after["rows"]["base"] - before == 2
    assert (after["loaded"], after["active"]) == (0, 0)


def test_forward_is_the_primitive(tiny: Executor, served: LlmExecutor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(len(A))
        batch = Batch.of([Row(Ids(A), range(len(A)), kv)])
        assert torch.equal(served.forward(batch).values, tiny.run(batch).values)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda served: served.batch_prefill([PrefillInput("a", [1]), PrefillInput("b", [])]),
        lambda served: served.batch_prefill([PrefillInput("a", [1]), PrefillInput("a", [2])]),
        lambda served: served.batch_prefill([PrefillInput("a", [1]), PrefillInput("b", [999])]),
        lambda served: served.batch_prefill([PrefillInput("a", [1]), PrefillInput("b", [3] * 257)]),
        lambda served: served.batch_decode([DecodeInput("d", 1), DecodeInput("x", 2)]),
        lambda served: served.batch_decode([DecodeInput("d", 1), DecodeInput("d", 2)]),
        lambda served: served.unified_decode(UnifiedBatch([UnifiedItem("d", [1], 3), UnifiedItem("b", [1], 1)])),
        lambda served: served.unified_decode(UnifiedBatch([UnifiedItem("b", [1], 0), UnifiedItem("d", [1], 2)])),
        lambda served: served.forward_verify([DecodeInput("d", 1), DecodeInput("d", -1)]),
    ],
)
def test_a_batch_with_one_wrong_item_changes_nothing(served: LlmExecutor, wrong: object) -> None:
    served.prefill(PrefillInput("d", B))
    before = served.status()
    with pytest.raises((InputError, ContextOverflow)):
        wrong(served)  # type: ignore[operator]
    assert served.status() == before


def test_empty_batches_are_empty(served: LlmExecutor, forwards: Forwards) -> None:
    assert served.batch_prefill([]) == served.batch_decode([]) == served.forward_verify([]) == []
    assert served.unified_decode(UnifiedBatch([])) == []
    assert forwards.rows == []


def test_a_status_may_be_asked_for_while_caches_come_and_go(tiny: Executor) -> None:
    served, errors, done = LlmExecutor(tiny), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                served.status()
            except Exception as error:
                errors.append(error)

    watcher, interval = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        watcher.start()
        for i in range(150):
            served.prefill(PrefillInput(f"c{i % 7}", [1, 2, i % 50]))
            served.release_cache(f"c{(i + 3) % 7}")
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(interval)
        for i in range(7):
            served.release_cache(f"c{i}")
    assert errors == []
