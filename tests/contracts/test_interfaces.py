"""The seeds' interfaces as protocols: the same contract for kvilt's classes and for those that others wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from third_party import TorchExecutor, ToyCache, ToyModel
from tiny import write_tiny

import kvilt
from kvilt import (
    DecoderOnlyLLM,
    KVCacheInterface,
    LlmExecutorBaseInterface,
    LlmExecutorExternalSamplerInterface,
    LlmExecutorInternalSamplerInterface,
    PagedLLM,
)
from kvilt.config import RunConfig
from kvilt.errors import Cancelled, KviltError
from kvilt.executor.load import load_executor

PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]
OTHER = [40] * 40  # more than a page


@pytest.fixture(scope="module", params=["kvilt", "third party"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An executor for the tiny model: kvilt's own, or one in plain torch over kvilt's cache."""
    folder = write_tiny(tmp_path_factory.mktemp("model"))
    if request.param == "third party":
        return TorchExecutor(folder)
    return load_executor(folder, RunConfig(kv_memory=1 << 22, kv_dtype="float32", backend="reference", threads=1))


def greedy(executor: Any, prompt: Sequence[int], steps: int) -> list[int]:
    with executor.create_kv_cache() as kv:
        return [int(token) for token in executor.sample_tokens(steps, list(prompt), kv)[0]]


def test_every_interface_is_exported_and_typed() -> None:
    for name in kvilt.__all__:
        assert getattr(kvilt, name) is not None
    for interface in (
        KVCacheInterface,
        LlmExecutorBaseInterface,
        LlmExecutorExternalSamplerInterface,
        LlmExecutorInternalSamplerInterface,
        DecoderOnlyLLM,
    ):
        assert getattr(interface, "_is_protocol", False)


def test_who_implements_what(executor: Any) -> None:
    for interface in (
        LlmExecutorBaseInterface,
        LlmExecutorExternalSamplerInterface,
        LlmExecutorInternalSamplerInterface,
    ):
        assert isinstance(executor, interface)
        assert not isinstance(ToyModel(), interface)
    with executor.create_kv_cache() as kv:
        assert isinstance(kv, KVCacheInterface)
    assert isinstance(ToyCache(), KVCacheInterface)
    assert not isinstance(ToyModel(), KVCacheInterface)


def test_the_model_trait_has_a_default_batch() -> None:
    """ "Default implementation loops `decode` sequentially." """

    class Derived(ToyModel, DecoderOnlyLLM):
        pass

    model = Derived()
    assert isinstance(model, DecoderOnlyLLM)
    assert not isinstance(ToyModel(), DecoderOnlyLLM), "it has no decode_batch of its own"
    model.prefill("a", [1, 2])
    model.prefill("b", [3])
    found = model.decode_batch([("b", 4, 1), ("a", 5, 2)])
    assert found == [model.logits([3, 4]), model.logits([1, 2, 5])]
    assert model.calls[-2:] == ["decode b 1", "decode a 2"]
    assert model.reset() is None
    assert issubclass(PagedLLM, DecoderOnlyLLM)


# The executor's contract.


def test_the_executor_is_stateless(executor: Any) -> None:
    """ "The executor is expected to be stateless." """
    alone = [greedy(executor, prompt, 5) for prompt in (PROMPT, OTHER)]
    with executor.create_kv_cache() as a, executor.create_kv_cache() as b:
        pending, out = [PROMPT, OTHER], [[], []]
        for _ in range(5):
            for i, kv in enumerate((a, b)):
                (row,) = executor.sample_tokens(1, pending[i], kv)
                out[i].append(int(row[0]))
                pending[i] = out[i][-1:]
        assert out == alone


def test_prefill_updates_the_cache(executor: Any) -> None:
    """ "The executor is expected to update the KV Cache with the provided input data." """
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as parts:
        assert executor.prefill(OTHER, kv) is None
        assert (kv.num_entries, kv.batch_size) == (len(OTHER), 1)
        for cut in (OTHER[:1], OTHER[1:36], OTHER[36:]):
            executor.prefill(cut, parts)
        assert parts.tokens() == kv.tokens() == OTHER
        torch.testing.assert_close(executor.step([4], parts), executor.step([4], kv), rtol=1e-4, atol=1e-4)


def test_step_returns_logits_for_the_provided_input(executor: Any) -> None:
    """ "The returned value is logits for the provided input." """
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(PROMPT[:-1], kv)
        logits = executor.step(PROMPT[-1:], kv)
        assert (logits.shape, logits.dtype) == ((1, 61), torch.float32)
        torch.testing.assert_close(logits, executor.step(PROMPT, other), rtol=1e-4, atol=1e-4)


def test_sample_tokens_are_single_steps(executor: Any) -> None:
    """ "Performs N decode steps synchronously. ... The function returns the sampled token ids." """
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as own:
        (sampled,) = executor.sample_tokens(7, PROMPT, kv)
        assert kv.tokens() == [*PROMPT, *sampled[:-1]]
        pending, by_hand = PROMPT, []
        for _ in range(7):
            by_hand.append(int(executor.step(pending, own).argmax()))
            pending = by_hand[-1:]
        assert list(sampled) == by_hand


