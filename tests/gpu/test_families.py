"""Experts, latent and chunked attention, sinks and recurrent state on a GPU: the reference's numbers, in graphs too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from gpu_families import FAMILIES, PACKED, RECURRENT, SIZES, write_family
from torch import Tensor

from kvilt import SamplingParams
from kvilt.batch import Batch, Ids, Row
from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Family:
    """A checkpoint on several backends."""

    name: str
    folder: Path
    reference: ModelExecutor
    exact: ModelExecutor  # float32; of packed weights bfloat16, whose kernels take minutes to compile for float32
    usual: ModelExecutor  # bfloat16


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = write_family(tmp_path_factory.mktemp("family"), request.param)

    def load(backend: str, device: str) -> ModelExecutor:
        return load_executor(folder, RunConfig(device=device, backend=backend, kv_memory=1 << 26))

    usual = load("triton", "cuda")
    exact = usual if request.param in PACKED else load("triton/float32", "cuda")
    made = Family(request.param, folder, load("reference", "cpu"), exact, usual)
    yield made
    for executor in dict.fromkeys((made.reference, exact, usual)):
        executor.close()


def prompts(seed: int, *sizes: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(SIZES["vocab_size"]) for _ in range(size)] for size in sizes]


def conversation(executor: ModelExecutor) -> Tensor:
    """Ragged prompts, decodes, chunks in the middle, and a truncation; the rows of all steps' logits."""
    with executor.create_kv_cache(3) as kv:
        logits = [executor.step(prompts(1, 3, 170, 40), kv)]
        logits += [executor.step([[7], [8], [9]], kv) for _ in range(2)]
        logits += [executor.step(prompts(2, 33, 1, 5), kv)]
        kv.truncate([30, 172, 20])
        return torch.cat([*logits, executor.step(prompts(3, 1, 2, 70), kv)]).double().cpu()


def distances(found: Tensor, truth: Tensor) -> Tensor:
    """Of each row of logits, in parts of its norm."""
    assert found.isfinite().all()
    return (found - truth).norm(dim=1) / truth.norm(dim=1)


def test_logits_are_the_references(family: Family) -> None:
    """In bfloat16 a token may choose another expert where two are nearly equal, so most rows count there."""
    truth = conversation(family.reference)
    if family.exact is not family.usual:
        assert float(distances(conversation(family.exact), truth).max()) < 2e-4
    assert float(distances(conversation(family.usual), truth).median()) < 5e-2


def test_greedy_tokens_are_the_references(family: Family) -> None:
    if family.exact is family.usual:
        pytest.skip("tokens are compared in float32")
    found = []
    for executor in (family.exact, family.reference):
        with executor.create_kv_cache(2) as kv:
            found.append(executor.sample_tokens(20, prompts(4, 5, 60), kv, params=GREEDY))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_graph_gives_what_the_decoder_gives(family: Family, rows: int) -> None:
    """Every decode step is captured; bit for bit where no row is padded, within a rounding where some are."""
    executor = family.exact
    with executor.create_kv_cache(rows) as kv, torch.no_grad():
        executor.prefill(prompts(5, *(1 + 7 * i % 50 for i in range(rows))), kv)
        for _ in range(3):
            kv.reserve([1] * rows)
            batch = Batch.of([Row(Ids([i]), [n], kv, i) for i, n in enumerate(kv.lengths)])
            truth = executor._decoder(batch, lambda _: None).values
            found = executor.run(batch).values
            if executor._replay._padded(batch)[0] == batch.starts:
                assert torch.equal(found, truth)
            near = 5e-2 if executor is family.usual else 1e-4
            assert float(distances(found.double(), truth.double()).median()) < near
            kv.commit([[i] for i in range(rows)])
    assert executor._replay._steps


def test_a_graph_is_right_after_steps_of_other_sizes(family: Family) -> None:
    """What one row does first must not move what graphs of more rows know by its address."""
    executor = family.usual
    with executor.create_kv_cache(3) as kv:
        lines = prompts(8, 4, 9, 14)
        executor.prefill(lines, kv)
        truth = executor.step([[5], [6], [7]], kv)
        with executor.create_kv_cache() as alone:
            for token in (3, 4):
                executor.step([token], alone)
        kv.truncate([len(line) for line in lines])
        again = executor.step([[5], [6], [7]], kv)
        assert float(distances(again.double(), truth.double()).max()) < (5e-2 if family.name in RECURRENT else 1e-6)


def test_kv_is_a_value(family: Family) -> None:
    """Forks, blobs and truncations go on as the cache they came from."""
    executor = family.usual
    with executor.create_kv_cache() as kv, executor.create_kv_cache() as other:
        executor.prefill(prompts(6, 130)[0], kv)
        other.load(kv.serialize())
        with kv.fork() as fork:
            truth = executor.step([5], kv)
            executor.step([6], kv)
            assert torch.equal(executor.step([5], fork), truth)
        assert torch.equal(executor.step([5], other), truth)
        kv.truncate(130)
        again = executor.step([5], kv)
        # A state that was written over is folded again from an earlier one, in products of more rows.
        assert float(distances(again.double(), truth.double()).max()) < (5e-2 if family.name in RECURRENT else 1e-6)
