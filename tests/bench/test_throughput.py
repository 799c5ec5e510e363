"""`kvilt perplexity` and `kvilt bench`: right numbers, clear refusals."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from commands import kvilt
from tiny import write_tiny

from kvilt import Executor
from kvilt.bench.cold_start import ColdStartFailed, measure_cold_start
from kvilt.bench.perplexity import measure
from kvilt.bench.throughput import BenchPlan, MatmulCounts, matmul_counts, timed, workloads
from kvilt.config import RunConfig
from kvilt.errors import InputError, ParamError
from kvilt.executor.load import load_executor
from kvilt.kv.layout import Window
from kvilt.ops.native import limits

IDS = [int(i) for i in torch.randint(0, 61, (50,), generator=torch.Generator().manual_seed(3))]


def by_hand(executor: Executor, ids: list[int], chunk_tokens: int) -> list[float]:
    """Negative log-probabilities, one decode step at a time."""
    losses = []
    for start in range(0, len(ids), chunk_tokens):
        chunk = ids[start : start + chunk_tokens]
        with executor.create_kv_cache() as kv:
            for token, after in pairwise(chunk):
                losses.append(-float(executor.step([token], kv)[0].log_softmax(-1)[after]))
    return losses


@pytest.mark.parametrize("chunk", [2, 7, 49, 50, 64])
def test_perplexity_is_the_exponential_of_the_mean_loss(tiny: Executor, chunk: int) -> None:
    found = measure(tiny, IDS, chunk)
    losses = by_hand(tiny, IDS, chunk)
    assert found.tokens == len(losses)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found.error > 0


def test_each_chunk_starts_with_what_the_model_expects_before_a_text(tiny: Executor) -> None:
    found = measure(tiny, IDS, 10, head=[3])
    losses = [loss for start in range(0, len(IDS), 9) for loss in by_hand(tiny, [3, *IDS[start : start + 9]], 10)]
    assert found.tokens == len(losses) == len(IDS)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)


def test_a_text_of_one_token_has_no_perplexity(tiny: Executor) -> None:
    with pytest.raises(InputError, match="fewer than two tokens"):
        measure(tiny, [1], 10)


def test_score_stands_behind_a_cache_and_changes_nothing(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(IDS[:20], kv)
        before = kv.serialize()
        context_prefix = tiny.score(IDS[20:], kv, top=2)
        assert kv.serialize() == before
    whole = tiny.score(IDS, top=2)
    torch.testing.assert_close(context_prefix.logprobs, whole.logprobs[20:], rtol=1e-4, atol=1e-5)
    assert torch.equal(context_prefix.top_ids, whole.top_ids[20:])
    assert tiny.pool.usage().used == 0
    for bad in ([], [1], [1, 999]):
        with pytest.raises(InputError):
            tiny.score(bad)


def test_score_in_pieces_equals_score_at_once(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny.score(IDS)
    monkeypatch.setattr("kvilt.executor.executor.STEP_TOKENS", 7)
    torch.testing.assert_close(tiny.score(IDS).logprobs, whole.logprobs, rtol=1e-4, atol=1e-5)


def test_perplexity_from_a_file_and_from_a_pipe(smollm2_path: Path, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    (tmp_path / "text.txt").write_text(text)
    options = ("--model", str(smollm2_path), "--chunk", "40", "--limit", "60")
    said = kvilt("perplexity", str(tmp_path / "text.txt"), *options)
    assert said.returncode == 0, said.stderr
    assert "over 58 tokens in 2 chunks" in said.stdout
    found = json.loads(kvilt("perplexity", "-", "--json", *options, stdin=text).stdout)
    assert found["tokens"] == 58
    assert f"perplexity {found['perplexity']:.4f}" in said.stdout
    assert 1 < found["perplexity"] < 40


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("no-such-file.txt",), "no-such-file.txt"),
        (("-", "--chunk", "1"), "chunk"),
        (("-", "--limit", "0"), "limit"),
    ],
)
def test_perplexity_refuses_by_name(args: tuple[str, ...], says: str) -> None:
    done = kvilt("perplexity", *args)
    assert done.returncode in (1, 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_times_every_workload(tmp_path: Path) -> None:
    executor = load_executor(write_tiny(tmp_path), RunConfig(kv_memory=1 << 22))
    shape = BenchPlan(prefill=(8, 16), contexts=(4,), batches=(2, 3), steps=4, runs=1)
    todo = [*workloads(executor, shape)]
    results = [timed(workload, shape.runs) for workload in todo]
    assert [result.name for result in results] == ["prefill 8", "prefill 16", "decode at 4", "batch of 2", "batch of 3"]
    for workload, result, tokens in zip(todo, results, (8, 16, 4, 8, 12), strict=True):
        assert result.tokens_per_s == pytest.approx(tokens / result.seconds)
        assert result.gigaops_per_s == pytest.approx(workload.ops / result.seconds / 1e9)
        if workload.read_bytes is None:
            assert result.name.startswith("prefill") and result.gigabytes_per_s is None
        else:
            assert result.gigabytes_per_s == pytest.approx(workload.read_bytes / result.seconds / 1e9)
    assert executor.pool.usage().used == 0


MATRICES = 3 * [(24, 24), (12, 24), (12, 24), (24, 24), (40, 24), (40, 24), (24, 40)]  # of the tiny model's layers


def test_operations_are_two_for_every_weight_a_token_meets(tiny: Executor) -> None:
    layers, head = sum(outputs * inputs for outputs, inputs in MATRICES), 61 * 24
    assert matmul_counts(tiny.spec) == MatmulCounts(layers, head)
    prefill, decode, batch = workloads(tiny, BenchPlan(prefill=(8,), contexts=(4,), batches=(3,), steps=5))
    assert prefill.ops == 2 * (8 * layers + head)  # the head sees the last token alone
    assert decode.ops == 2 * 5 * (layers + head)
    assert batch.ops == 3 * decode.ops


def test_a_step_reads_the_weights_once_and_the_kv_in_reach_of_every_row(tiny: Executor) -> None:
    (group,) = tiny.layout.groups
    one, far, batch = workloads(tiny, BenchPlan(prefill=(), contexts=(4, 40), batches=(3,), steps=6))
    seen = {length: length - group.first_needed(length) for length in (4 + 3, 40 + 3)}
    assert seen[43] == (8 if isinstance(group.reach, Window) else 43)
    token_bytes = group.shape.token_bytes
    assert one.read_bytes == 6 * (tiny.weight_bytes + token_bytes * seen[7])
    assert far.read_bytes == 6 * (tiny.weight_bytes + token_bytes * seen[43])
    assert batch.read_bytes == 6 * (tiny.weight_bytes + 3 * token_bytes * seen[7])


def test_weight_bytes_are_what_a_step_reads(tiny: Executor) -> None:
    tile = 16 if tiny.pool.ops.name == "native" else 1  # outputs are packed in tiles of sixteen
    shapes = [*MATRICES, (61, 24)]
    assert tiny.weight_bytes == sum(4 * (-(-outputs // tile) * tile) * inputs for outputs, inputs in shapes)


@pytest.mark.parametrize("fields", [{"steps": 0}, {"runs": 0}, {"prefill": (0,)}, {"batches": (4, -1)}])
def test_bench_refuses_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ParamError, match=next(iter(fields))):
        BenchPlan(**fields)  # type: ignore[arg-type]


SIZES = ("--prefill", "8", "--contexts", "4", "--batches", "2", "--steps", "2", "--runs", "1")


@pytest.mark.slow
def test_bench_in_the_terminal(smollm2_path: Path) -> None:
    done = kvilt("bench", "--model", str(smollm2_path), "--json", *SIZES)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [result["name"] for result in found["results"]] == ["prefill 8", "decode at 4", "batch of 2"]
    assert "native" in found["backend"]
    assert found["threads"] == 1
    cold = found["cold"]
    assert 0 < cold["torch_s"] < cold["first_token_s"]
    assert 0 < cold["torch_bytes"] < cold["peak_bytes"]
    assert found["limits"] is None or found["limits"]["threads"] == 1


def test_bench_shows_a_table(smollm2_path: Path) -> None:
    done = kvilt("bench", "--model", str(smollm2_path), "--no-cold", *SIZES)
    assert done.returncode == 0, done.stderr
    for word in ("prefill 8", "decode at 4", "batch of 2", "GB/s", "GOP/s"):
        assert word in done.stdout
    assert "cold start" not in done.stdout


def test_bench_refuses_what_is_no_number() -> None:
    wrong = kvilt("bench", "--prefill", "8,x")
    assert wrong.returncode == 2
    assert "prefill" in wrong.stderr


def test_a_cold_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ColdStartFailed, match=r"nothing-here.*--no-cold"):
        measure_cold_start(str(tmp_path / "nothing-here.gguf"), {})


def test_limits_are_measured_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("_kvilt_native")
    if hasattr(native, "limits"):
        found = limits.measure(1, 1 << 20)
        assert found is not None and found.threads == 1
        assert found.bytes_per_s > 0 and found.ops_per_s > 0
        for threads, size_bytes in ((0, 1), (5000, 1), (1, 0)):
            with pytest.raises(ValueError, match="limits"):
                limits.measure(threads, size_bytes)
    monkeypatch.setitem(sys.modules, "_kvilt_native", None)
    assert limits.measure(1, 1 << 20) is None
