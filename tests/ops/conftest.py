"""Every backend of the table, one after the other: a new one is tested by being in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import KeysValues, Ops, PageShape, PageStore, Paging, RowLengths
from kvilt.ops.select import BACKENDS, CPU, select

# How far a float32 result may be from the float64 truth, relative to the largest number around it.
TOLERANCE = {"native": 4e-6, "triton": 4e-6, "reference": 2e-6}


# The native kernels multiply packed weights with activations of eight bits.
PACKED_TOLERANCE = {"native": 1e-2, "triton": 4e-6, "reference": 2e-6}


@dataclass(frozen=True)
class Near:
    """Compares with the truth; a backend's tolerance is its entry in the table above.

    `more` is what a kernel's own rounding may add, number by number.
    """

    tolerance: float

    def __call__(self, found: Tensor, truth: Tensor, scale: float | None = None, more: Tensor | float = 0.0) -> None:
        assert found.shape == truth.shape
        assert found.dtype == torch.float32
        assert torch.isfinite(found).all()
        unit = float(truth.abs().max()) if scale is None else scale
        error = float(((found.double().cpu() - truth).abs() - more).max()) if found.numel() else 0.0
        assert error <= self.tolerance * max(unit, 1.0), f"off by {error} where numbers are about {unit}"


EVERY = 4  # of the cases that a test of kernels has, one in so many runs by default


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out float8 pages of the native backend, which refuses them (test_kv_dtypes.py).

    The interpreter takes seconds for what a GPU does in microseconds, so most cases of long tests wait for --slow.
    """
    refused = [item for item in items if _is_here(item) and "native" in item.name and "float8" in item.name]
    config.hook.pytest_deselected(items=refused)
    items[:] = [item for item in items if item not in set(refused)]
    interpreted: Counter[str] = Counter()
    for item in items:
        if _is_here(item) and "[triton" in item.name:
            test = item.name.partition("[")[0]
            if test in LONG and interpreted[test] % EVERY:
                item.add_marker(pytest.mark.slow)
            interpreted[test] += 1


LONG = {
    "test_it_is_a_write_and_then_attention",
    "test_so_it_is_with_more_rows",
    "test_norms_of_heads_come_first",
    "test_attention_equals_explicit_loops",
    "test_packed_experts_are_their_weights",
    "test_experts_make_their_weighted_sum",
    "test_keys_turned_on_their_way_are_those_turned_before",
    "test_followers_take_their_share",
    "test_mass_is_the_sum_of_weights",
    "test_pages_are_copied_whole_and_alone",
}


def _is_here(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(backend: str) -> Ops:
    if backend != "triton":
        return select(backend, 1)
    pytest.importorskip("triton")
    from kvilt.ops.triton.backend import TritonOps

    return TritonOps(CPU, torch.float32)


@pytest.fixture
def near(backend: str) -> Near:
    return Near(TOLERANCE[backend.partition("/")[0]])


@pytest.fixture
def near_packed(backend: str) -> Near:
    return Near(PACKED_TOLERANCE[backend])


@pytest.fixture
def random_of() -> Callable[..., Tensor]:
    """Normal numbers that depend on the shape alone."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(hash(shape) % 2**31 + seed)
        return torch.randn(shape, generator=generator)

    return make


@pytest.fixture
def new_pages(ops: Ops) -> Callable[[PageShape, int], PageStore]:
    """Pages on the CPU."""

    def make(shape: PageShape, pages: int) -> PageStore:
        return ops.new_pages(shape, pages, torch.device("cpu"))

    return make


@pytest.fixture
def noisy_pages(ops: Ops, new_pages: Callable[[PageShape, int], PageStore]) -> Callable[[PageShape, int], PageStore]:
    """Pages in which every slot of every layer is NaN until a test writes it."""

    def make(shape: PageShape, pages: int) -> PageStore:
        store = new_pages(shape, pages)
        slots, dtype = torch.arange(pages * shape.page_tokens), shape.dtype
        if dtype.scales:  # such pages hold no NaN: what `write` makes of it
            keys, values = (
                torch.full((len(slots), shape.kv_heads, d), float("nan")) for d in (shape.key_dim, shape.value_dim)
            )
            for layer in range(shape.layers):
                ops.write(store, layer, slots, keys, values)
            return store
        of_all = (shape.layers, len(slots), shape.kv_heads)
        ops.write_slots(
            store,
            slots,
            KeysValues(
                *(torch.full((*of_all, d), float("nan"), dtype=dtype.storage) for d in (shape.key_dim, shape.value_dim))
            ),
        )
        return store

    return make


@pytest.fixture
def paging_of() -> Callable[..., Paging]:
    """The paging of rows given as (page table, positions)."""

    def make(page_tokens: int, *rows: tuple[list[int], list[int]]) -> Paging:
        width = max(len(table) for table, _ in rows)
        tables = torch.tensor([table + [-1] * (width - len(table)) for table, _ in rows])
        slots = [table[p // page_tokens] * page_tokens + p % page_tokens for table, at in rows for p in at]
        starts = [0]
        for _, positions in rows:
            starts.append(starts[-1] + len(positions))
        everywhere = [p for _, positions in rows for p in positions]
        lengths = RowLengths.of(tuple(starts), everywhere)
        return Paging(tables, torch.tensor(slots), lengths, torch.tensor(everywhere))

    return make
