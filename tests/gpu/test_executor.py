"""The executor on a GPU: the reference's numbers, the same KV verbs, graphs that change nothing."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import pytest
import torch
from gpu_models import VOCAB, Models
from torch import Tensor
from triton.runtime.jit import JITFunction

from kvilt import SamplingParams
from kvilt.batch import Batch, Ids, Last, Nothing, Row, SampledIds
from kvilt.config import RunConfig
from kvilt.errors import DeviceMemoryError, KVError
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.executor.warmup import warm_up
from kvilt.ops.triton.graphs import GraphRecorder
from kvilt.ops.triton.sampling import TritonSampling

GREEDY = SamplingParams(temperature=0.0)
# Of the norm of all logits: what float32 sums in another order, and bfloat16 weights, activations and KV come to.
NEAR = {"exact": 1e-4, "usual": 3e-2}


def distance(found: Tensor, truth: Tensor) -> float:
    found, truth = found.cpu().double(), truth.cpu().double()
    assert found.isfinite().all()
    return float((found - truth).norm() / truth.norm())


def prompts(seed: int, *sizes: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(size)] for size in sizes]


def conversation(executor: ModelExecutor) -> Tensor:
    """Ragged prompts, decodes, chunks in the middle, long rows and a truncation."""
    with executor.create_kv_cache(4) as kv:
        logits = [executor.step(prompts(1, 3, 170, 40, 1500), kv)]
        logits += [executor.step([[7], [8], [9], [10]], kv) for _ in range(2)]
        logits += [executor.step(prompts(2, 33, 1, 300, 5), kv)]
        kv.truncate([20, 100, 330, 1500])
        return torch.cat([*logits, executor.step(prompts(3, 1, 2, 70, 1), kv)])


@pytest.mark.parametrize("kind", NEAR)
def test_logits_are_the_references(models: Models, kind: str) -> None:
    assert distance(conversation(getattr(models, kind)), conversation(models.reference)) < NEAR[kind]


def test_a_captured_loop_draws_what_single_steps_draw(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [
        SamplingParams(temperature=1.2, seed=1),
        SamplingParams(temperature=1.4, top_p=0.8, seed=2),
        SamplingParams(temperature=0.0),
    ]
    executor, found = models.usual, []
    for _ in range(2):
        with executor.create_kv_cache(3) as kv:
            found.append(executor.sample_tokens(70, prompts(4, 5, 100, 33), kv, params=params))
        monkeypatch.setattr(executor, "run_steps", lambda *_: None)
    assert found[0] == found[1]


def test_greedy_tokens_are_the_references(models: Models) -> None:
    found = []
    for executor in (models.exact, models.reference):
        with executor.create_kv_cache(3) as kv:
            found.append(executor.sample_tokens(60, prompts(4, 5, 100, 33), kv, params=GREEDY))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 3, 9, 70])
def test_a_graph_gives_what_the_decoder_gives(models: Models, rows: int) -> None:
    """Bit for bit where no row is padded, within a rounding where there are."""
    executor = models.usual
    with executor.create_kv_cache(rows) as kv, torch.no_grad():
        executor.prefill(prompts(5, *(1 + 7 * i % 90 for i in range(rows))), kv)
        for _ in range(3):
            kv.reserve([1] * rows)
            batch = Batch.of([Row(Ids([i]), [n], kv, i) for i, n in enumerate(kv.lengths)])
            truth = executor._decoder(batch, lambda _: None).values
            found = executor.run(batch).values
            if executor._replay._padded(batch)[0] == batch.starts:
                assert torch.equal(found, truth)
            assert distance(found, truth) < 1e-2
            kv.commit([[i] for i in range(rows)])


def test_tokens_on_the_device_enter_a_step(models: Models) -> None:
    executor = models.usual
    with executor.create_kv_cache(3) as kv:
        executor.prefill(prompts(6, 4, 5, 6), kv)
        kv.reserve([1] * 3)
        ids = torch.tensor([11, 12, 13], device="cuda")
        sampled = [Row(SampledIds(ids, 2 - i), [n], kv, i) for i, n in enumerate(kv.lengths)]
        plain = [Row(Ids([13 - i]), [n], kv, i) for i, n in enumerate(kv.lengths)]
        assert torch.equal(executor.run(Batch.of(sampled)).values, executor.run(Batch.of(plain)).values)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "k8v4"])
def test_other_dtypes_of_kv(models: Models, kv_dtype: str) -> None:
    """Beside the reference with the same KV: a number between two codes may become either of them."""
    found = []
    for device, backend in (("cuda", "triton/float32"), ("cpu", "reference")):
        config = RunConfig(device=device, backend=backend, kv_memory=1 << 26, kv_dtype=kv_dtype)
        executor = load_executor(models.folder, config)
        found.append(conversation(executor))
        executor.close()
    assert distance(*found) < 1e-2


# Captures.


def double(x: Tensor) -> Tensor:
    return x * 2


def unused_graph(x: Tensor) -> weakref.finalize[[], Any]:
    """Leave a graph behind that only a collection finds."""
    garbage: list[Any] = [torch.cuda.CUDAGraph()]
    with torch.cuda.graph(garbage[0]):
        garbage.append(double(x))
    garbage.append(garbage)
    return weakref.finalize(garbage[0], int)


def test_a_collection_does_not_disturb_a_capture() -> None:
    """A graph would be freed in the middle of the capture, which CUDA forbids."""
    recorder, x = GraphRecorder(TritonSampling(torch.device("cuda"))), torch.ones(4, device="cuda")
    unused = unused_graph(x)

    def step() -> Tensor:
        if torch.cuda.is_current_stream_capturing() and gc.isenabled():
            gc.collect()  # as a collection by itself would
        return double(x)

    recorded = recorder.record(step)
    assert recorded is not None
    assert unused.alive
    x.fill_(3)
    assert recorded.run()
    assert recorded.result.tolist() == [6.0] * 4


def test_steps_are_captured_after_a_capture_that_failed() -> None:
    recorder, x = GraphRecorder(TritonSampling(torch.device("cuda"))), torch.ones(4, device="cuda")
    assert recorder.record(lambda: double(x)) is not None
    stream, unused = torch.cuda.current_stream(), unused_graph(x)

    def forbidden() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            gc.collect()
        return double(x)

    with pytest.raises(RuntimeError):
        recorder.record(forbidden)
    assert not unused.alive
    assert torch.cuda.current_stream() == stream
    recorded = recorder.record(lambda: double(x))
    assert recorded is not None
    x.fill_(3)
    assert recorded.run()
    assert recorded.result.tolist() == [6.0] * 4


# KV as a value.


def test_a_fork_copies_nothing_and_writes_its_own(models: Models) -> None:
    executor = models.usual
    with executor.create_kv_cache() as kv:
        executor.prefill(prompts(7, 1000)[0], kv)
        used = executor.pool.usage().used
        with kv.fork() as other:
            assert executor.pool.usage().used == used
            truth = executor.step([5], kv)
            kv.truncate(1000)
            executor.step([6], kv)
            assert torch.equal(executor.step([5], other), truth)


def test_kv_travels_and_names_its_arithmetic(models: Models) -> None:
    executor = models.usual
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(prompts(8, 333)[0], kv)
        blob = kv.serialize()
        truth = executor.step([5], kv)
        other.load(blob)
        assert torch.equal(executor.step([5], other), truth)
    with models.reference.create_kv_cache() as foreign, pytest.raises(KVError):
        foreign.load(blob)


def test_rows_do_not_see_their_neighbours(models: Models) -> None:
    """By default within a tolerance: products of more rows sum in another order."""
    executor, own = models.usual, prompts(9, 50)[0]
    alone, together = [], []
    for kept, others in ((alone, 0), (together, 40)):
        with executor.create_kv_cache(1 + others) as kv:
            executor.prefill([own, *prompts(10, *(3 + 11 * i % 200 for i in range(others)))], kv)
            for token in range(5):
                kept.append(executor.step([[token]] * (1 + others), kv)[:1])
    assert distance(torch.cat(together), torch.cat(alone)) < 2e-2


def test_out_of_memory_is_typed_and_loses_nothing(models: Models) -> None:
    executor = models.usual
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv)
        truth = executor.step([4], kv)
        kv.truncate(3)
        held, whole = torch.cuda.memory_reserved() + (200 << 20), torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(held / whole)  # and leave the rest to tests in other processes
        try:
            with pytest.raises(DeviceMemoryError, match="MiB are free"):
                load_executor(models.folder, RunConfig(device="cuda", kv_memory=8 << 30))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(executor.step([4], kv), truth)


def test_long_prompts_and_sparse_rows(models: Models) -> None:
    """Rows above a thousand tokens take another way through attention, and positions may have holes."""
    found = []
    for executor in (models.exact, models.reference):
        with executor.create_kv_cache(2) as kv:
            first, second = prompts(11, 2200, 1100)
            kv.reserve([2300, 1200])
            rows = [
                Row(Ids(first), range(2200), kv, 0, want=Last(3)),
                Row(Ids(second), range(1100), kv, 1, want=Last(1)),
            ]
            whole = executor.run(Batch.of(rows)).values
            kv.commit([first, second])
            sparse = Row(Ids([1, 2, 3]), [2200, 2210, 2240], kv, 0, want=Last(3))
            executor.run(Batch.of([Row(Ids([4] * 41), range(2200, 2241), kv, 0, want=Nothing())]))
            found.append(torch.cat([whole, executor.run(Batch.of([sparse])).values]).cpu())
    assert distance(found[0], found[1]) < 1e-4


def test_no_kernel_is_compiled_after_the_warm_up(models: Models) -> None:
    executor, dice = models.usual, random.Random(12)
    warm_up(executor, 512, 40)
    before = compiled_kernels()
    for _ in range(12):
        lengths = [dice.choice((1, 1, 1, 3, 16, 17, 90)) for _ in range(dice.randrange(1, 5))]
        with executor.create_kv_cache(len(lengths)) as kv:
            executor.prefill(prompts(13, *lengths), kv)
    for rows in (1, 2, 5, 16, 23, 40):
        with executor.create_kv_cache(rows) as kv:
            executor.step([[7]] * rows, kv)
    assert compiled_kernels() == before


def compiled_kernels() -> dict[str, int]:
    """The number of variants of each kernel that this process has compiled or loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvilt.ops.triton.")]
    found = {one.__name__: one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)}
    return {name: sum(len(caches[0]) for caches in one.device_caches.values()) for name, one in found.items()}
