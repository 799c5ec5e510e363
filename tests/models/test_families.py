"""One runner for every family: kvilt against Hugging Face transformers on the same random weights."""

from __future__ import annotations

import pytest
import torch
from families import Pair

from kvilt.batch import Batch, Hidden, HiddenOut, Ids, Last, LayerSpan, Row, Score
from kvilt.errors import InputError
from kvilt.executor import executor as executor_module

IDS = [int(i) for i in torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(7))]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def every_position(pair: Pair, ids: list[int]) -> torch.Tensor:
    """Our logits at every position of a prompt, in one piece and without committing anything."""
    with pair.executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        return pair.executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=Last(len(ids)))])).values


def test_prefill_in_one_piece(pair: Pair) -> None:
    close(every_position(pair, IDS), pair.logits(IDS))


@pytest.mark.parametrize("cut", [1, 3, 16, 33])
def test_prefill_in_chunks(pair: Pair, cut: int) -> None:
    with pair.executor.create_kv_cache() as kv:
        for start in range(0, len(IDS) - 1, cut):
            pair.executor.prefill(IDS[start : min(start + cut, len(IDS) - 1)], kv)
        close(pair.executor.step([IDS[-1]], kv)[0], pair.logits(IDS)[-1])


def test_a_long_input_is_cut_inside_the_executor(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "STEP_TOKENS", 11)
    with pair.executor.create_kv_cache() as kv:
        close(pair.executor.step(IDS, kv)[0], pair.logits(IDS)[-1])


def test_decode_token_by_token(pair: Pair) -> None:
    theirs = pair.logits(IDS)
    with pair.executor.create_kv_cache() as kv:
        pair.executor.prefill(IDS[:5], kv)
        for position in range(5, len(IDS)):
            close(pair.executor.step([IDS[position]], kv)[0], theirs[position])


def test_ragged_batch(pair: Pair) -> None:
    prompts = [IDS[:1], IDS[10:47], IDS[:64], IDS[5:18]]
    with pair.executor.create_kv_cache(batch_size=4) as kv:
        pair.executor.prefill(prompts, kv)
        ours = pair.executor.step([[3], [4], [5], [6]], kv)
        assert kv.lengths == (2, 38, 65, 14)
    for row, (prompt, last) in enumerate(zip(prompts, [3, 4, 5, 6], strict=True)):
        close(ours[row], pair.logits([*prompt, last])[-1])


def test_rows_at_different_places_share_a_forward(pair: Pair) -> None:
    """A prefill chunk, a decode, a verification of drafts and a score in one batch."""
    executor = pair.executor
    with executor.create_kv_cache(batch_size=4) as kv:
        executor.prefill([IDS[:20], IDS[:33], IDS[3:9], [1]], kv)
        kv.reserve([10, 1, 4, 30])
        rows = [
            Row(Ids(IDS[20:30]), range(20, 30), kv, 0, want=Last()),
            Row(Ids([7]), range(33, 34), kv, 1, want=Last()),
            Row(Ids(IDS[9:13]), range(6, 10), kv, 2, want=Last(4)),
            Row(Ids(IDS[:30]), range(1, 31), kv, 3, want=Score(IDS[1:31], top=3)),
        ]
        logits = executor.run(Batch.of(rows))
    close(logits.of_row(0), pair.logits(IDS[:30])[-1:])
    close(logits.of_row(1), pair.logits([*IDS[:33], 7])[-1:])
    close(logits.of_row(2), pair.logits(IDS[3:13])[-4:])
    expected = pair.logits([1, *IDS[:30]])[1:].log_softmax(-1)
    close(logits.scores[3].logprobs, expected.gather(1, torch.tensor(IDS[1:31])[:, None])[:, 0])
    close(logits.scores[3].top_logprobs, expected.topk(3).values)
    close(expected.gather(1, logits.scores[3].top_ids), expected.topk(3).values)


