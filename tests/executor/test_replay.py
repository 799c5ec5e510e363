"""Recorded decode steps: the same bits as the decoder, the tokens of single steps, stopped by a cancel."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCAB, write_tiny

from kvilt import Executor, KVCache, SamplingParams
from kvilt.batch import Batch, Ids, Last, Nothing, Row
from kvilt.config import RunConfig
from kvilt.errors import Cancelled
from kvilt.executor.load import load_executor
from kvilt.executor.replay import MAX_RUN, is_decode, is_verification
from kvilt.ops.native.backend import NativeOps


def recorded(executor: Executor) -> set[tuple[int, ...]]:
    """Where rows start in the steps that are recorded."""
    return {shape.starts for shape in executor._replay._steps}


@pytest.fixture(scope="module", params=[None, 9], ids=["full", "window"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = write_tiny(tmp_path_factory.mktemp("replay"), sliding_window=request.param)
    executor = load_executor(folder, RunConfig(kv_memory=1 << 23, backend="native", threads=1))
    torch.set_num_threads(1)
    yield executor
    executor.close()


def decode(executor: Executor, kv: KVCache, tokens: list[int]) -> Batch:
    kv.reserve([1] * kv.batch_size)
    return Batch.of(
        [Row(Ids([token]), range(n, n + 1), kv, i) for i, (token, n) in enumerate(zip(tokens, kv.lengths, strict=True))]
    )


@settings(max_examples=examples(15), derandomize=True)
@given(data=st.data())
def test_a_replay_gives_the_bits_of_the_decoder(native: Executor, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70), min_size=1, max_size=9))
    with native.create_kv_cache(len(prompts)) as kv:
        native.prefill(prompts, kv)
        for _ in range(3):  # the first of a shape is recorded, the others are replayed
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(prompts), max_size=len(prompts)))
            batch = decode(native, kv, tokens)
            with torch.no_grad():
                truth = native._decoder(batch, lambda _: None).values
            found = native.run(batch)
            assert torch.equal(found.values, truth)
            again = native.run(batch)
            assert torch.equal(again.values, truth) and torch.equal(found.values, truth)  # nobody wrote over a result
            kv.commit([[token] for token in tokens])
    assert tuple(range(len(prompts) + 1)) in recorded(native)


@settings(max_examples=examples(10), derandomize=True)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6), data=st.data())
def test_a_padded_replay_gives_the_same_bits_and_writes_to_no_other_cache(
    native: Executor, sizes: list[int], data: st.DataObject
) -> None:
    """One recording serves steps of several sizes, in any order; rows behind a step stand on a page of their own."""
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=9, max_size=9))
    with pytest.MonkeyPatch.context() as patch, native.create_kv_cache(9) as kv:
        assert native._replay._recorder is not None
        patch.setattr(native._replay._recorder, "padded_rows", lambda rows: -(-rows // 5) * 5)
        patch.setattr(native._replay, "_steps", {})
        native.prefill(prompts, kv)
        kv.reserve([1] * 9)
        before = kv.serialize()
        for size in sizes:
            which = data.draw(st.permutations(range(9)))[:size]
            rows = [Row(Ids([i]), [kv.lengths[i]], kv, i) for i in which]
            with torch.no_grad():
                truth = native._decoder(Batch.of(rows), lambda _: None).values
            assert torch.equal(native.run(Batch.of(rows)).values, truth)
        assert {len(shape.starts) - 1 for shape in native._replay._steps} <= {5, 10}
        assert kv.serialize() == before


def test_few_sizes_of_graphs_serve_all_steps() -> None:
    pytest.importorskip("triton")
    from kvilt.ops.triton.graphs import GraphRecorder
    from kvilt.ops.triton.sampling import TritonSampling

    recorder = GraphRecorder(TritonSampling(torch.device("cpu")))
    sizes = [recorder.padded_rows(rows) for rows in range(1, recorder.max_rows + 1)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(rows <= size <= rows * 2 for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) <= 32 and all(recorder.padded_rows(size) == size for size in sizes)


def test_recordings_are_bounded(native: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvilt.executor.replay.MAX_RECORDINGS", 2)
    monkeypatch.setattr(native._replay, "_steps", {})
    for count in (2, 3, 4, 2):
        with native.create_kv_cache() as kv:
            kv.reserve(count)
            batch = Batch.of([Row(Ids(range(count)), range(count), kv, want=Last(count))])
            with torch.no_grad():
                truth = native._decoder(batch, lambda _: None).values
            assert torch.equal(native.run(batch).values, truth)
    assert [shape.starts for shape in native._replay._steps] == [(0, 4), (0, 2)]


@settings(max_examples=examples(15), derandomize=True)
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70), data=st.data())
def test_a_row_with_drafts_is_replayed_too(native: Executor, prompt: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 33))
    with native.create_kv_cache() as kv:
        native.prefill(prompt, kv)
        for _ in range(2):
            ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
            kv.reserve(count)
            start = kv.num_entries
            batch = Batch.of([Row(Ids(ids), range(start, start + count), kv, want=Last(count))])
            with torch.no_grad():
                truth = native._decoder(batch, lambda _: None)
            found = native.run(batch)
            assert torch.equal(found.values, truth.values)
            assert found.starts == truth.starts
            kv.commit([ids[:2]])
    assert (0, count) in recorded(native)


@settings(max_examples=examples(15), derandomize=True)
@given(data=st.data())
def test_greedy_runs_give_the_tokens_of_single_steps(native: Executor, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=4))
    num_steps = data.draw(st.integers(1, 80))
    params = [
        SamplingParams(
            stop_token_ids=data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)),
            max_tokens=data.draw(st.none() | st.integers(1, 60)),
        )
        for _ in prompts
    ]
    truth = []
    for prompt, one in zip(prompts, params, strict=True):
        with native.create_kv_cache() as kv:
            tokens: list[int] = []
            entering = prompt
            while len(tokens) < min(num_steps, one.max_tokens or num_steps):
                tokens.append(int(native.step(entering, kv).argmax()))
                entering = tokens[-1:]
                if tokens[-1] in one.stop_token_ids:
                    break
            truth.append(tokens)
    with native.create_kv_cache(len(prompts)) as kv:
        assert native.sample_tokens(num_steps, prompts, kv, params=params) == truth
        assert kv.lengths == tuple(len(p) + len(t) - 1 for p, t in zip(prompts, truth, strict=True))
        for i, prompt in enumerate(prompts):
            assert kv.tokens(i) == [*prompt, *truth[i][:-1]]


def test_a_greedy_run_ends_where_the_context_ends(native: Executor) -> None:
    with native.create_kv_cache(capacity=50) as kv:
        [tokens] = native.sample_tokens(100, [1, 2, 3], kv)
        assert len(tokens) == 48 and kv.lengths == (50,)


def test_a_cancel_stops_a_greedy_run_and_keeps_what_was_sampled(native: Executor) -> None:
    with native.create_kv_cache() as kv:
        [truth] = native.sample_tokens(202, [5], kv)
    for wait_s in (0.0, 0.001, 0.003, 0.01):
        with native.create_kv_cache() as kv:
            stopper = threading.Timer(wait_s, native.cancel)
            stopper.start()
            try:
                tokens = native.sample_tokens(200, [5], kv)[0]
            except Cancelled as cancelled:
                tokens = cancelled.tokens[0]
            stopper.join()
            assert tokens == truth[: len(tokens)]
            assert kv.lengths[0] == max(0, len(tokens) - 1) or kv.lengths[0] == len(tokens)
            held = kv.lengths[0]
            assert native.sample_tokens(1, [[5, *truth][held]], kv) == [[truth[held]]]


def test_a_cancel_stops_a_step_that_would_be_recorded(native: Executor) -> None:
    """The first step of a shape too, so that what ran before makes no difference."""
    native._replay._steps.clear()
    for _ in range(2):
        with native.create_kv_cache() as kv:
            with pytest.raises(Cancelled), native.call():
                native.prefill([1, 2, 3], kv)
                native.cancel()
                native.step([4], kv)
            assert kv.tokens() == [1, 2, 3]
            native.step([4], kv)
        assert (0, 1) in recorded(native), "recorded now, for the second time around"


def test_a_cancel_that_comes_late_stops_nothing(native: Executor) -> None:
    with native.create_kv_cache() as kv:
        truth = native.sample_tokens(40, [5], kv)
    native._replay.stop()  # as if it belonged to the call before
    with native.create_kv_cache() as kv:
        assert native.sample_tokens(40, [5], kv) == truth
    native._replay.stop()
    with native.create_kv_cache() as kv:
        assert native.step([5], kv).shape == (1, VOCAB)


def test_a_decode_of_all_rows_is_replayed_and_a_row_with_its_drafts(native: Executor) -> None:
    with native.create_kv_cache(2) as kv:
        kv.reserve([40, 40])

        def kinds(*rows: Row) -> tuple[bool, bool]:
            batch = Batch.of(list(rows))
            return is_decode(batch, 2), is_verification(batch)

        def row(index: int, tokens: int, want: Last | Nothing) -> Row:
            return Row(Ids([1] * tokens), range(tokens), kv, index, want=want)

        assert kinds(row(0, 1, Last())) == (True, True)
        assert kinds(row(0, 1, Last()), row(1, 1, Last())) == (True, False)
        assert kinds(row(0, 1, Last()), row(1, 1, Nothing())) == (False, False)
        assert kinds(row(0, 2, Last()), row(1, 1, Last())) == (False, False)
        assert kinds(row(0, MAX_RUN, Last(MAX_RUN))) == (False, True)
        assert kinds(row(0, MAX_RUN + 1, Last(MAX_RUN + 1))) == (False, False)
        assert kinds(row(0, 3, Last())) == (False, False)
        assert is_decode(Batch.of([row(0, 1, Last()), row(1, 1, Last())]), 1) is False


def test_what_torch_computes_is_not_recorded() -> None:
    recorder, x = NativeOps(1).recorder(), torch.randn(4)
    assert recorder.record(lambda: x + 1) is None
    assert recorder.record(lambda: torch.tensor([1.0])) is None  # would be gone before the replay


def test_recordings_share_memory_that_no_result_uses(native: Executor) -> None:
    with native.create_kv_cache() as kv:
        kept = native.step([1], kv)
        before = kept.clone()
        for token in range(2, 12):
            native.step([token], kv)
        assert torch.equal(kept, before)


def test_a_second_recording_of_about_the_same_size_takes_no_memory_of_its_own(native: Executor) -> None:
    """An engine meets every number of rows sooner or later; logits for each would soon be a gigabyte."""

    def decode(rows: int) -> torch.Tensor:
        with native.create_kv_cache(rows) as kv:
            native.prefill([[3, i] for i in range(rows)], kv)
            return native.step([[i] for i in range(rows)], kv)

    whole = decode(32)
    recorder = native._replay._recorder
    assert recorder is not None
    before = recorder._buffers._held_bytes  # type: ignore[attr-defined]
    for rows in range(31, 16, -1):
        assert torch.equal(decode(rows), whole[:rows])
    assert recorder._buffers._held_bytes == before  # type: ignore[attr-defined]
    assert torch.equal(decode(32), whole)


def test_recording_a_step_does_not_load_a_compiler(tmp_path: Path) -> None:
    """It takes a second, in the middle of the first answer of every process."""
    program = (
        "import sys; from pathlib import Path; from kvilt.config import RunConfig\n"
        "from kvilt.executor.load import load_executor\n"
        "executor = load_executor(Path(sys.argv[1]), RunConfig(kv_memory=1 << 22, backend='native', threads=1))\n"
        "with executor.create_kv_cache() as kv: [executor.step([token], kv) for token in (1, 2, 3)]\n"
        "assert executor._replay._steps, 'nothing was recorded'\n"
        "executor.close(); sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(write_tiny(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
