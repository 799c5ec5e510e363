"""Contract A: the seeds' stateless executor, sentence by sentence, on `kvilt.Executor`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import write_lora
from tiny import write_tiny

from kvilt import Executor, Inputs, KVCache, SamplingParams
from kvilt.batch import Batch, Ids, Row
from kvilt.config import RunConfig
from kvilt.errors import (
    BlobError,
    Cancelled,
    ContextOverflow,
    InputError,
    ModelClosed,
    ParamError,
    PoolExhausted,
)
from kvilt.executor.load import load_executor
from kvilt.kv.cache import KVCache as Cache

PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]


def greedy_alone(executor: Executor, prompt: list[int], steps: int) -> list[int]:
    with executor.create_kv_cache() as kv:
        return executor.sample_tokens(steps, prompt, kv)[0]


def at_layer(executor: Executor, monkeypatch: pytest.MonkeyPatch, nth: int, act: Callable[[], None]) -> None:
    """Do something just before the nth layer that runs from now on; a replayed step has no layers to be seen."""
    decoder = executor._decoder
    monkeypatch.setattr(executor._replay, "_recorder", None)
    seen = 0

    def spying(batch: Batch, before_layer: Callable[[int], None], *rest: object) -> object:
        def before(layer: int) -> None:
            nonlocal seen
            if seen == nth:
                act()
            seen += 1
            before_layer(layer)

        return decoder(batch, before, *rest)

    monkeypatch.setattr(executor, "_decoder", spying)
    monkeypatch.setattr(type(executor), "spec", property(lambda _self: decoder.spec))


def test_the_executor_is_stateless(tiny: Executor) -> None:
    """ "The executor is expected to be stateless." Two caches used in turn give what each gives alone."""
    prompts = [PROMPT[:7], PROMPT[4:]]
    alone = [greedy_alone(tiny, prompt, 8) for prompt in prompts]
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b:
        caches, inputs, out = [a, b], [list(p) for p in prompts], [[], []]
        for _ in range(8):
            for i in (0, 1):
                (token,) = tiny.sample_tokens(1, inputs[i], caches[i])[0]
                inputs[i] = [token]
                out[i].append(token)
    assert out == alone


def test_create_kv_cache(tiny: Executor) -> None:
    """ "Creates a KV cache with the appropriate configurations." """
    with tiny.create_kv_cache(batch_size=3, capacity=40) as kv:
        assert (kv.batch_size, kv.capacity, kv.num_entries) == (3, 40, 0)
        assert kv.layout is tiny.layout
    with tiny.create_kv_cache() as kv:
        assert kv.capacity == tiny.max_context
    with pytest.raises(ContextOverflow):
        tiny.create_kv_cache(capacity=tiny.max_context + 1)
    for capacity in (0, True, 9.0, "9"):
        with pytest.raises(InputError, match="capacity must be a whole number and at least 1"):
            tiny.create_kv_cache(capacity=capacity)
    for batch_size in (0, -1, True, 1.0):
        with pytest.raises(InputError, match="batch_size"):
            tiny.create_kv_cache(batch_size)


def test_a_pool_smaller_than_the_context_is_named_as_the_limit(tmp_path: Path) -> None:
    small = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=40_000, kv_dtype="float32"))
    room = small.pool.tokens
    assert room < small.max_context
    with small.create_kv_cache() as kv:
        assert kv.capacity == room
        with pytest.raises(ContextOverflow, match=r"KV memory .* raise kv_memory"):
            small.prefill([1] * (room + 1), kv)
    with pytest.raises(ContextOverflow, match="raise kv_memory"):
        small.create_kv_cache(capacity=room + 1)
    with pytest.raises(ContextOverflow, match="raise max_context"):
        small.create_kv_cache(capacity=small.max_context + 1)


def test_prefill_updates_the_cache(tiny: Executor) -> None:
    """ "The executor is expected to update the KV Cache with the provided input data." """
    with tiny.create_kv_cache() as kv:
        assert tiny.prefill(PROMPT, kv) is None
        assert kv.lengths == (len(PROMPT),)
        assert kv.tokens() == PROMPT


def test_prefills_continue_where_the_last_one_ended(tiny: Executor) -> None:
    with tiny.create_kv_cache() as whole, tiny.create_kv_cache() as parts:
        tiny.prefill(PROMPT, whole)
        for cut in (PROMPT[:1], PROMPT[1:6], PROMPT[6:]):
            tiny.prefill(cut, parts)
        assert parts.tokens() == PROMPT
        torch.testing.assert_close(tiny.step([4], parts), tiny.step([4], whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", ["prefill", "step", "sample_tokens"])
@pytest.mark.parametrize("bad", [[], [[]], [61], [-1], [2**70], [1.5], ["a"], [True], [1, False], torch.tensor([True])])
def test_input_that_is_no_input_is_an_error_and_changes_nothing(tiny: Executor, call: str, bad: Any) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        with pytest.raises(InputError):
            tiny.sample_tokens(2, bad, kv) if call == "sample_tokens" else getattr(tiny, call)(bad, kv)
        assert kv.tokens() == PROMPT


def test_step_returns_logits_for_the_input(tiny: Executor) -> None:
    """ "Performs a single decode step synchronously. ... The returned value is logits for the provided input." """
    with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as other:
        tiny.prefill(PROMPT[:-1], kv)
        logits = tiny.step([PROMPT[-1]], kv)
        assert logits.shape == (1, tiny.spec.vocab_size)
        assert logits.dtype == torch.float32
        assert kv.tokens() == PROMPT
        torch.testing.assert_close(logits, tiny.step(PROMPT, other), rtol=1e-5, atol=1e-5)
        logits[0, 3] = float("-inf")  # the caller's own sampler may write to them


def test_sample_tokens(tiny: Executor) -> None:
    """ "Performs N decode steps synchronously. ... The function returns the sampled token ids." """
    with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as own:
        sampled = tiny.sample_tokens(9, PROMPT, kv)
        assert [len(row) for row in sampled] == [9]
        assert kv.tokens() == [*PROMPT, *sampled[0][:-1]]  # the input and all sampled tokens but the last
        pending, by_hand = PROMPT, []
        for _ in range(9):
            token = int(tiny.step(pending, own).argmax())
            by_hand.append(token)
            pending = [token]
        assert sampled[0] == by_hand


def test_sample_tokens_stops_each_row_at_its_own_stop_tokens(tiny: Executor) -> None:
    prompts = [PROMPT, PROMPT[3:], PROMPT[:2]]
    free = [greedy_alone(tiny, prompt, 12) for prompt in prompts]
    stops = [free[0][4], free[1][0], -1]
    params = [SamplingParams(stop_token_ids=(stop,)) if stop >= 0 else SamplingParams() for stop in stops]
    with tiny.create_kv_cache(batch_size=3) as kv:
        sampled = tiny.sample_tokens(12, prompts, kv, params=params)
        expected = [row[: row.index(stop) + 1] if stop in row else row for row, stop in zip(free, stops, strict=True)]
        assert sampled == expected
        for i, prompt in enumerate(prompts):
            assert kv.tokens(i) == [*prompt, *sampled[i][:-1]]


def test_sample_tokens_ends_cleanly_at_the_context(tiny: Executor) -> None:
    with tiny.create_kv_cache(capacity=len(PROMPT) + 3) as kv:
        (row,) = tiny.sample_tokens(50, PROMPT, kv)
        assert len(row) == 4  # the last sampled token needs no place
        assert kv.lengths == (len(PROMPT) + 3,)
        with pytest.raises(ContextOverflow):
            tiny.step([1], kv)
    with tiny.create_kv_cache(capacity=5) as kv:
        with pytest.raises(ContextOverflow):
            tiny.sample_tokens(1, PROMPT, kv)
        assert kv.lengths == (0,)


def test_every_field_acts_in_sample_tokens_or_is_refused(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        assert len(tiny.sample_tokens(9, PROMPT, kv, params=SamplingParams(max_tokens=4))[0]) == 4
        before = kv.tokens()
        texts = {"stop": ["x"], "bad_words": ["x"], "include_stop_str_in_output": True, "ignore_eos": True}
        for field, value in {**texts, "n": 2, "logprobs": 0, "repetition_detection": True}.items():
            with pytest.raises(ParamError, match=field):
                tiny.sample_tokens(9, PROMPT, kv, params=SamplingParams(**{field: value}))
        for wrong in ({"temperature": 1.0}, "greedy", 7, [None], [{}]):
            with pytest.raises(ParamError, match="params: must be a SamplingParams"):
                tiny.sample_tokens(9, PROMPT, kv, params=wrong)
        assert kv.tokens() == before


def test_sampling_with_a_seed_repeats_itself(tiny: Executor) -> None:
    params = SamplingParams(temperature=1.3, seed=7, top_p=0.95)
    with tiny.create_kv_cache() as a, tiny.create_kv_cache(batch_size=2) as b:
        alone = tiny.sample_tokens(15, PROMPT, a, params=params)[0]
        beside = tiny.sample_tokens(15, [PROMPT[:3], PROMPT], b, params=params)[1]
        assert alone == beside
        assert alone != greedy_alone(tiny, PROMPT, 15)


@pytest.mark.parametrize("steps", [0, -3, True, 2.5])
def test_no_steps_is_an_error(tiny: Executor, steps: int) -> None:
    with tiny.create_kv_cache() as kv, pytest.raises(InputError):
        tiny.sample_tokens(steps, PROMPT, kv)


def test_lora_adapters_are_loaded_used_and_unloaded(tiny: Executor, tmp_path: Path) -> None:
    """ "Loads a LoRA adapter with the provided model assets." A request never silently runs on the base model."""
    lora = tiny.load_lora(write_lora(tmp_path / "adapter"))
    with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as plain:
        tiny.prefill(PROMPT[:-1], kv, lora_id=lora)
        tiny.prefill(PROMPT[:-1], plain)
        assert not torch.allclose(tiny.step(PROMPT[-1:], kv, lora_id=lora), tiny.step(PROMPT[-1:], plain))
        assert len(tiny.sample_tokens(3, [5], kv, lora_id=lora)[0]) == 3
    tiny.unload_lora(lora)
    for unknown in (lora, 3000):
        with pytest.raises(InputError, match="adapter"):
            tiny.unload_lora(unknown)
        with tiny.create_kv_cache() as kv:
            for call in (tiny.prefill, tiny.step):
                with pytest.raises(InputError, match="adapter"):
                    call(PROMPT, kv, lora_id=unknown)
            assert kv.lengths == (0,)


def test_cancel_is_a_no_op_when_idle(tiny: Executor) -> None:
    """ "If no operation is ongoing, the cancellation is a no-op." """
    tiny.cancel()
    assert greedy_alone(tiny, PROMPT, 3) == greedy_alone(tiny, PROMPT, 3)


@pytest.mark.parametrize("layer", range(6))
def test_cancel_at_every_layer_of_a_prefill_changes_no_length(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """ "Best effort cancellation of any ongoing operations." Afterwards the cache is as it was, and usable."""
    monkeypatch.setattr("kvilt.executor.executor.STEP_TOKENS", 6)  # two steps of three layers
    whole = greedy_alone(tiny, PROMPT, 6)
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT[:2], kv)
        free = tiny.pool.free_pages()
        with monkeypatch.context() as patch:
            at_layer(tiny, patch, layer, tiny.cancel)
            with pytest.raises(Cancelled):
                tiny.prefill(PROMPT[2:], kv)
        assert kv.tokens() == PROMPT[:2]
        assert tiny.pool.free_pages() == free
        assert tiny.sample_tokens(6, PROMPT[2:], kv)[0] == whole


@pytest.mark.parametrize("layer", range(15))
def test_a_cancelled_generation_carries_its_tokens_and_continues(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    whole = greedy_alone(tiny, PROMPT, 8)
    with tiny.create_kv_cache() as kv:
        with monkeypatch.context() as patch:
            at_layer(tiny, patch, layer, tiny.cancel)
            with pytest.raises(Cancelled) as caught:
                tiny.sample_tokens(8, PROMPT, kv)
        done = caught.value.tokens[0]
        assert done == whole[: layer // 3]
        assert kv.tokens() == ([*PROMPT, *done[:-1]] if done else [])
        rest = tiny.sample_tokens(8 - len(done), done[-1:] or PROMPT, kv)[0]
        assert done + rest == whole


def test_a_cancel_between_the_pieces_of_a_score_is_heard(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvilt.executor.executor.STEP_TOKENS", 4)
    honest, pieces = tiny.run, []

    def then_cancel(batch: Batch) -> object:
        pieces.append(batch)
        logits = honest(batch)
        tiny.cancel()
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "run", then_cancel)
        with pytest.raises(Cancelled):
            tiny.score(PROMPT)
    assert len(pieces) == 2, "the second piece stops before its first layer"
    assert tiny.pool.usage().used == 0
    assert len(tiny.score(PROMPT).logprobs) == len(PROMPT) - 1


def test_calls_of_several_runs_are_one_call_to_cancel(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        with pytest.raises(Cancelled), tiny.call():
            tiny.prefill(PROMPT, kv)
            tiny.cancel()
            tiny.step([1], kv)
        assert kv.tokens() == PROMPT
        tiny.step([1], kv)


def test_cancel_comes_from_any_thread(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    running, caught = threading.Event(), []
    with tiny.create_kv_cache() as kv, monkeypatch.context() as patch:
        at_layer(tiny, patch, 20, running.set)

        def work() -> None:
            try:
                tiny.sample_tokens(200, PROMPT, kv)
            except Cancelled as error:
                caught.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        assert running.wait(300)
        tiny.cancel()
        worker.join(300)
        assert len(caught) == 1
        assert kv.tokens() == [*PROMPT, *caught[0].tokens[0][:-1]]


@pytest.mark.parametrize("layer", range(3))
def test_an_error_at_any_layer_changes_no_length(tiny: Executor, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel broke")

    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        free = tiny.pool.free_pages()
        with monkeypatch.context() as patch:
            at_layer(tiny, patch, layer, fail)
            with pytest.raises(RuntimeError):
                tiny.step([3], kv)
        assert kv.tokens() == PROMPT
        assert tiny.pool.free_pages() == free


def test_running_out_of_pages_changes_nothing(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        free = tiny.pool.free_pages()
        held = tiny.pool.take([count - 2 for count in free])
        with pytest.raises(PoolExhausted, match="raise kv_memory"):
            tiny.sample_tokens(200, PROMPT, kv)  # all room is found before any work
        with pytest.raises(PoolExhausted):
            tiny.prefill(PROMPT * 10, kv)
        for group, pages in enumerate(held):
            tiny.pool.drop(group, pages)
        assert kv.tokens() == PROMPT
        assert tiny.pool.free_pages() == free


def test_concurrent_use_serialises(tiny: Executor) -> None:
    """ "Thread-safety is not required." Here it is promised that calls wait for each other."""
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(6)]
    expected = [greedy_alone(tiny, prompt, 10) for prompt in prompts]
    found: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: greedy_alone(tiny, prompts[i], 10)})) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[i] for i in range(6)] == expected


def test_inputs_mix_ids_and_embeddings(tiny: Executor) -> None:
    """ExecutorInputs: feeding the embeddings of some tokens equals feeding the tokens."""
    decoder = tiny._decoder
    at = [0, 4, 5, 11]
    vectors = decoder.ops.embed(decoder.embedding, torch.tensor([PROMPT[i] for i in at]))
    mixed = Inputs([0 if i in at else token for i, token in enumerate(PROMPT)], at, vectors)
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b:
        assert torch.equal(tiny.step(mixed, a), tiny.step(PROMPT, b))
        assert [isinstance(token, bytes) for token in a.tokens()] == [i in at for i in range(len(PROMPT))]
        with a.fork() as copy:
            copy.load(a.serialize())
            assert copy.tokens() == a.tokens()


def test_inputs_whose_counts_disagree_are_refused(tiny: Executor) -> None:
    with pytest.raises(InputError, match="1 embedding rows were given for 2 places"):
        Inputs([1, 2, 3], [0, 1], torch.zeros(1, 24))
    for at in ([3], [-1], [1, 0], [1, 1]):
        with pytest.raises(InputError):
            Inputs([1, 2, 3], at, torch.zeros(len(at), 24))
    with tiny.create_kv_cache() as kv:
        with pytest.raises(InputError, match="24 numbers"):
            tiny.prefill(Inputs([1, 2], [0], torch.zeros(1, 23)), kv)
        with pytest.raises(InputError, match="finite"):
            tiny.prefill(Inputs([1, 2], [0], torch.full((1, 24), float("nan"))), kv)


def test_one_sequence_per_row(tiny: Executor) -> None:
    with tiny.create_kv_cache(batch_size=2) as kv:
        for wrong in ([1, 2], [[1]], [[1], [2], [3]], [[1], []]):
            with pytest.raises(InputError):
                tiny.prefill(wrong, kv)
        tiny.prefill([torch.tensor([1, 2, 3]), [4]], kv)
        assert kv.lengths == (3, 1)
    with tiny.create_kv_cache() as kv:
        tiny.prefill(torch.tensor(PROMPT), kv)
        assert kv.tokens() == PROMPT


def test_a_cache_of_another_executor_is_refused(tiny: Executor) -> None:
    from kvilt.kv.pool import PagePool

    other = PagePool(tiny.layout, 4, tiny.pool.ops, tiny.pool.identity)
    with Cache(other) as kv:
        with pytest.raises(InputError, match="another executor"):
            tiny.prefill(PROMPT, kv)
        kv.reserve(1)
        with pytest.raises(InputError, match="another executor"):
            tiny.run(Batch.of([Row(Ids([1]), [0], kv)]))


def test_save_and_open(tiny: Executor, tmp_path: object) -> None:
    path = f"{tmp_path}/prompt.kv"
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT[:-1], kv)
        kv.save(path)
        with tiny.open_kv_cache(path) as again:
            assert again.tokens() == PROMPT[:-1]
            assert again.serialize() == kv.serialize()
            assert tiny.sample_tokens(6, PROMPT[-1:], again) == tiny.sample_tokens(6, PROMPT[-1:], kv)


def test_a_closed_model_runs_and_saves_nothing_and_says_so(tmp_path: Path) -> None:
    executor = load_executor(write_tiny(tmp_path / "model"), RunConfig(kv_memory=1 << 20))
    other = load_executor(tmp_path / "model", RunConfig(kv_memory=1 << 20))
    kv, beside = executor.create_kv_cache(), other.create_kv_cache()
    executor.prefill(PROMPT, kv)
    kv.save(tmp_path / "before.kv")  # so that the identity is known already; the rule is the same
    executor.close()
    executor.close()
    for refused in (
        lambda: executor.step([1], kv),
        lambda: executor.score(PROMPT),
        executor.create_kv_cache,
        lambda: executor.open_kv_cache(tmp_path / "before.kv"),
        kv.serialize,
        lambda: kv.save(tmp_path / "after.kv"),
        lambda: beside.select_and_copy_from(kv, 0),
    ):
        with pytest.raises(ModelClosed, match="before closing it"):
            refused()
    assert [file.name for file in tmp_path.glob("*.kv")] == ["before.kv"]
    with kv, kv.fork() as fork:
        fork.truncate(3)
        assert (kv.tokens(), fork.tokens()) == (PROMPT, PROMPT[:3])
    assert executor.pool.usage().used == 0
    beside.close()
    other.close()


def test_a_file_larger_than_the_pool_is_refused_before_it_is_read(
    tiny: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.kv"
    with path.open("wb") as out:
        out.truncate(1 << 40)  # a hole: costs no disk
    monkeypatch.setattr(Path, "read_bytes", lambda _self: pytest.fail("the file was read"))
    with pytest.raises(BlobError, match=r"size: .* raise kv_memory"):
        tiny.open_kv_cache(path)


def test_the_fullest_pool_can_be_saved_and_opened(tmp_path: Path) -> None:
    """So that the bound on a file's size never refuses a cache that would fit."""
    executor = load_executor(write_tiny(tmp_path / "model"), RunConfig(kv_memory=100_000))
    rows = executor.pool.pages
    with executor.create_kv_cache(batch_size=rows) as kv:
        executor.prefill([[5] * executor.layout.page_tokens] * rows, kv)
        assert executor.pool.usage().free == 0
        kv.save(tmp_path / "full.kv")
    with executor.open_kv_cache(tmp_path / "full.kv") as again:
        assert again.batch_size == rows
    executor.close()


