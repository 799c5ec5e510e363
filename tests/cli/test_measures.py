"""`kvilt perplexity` and `kvilt bench`: right numbers, clear refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from kvilt import Executor
from kvilt.cli.bench import Shape, timed, workloads
from kvilt.cli.perplexity import measure
from kvilt.config import RunConfig
from kvilt.errors import InputError, ParamError
from kvilt.executor.load import load_executor

IDS = [int(i) for i in torch.randint(0, 61, (50,), generator=torch.Generator().manual_seed(3))]


def kvilt(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KVILT_THREADS": "1"}
    command = [sys.executable, "-m", "kvilt.cli.main", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, env=env)


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


def test_a_text_of_one_token_has_no_perplexity(tiny: Executor) -> None:
    with pytest.raises(InputError, match="fewer than two tokens"):
        measure(tiny, [1], 10)


def test_score_stands_behind_a_cache_and_changes_nothing(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill(IDS[:20], kv)
        before = kv.serialize()
        behind = tiny.score(IDS[20:], kv, top=2)
        assert kv.serialize() == before
    whole = tiny.score(IDS, top=2)
    torch.testing.assert_close(behind.logprobs, whole.logprobs[20:], rtol=1e-4, atol=1e-5)
    assert torch.equal(behind.top_ids, whole.top_ids[20:])
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
    shape = Shape(prefill=(8, 16), contexts=(4,), batches=(2, 3), steps=4, runs=1)
    results = [timed(workload, shape.runs) for workload in workloads(executor, shape)]
    assert [result.name for result in results] == ["prefill 8", "prefill 16", "decode at 4", "batch of 2", "batch of 3"]
    for result, tokens in zip(results, (8, 16, 4, 8, 12), strict=True):
        assert result.tokens_per_s == pytest.approx(tokens / result.seconds)
        assert result.gigabytes_per_s > 0
    assert executor.pool.usage().used == 0


def test_weight_bytes_are_what_a_step_reads(tiny: Executor) -> None:
    tile = 16 if tiny.pool.ops.name == "native" else 1  # outputs are packed in tiles of sixteen
    shapes = 3 * [(24, 24), (12, 24), (12, 24), (24, 24), (40, 24), (40, 24), (24, 40)] + [(61, 24)]
    assert tiny.weight_bytes == sum(4 * (-(-outputs // tile) * tile) * inputs for outputs, inputs in shapes)


@pytest.mark.parametrize("fields", [{"steps": 0}, {"runs": 0}, {"prefill": (0,)}, {"batches": (4, -1)}])
def test_bench_refuses_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ParamError, match=next(iter(fields))):
        Shape(**fields)  # type: ignore[arg-type]


def test_bench_in_the_terminal(smollm2_path: Path) -> None:
    sizes = ("--prefill", "8", "--contexts", "4", "--batches", "2", "--steps", "2", "--runs", "1")
    done = kvilt("bench", "--model", str(smollm2_path), "--json", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [result["name"] for result in found["results"]] == ["prefill 8", "decode at 4", "batch of 2"]
    assert "native" in found["backend"]
    wrong = kvilt("bench", "--prefill", "8,x")
    assert wrong.returncode == 2
    assert "prefill" in wrong.stderr