def test_after_fork_and_truncate(pair: Pair) -> None:
    executor = pair.executor
    with executor.create_kv_cache() as kv:
        executor.prefill(IDS[:40], kv)
        with kv.fork() as child:
            close(executor.step([9], child)[0], pair.logits([*IDS[:40], 9])[-1])
            child.truncate(40)
            close(executor.step(IDS[40:45], child)[0], pair.logits(IDS[:45])[-1])
        close(executor.step([11], kv)[0], pair.logits([*IDS[:40], 11])[-1])


def test_lower_layers_then_upper_layers_equal_one_run(pair: Pair) -> None:
    executor, ids = pair.executor, IDS[:25]
    whole = every_position(pair, ids)
    for cut in range(1, len(executor.spec.layers)):
        with executor.create_kv_cache() as kv:
            kv.reserve(len(ids))
            lower = Row(Ids(ids), range(len(ids)), kv, layers=LayerSpan(0, cut), want=HiddenOut())
            hidden = executor.run(Batch.of([lower])).hidden[0]
            upper = Row(Hidden(hidden), range(len(ids)), kv, layers=LayerSpan(cut), want=Last(len(ids)))
            assert torch.equal(executor.run(Batch.of([upper])).values, whole)
            assert kv.lengths == (0,)


def test_rows_with_different_spans_share_a_forward(pair: Pair) -> None:
    """A row that ends early and one that starts late stand beside a whole one."""
    executor, ids = pair.executor, IDS[:12]
    whole = every_position(pair, ids)
    with executor.create_kv_cache(batch_size=3) as kv:
        kv.reserve(len(ids))
        first = Row(Ids(ids), range(12), kv, 0, layers=LayerSpan(0, 1), want=HiddenOut())
        hidden = executor.run(Batch.of([first])).hidden[0]
        logits = executor.run(
            Batch.of(
                [
                    Row(Hidden(hidden), range(12), kv, 0, layers=LayerSpan(1), want=Last(12)),
                    Row(Ids(ids), range(12), kv, 1, want=Last(12)),
                    Row(Ids(ids), range(12), kv, 2, layers=LayerSpan(0, 2), want=HiddenOut()),
                ]
            )
        )
        close(logits.of_row(0), whole)
        close(logits.of_row(1), whole)
        assert set(logits.hidden) == {2}


def test_a_sparse_row_sees_exactly_the_keys_below_it(pair: Pair) -> None:
    """All positions by a dense run, then some of them again as a sparse row: the same logits at those positions."""
    executor, ids = pair.executor, IDS[:30]
    whole = every_position(pair, ids)
    chosen = [0, 3, 4, 17, 29]
    with executor.create_kv_cache() as kv:
        kv.reserve(30)
        executor.run(Batch.of([Row(Ids(ids), range(30), kv)]))
        sparse = Row(Ids([ids[i] for i in chosen]), chosen, kv, want=Last(len(chosen)))
        if executor.layout.recurrent is not None:  # a state is made of all tokens
            with pytest.raises(InputError, match="recurrent state computes every token"):
                Batch.of([sparse])
            return
        close(executor.run(Batch.of([sparse])).values, whole[chosen])


def test_a_sparse_row_over_all_positions_equals_dense_prefill(pair: Pair) -> None:
    ids = IDS[:30]
    with pair.executor.create_kv_cache() as kv:
        kv.reserve(30)
        row = Row(Ids(ids), [*range(30)], kv, want=Last(30))
        assert torch.equal(pair.executor.run(Batch.of([row])).values, every_position(pair, ids))


def test_serialized_and_loaded(pair: Pair) -> None:
    executor = pair.executor
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(IDS[:40], kv)
        other.load(kv.serialize())
        close(executor.step(IDS[40:45], other)[0], pair.logits(IDS[:45])[-1])


@pytest.mark.parametrize("length", [1, 45])
def test_going_back_and_on_again(pair: Pair, length: int) -> None:
    """To any length, whatever of the way a recurrent state is folded again."""
    executor = pair.executor
    with executor.create_kv_cache() as kv:
        executor.prefill(IDS[:64], kv)
        if kv.row(0).floor > length:
            pytest.skip("a sliding window gave that part back")
        kv.truncate(length)
        close(executor.step([7, 9], kv)[0], pair.logits([*IDS[:length], 7, 9])[-1])
        assert kv.resumes_at == kv.lengths == (length + 2,)