def test_rows_of_a_batch_do_not_see_each_other(executor: Any) -> None:
    with executor.create_kv_cache(batch_size=2) as kv:
        executor.prefill([PROMPT, OTHER], kv)
        logits = executor.step([[1], [2]], kv)
        for row, (prompt, token) in enumerate(((PROMPT, 1), (OTHER, 2))):
            with executor.create_kv_cache() as alone:
                executor.prefill(prompt, alone)
                torch.testing.assert_close(logits[row], executor.step([token], alone)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", [[], [61], [-1]])
def test_what_is_no_input_changes_nothing(executor: Any, wrong: list[int]) -> None:
    with executor.create_kv_cache() as kv:
        executor.prefill(PROMPT, kv)
        free = executor.pool.free_pages()
        for call in (executor.prefill, executor.step, lambda ids, kv: executor.sample_tokens(2, ids, kv)):
            with pytest.raises(ValueError):
                call(wrong, kv)
        assert (kv.tokens(), executor.pool.free_pages()) == (PROMPT, free)


def test_an_unknown_adapter_never_runs_on_the_base_model(executor: Any) -> None:
    with executor.create_kv_cache() as kv:
        for call in (executor.prefill, executor.step):
            with pytest.raises(KviltError, match="adapter"):
                call(PROMPT, kv, lora_id=3000)
        assert kv.num_entries == 0
    with pytest.raises(KviltError):
        executor.unload_lora(3000)
    with pytest.raises(KviltError):
        executor.load_lora("/nowhere/at/all")


def test_cancel_is_a_no_op_when_idle(executor: Any) -> None:
    """ "If no operation is ongoing, the cancellation is a no-op." """
    expected = greedy(executor, PROMPT, 3)
    executor.cancel()
    assert greedy(executor, PROMPT, 3) == expected


def test_a_cancelled_call_leaves_the_cache_as_it_was(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Best effort cancellation of any ongoing operations." """
    expected = greedy(executor, [*PROMPT, *OTHER], 4)
    with executor.create_kv_cache() as kv:
        executor.prefill(PROMPT, kv)
        free, reserve = executor.pool.free_pages(), kv.reserve
        with monkeypatch.context() as patch:
            patch.setattr(kv, "reserve", lambda *args: (reserve(*args), executor.cancel())[0])  # when it is under way
            with pytest.raises(Cancelled):
                executor.prefill(OTHER, kv)
        assert (kv.tokens(), executor.pool.free_pages()) == (PROMPT, free)
        assert [int(token) for token in executor.sample_tokens(4, OTHER, kv)[0]] == expected


def test_both_executors_are_one_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny(tmp_path_factory.mktemp("both"))
    ours = load_executor(folder, RunConfig(kv_memory=1 << 22, kv_dtype="float32", backend="reference", threads=1))
    theirs = TorchExecutor(folder)
    with ours.create_kv_cache() as a, theirs.create_kv_cache() as b:
        torch.testing.assert_close(ours.step(OTHER, a), theirs.step(OTHER, b), rtol=1e-4, atol=1e-4)
    assert greedy(ours, PROMPT, 9) == greedy(theirs, PROMPT, 9)


# The cache's contract.


def toy_cache(rows: Sequence[Sequence[int]], _executor: Any) -> Any:
    return ToyCache(rows)


def paged_cache(rows: Sequence[Sequence[int]], executor: Any) -> Any:
    kv = executor.create_kv_cache(batch_size=len(rows))
    if any(rows):
        executor.prefill([list(row) for row in rows] if len(rows) > 1 else list(rows[0]), kv)
    return kv


@pytest.mark.parametrize("make", [paged_cache, toy_cache])
def test_caches_select_broadcast_copy_and_serialize(executor: Any, make: Callable[..., Any]) -> None:
    """The five verbs, each proved by the bytes of the result."""
    three, one, empty = (make(rows, executor) for rows in ([PROMPT, OTHER, PROMPT[:3]], [OTHER], [[]]))
    try:
        assert (three.batch_size, three.num_entries, empty.num_entries) == (3, len(OTHER), 0)
        empty.select_and_copy_from(three, 1)
        assert empty.serialize() == one.serialize()
        copy = three.deep_copy()
        assert copy.serialize() == three.serialize()
        three.broadcast_and_copy_from(one)
        assert (three.batch_size, three.num_entries) == (3, len(OTHER))
        assert copy.serialize() != three.serialize()
        three.load(copy.serialize())
        assert copy.serialize() == three.serialize()
        with pytest.raises((ValueError, KviltError)):
            one.load(copy.serialize())
        assert one.serialize() == empty.serialize()
    finally:
        for kv in (three, one, empty, copy):
            getattr(kv, "close", lambda: None)()


def test_a_cache_of_another_kind_is_refused_by_name(executor: Any) -> None:
    with executor.create_kv_cache() as kv:
        executor.prefill(PROMPT, kv)
        for call in (lambda: kv.select_and_copy_from(ToyCache(), 0), lambda: kv.broadcast_and_copy_from(ToyCache())):
            with pytest.raises(KviltError, match="ToyCache"):
                call()
        assert kv.tokens() == PROMPT