def test_kv_of_other_numerics_is_computed_again_unless_accepted(
    tiny: Executor, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path}/foreign.kv"
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        own = tiny.pool.identity()
        with monkeypatch.context() as patch:
            patch.setattr(tiny.pool, "identity", lambda: dataclasses.replace(own, numerics="another CPU"))
            kv.save(path)
        ran: list[int] = []
        with monkeypatch.context() as patch:
            at_layer(tiny, patch, 0, lambda: ran.append(1))
            with tiny.open_kv_cache(path, accept_numerics=True) as accepted:
                assert accepted.tokens() == PROMPT
            assert not ran
            with tiny.open_kv_cache(path) as computed:
                assert computed.serialize() == kv.serialize()
            assert ran


def test_embedding_rows_of_other_numerics_are_refused_since_they_cannot_be_computed_again(
    tiny: Executor, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, path = tiny.pool.identity(), f"{tmp_path}/foreign.kv"
    with tiny.create_kv_cache() as kv, monkeypatch.context() as patch:
        tiny.prefill(Inputs.join([PROMPT, tiny.embed([4, 5])]), kv)
        patch.setattr(tiny.pool, "identity", lambda: dataclasses.replace(own, numerics="another CPU"))
        kv.save(path)
        tokens = kv.tokens()
    with pytest.raises(BlobError, match="embeddings, which cannot be computed again"):
        tiny.open_kv_cache(path)
    with tiny.open_kv_cache(path, accept_numerics=True) as accepted:
        assert accepted.tokens() == tokens


def test_a_saved_cache_that_finds_no_room_is_refused_and_takes_none(tiny: Executor, tmp_path: object) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        kv.save(f"{tmp_path}/one.kv")
    taken = tiny.pool.take(tiny.pool.free_pages())
    try:
        with pytest.raises(PoolExhausted):
            tiny.open_kv_cache(f"{tmp_path}/one.kv")
    finally:
        for group, pages in enumerate(taken):
            tiny.pool.drop(group, pages)
    assert tiny.pool.usage().used == 0


def test_an_empty_cache_of_other_numerics_opens_empty(
    tiny: Executor, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tiny.pool.identity()
    with tiny.create_kv_cache(batch_size=2) as kv, monkeypatch.context() as patch:
        patch.setattr(tiny.pool, "identity", lambda: dataclasses.replace(own, numerics="another CPU"))
        kv.save(f"{tmp_path}/empty.kv")
    with tiny.open_kv_cache(f"{tmp_path}/empty.kv") as again:
        assert again.lengths == (0, 0)


def test_the_usual_loop(tiny: Executor) -> None:
    kv: KVCache
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT[:-1], kv)
        assert tiny.sample_tokens(5, [PROMPT[-1]], kv)[0] == greedy_alone(tiny, PROMPT, 5)


def test_sampled_steps_are_counted_whether_they_are_replayed_or_not(tiny: Executor) -> None:
    def counted() -> list[float]:
        found = tiny.metrics.snapshot()
        return [found[name]["series"][0]["value"] for name in ("kvilt_steps_total", "kvilt_computed_tokens_total")]

    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        before = counted()
        tiny.sample_tokens(6, [4], kv)
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [6, 6]


def test_an_input_past_the_capacity_is_refused_as_such_also_in_a_full_pool(tiny: Executor) -> None:
    taken = tiny.pool.take(tiny.pool.free_pages())
    try:
        with tiny.create_kv_cache(capacity=8) as kv, pytest.raises(ContextOverflow):
            tiny.sample_tokens(2, PROMPT, kv)
    finally:
        for group, pages in enumerate(taken):
            tiny.pool.drop(group, pages)


def test_sample_tokens_finds_room_only_for_what_max_tokens_allows(tiny: Executor) -> None:
    taken = tiny.pool.take([count - 1 for count in tiny.pool.free_pages()])
    try:
        with tiny.create_kv_cache() as kv:
            assert len(tiny.sample_tokens(200, PROMPT, kv, params=SamplingParams(max_tokens=2))[0]) == 2
    finally:
        for group, pages in enumerate(taken):
            tiny.pool.drop(group, pages)
