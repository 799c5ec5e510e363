"""Documents in a store that fails: the answer is that of a healthy run, and the miss is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import blended, memory_store, tokens
from tiny import write_tiny

from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import BlendPrompt, Recipe
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.store.disk import Disk
from kvilt.store.store import Store, StoreLimits
from kvilt.store.tier import Budget

QUILT = BlendPrompt.of([tokens(5, 1), tokens(40, 2), tokens(33, 3), tokens(8, 4)], [False, True, True, False])
PATIENT = StoreLimits(lookup_s=120, layer_s=120, close_s=120)  # a slow machine is no fault
RECIPE = Recipe(0.3, "deviation+query", check_layer=0, min_gain=0.0)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    config = RunConfig(kv_memory=1 << 22, backend="native", threads=1)
    return load_executor(write_tiny(tmp_path_factory.mktemp("faults")), config)


def on_disk(folder: Path) -> Store:
    return Store(None, [Disk(folder, Budget(1 << 28))], limits=PATIENT)


def answer(executor: Executor, store: Store) -> tuple[torch.Tensor, int]:
    """Logits, and how many tokens of documents had to be computed."""
    logits, kv, blending = blended(executor, ChunkCache(executor, store), QUILT, RECIPE)
    kv.close()
    return logits, blending.report().made


def records(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "records").rglob("*") if path.is_file())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1  # in the last layer: the first ones are good
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut, flip, flip_header, empty, remove])
@pytest.mark.parametrize("victims", [1, 2])
def test_damaged_records(executor: Executor, tmp_path: Path, damage: Callable[[Path], None], victims: int) -> None:
    with memory_store() as healthy:
        expected, _ = answer(executor, healthy)
    with on_disk(tmp_path) as store:
        assert torch.equal(answer(executor, store)[0], expected)
        assert store.flush()
    with on_disk(tmp_path) as store:
        logits, made = answer(executor, store)
        assert torch.equal(logits, expected)
        assert made == 0
    for path in records(tmp_path)[:victims]:
        damage(path)
    with on_disk(tmp_path) as store:
        logits, made = answer(executor, store)
        assert torch.equal(logits, expected)
        assert made > 0
        assert (
            sum(point["value"] for point in store.metrics.snapshot()["kvilt_store_misses_total"]["series"]) >= victims
        )
        assert store.flush()
    with on_disk(tmp_path) as store:  # what was damaged was replaced by what was computed
        logits, made = answer(executor, store)
        assert torch.equal(logits, expected)
        assert made == 0


def test_records_under_each_others_names(executor: Executor, tmp_path: Path) -> None:
    with on_disk(tmp_path) as store:
        expected, _ = answer(executor, store)
        assert store.flush()
    one, other = records(tmp_path)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    with on_disk(tmp_path) as store:
        logits, made = answer(executor, store)
        assert torch.equal(logits, expected)
        assert made == QUILT.reused


def test_another_model_does_not_find_these_documents(executor: Executor, tmp_path: Path) -> None:
    """The same tokens and shapes, other weights."""
    folder = write_tiny(tmp_path / "other", rope_theta=500.0)
    other = load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))
    with on_disk(tmp_path / "store") as store:
        answer(executor, store)
        with memory_store() as healthy:
            expected, _ = answer(other, healthy)
        logits, made = answer(other, store)
        assert torch.equal(logits, expected)
        assert made == QUILT.reused
