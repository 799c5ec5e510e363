"""Every backend of the table, one after the other: a new one is tested by being in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvilt.ops.contract import Ops, PageShape, PageStore, Paging, RowLengths
from kvilt.ops.kv_dtypes import FLOAT8
from kvilt.ops.select import BACKENDS, CPU

# How far a float32 result may be from the float64 truth, relative to the largest number around it.
TOLERANCE = {"native": 4e-6, "triton": 4e-6, "reference": 2e-6}


# The native kernels multiply packed weights with activations of eight bits.
PACKED_TOLERANCE = {"native": 1e-2, "triton": 4e-6, "reference": 2e-6}


@dataclass(frozen=True)
class Near:
    """Compares with the truth; a backend's tolerance is its entry in the table above."""

    tolerance: float

    def __call__(self, found: Tensor, truth: Tensor, scale: float | None = None) -> None:
        assert found.shape == truth.shape
        assert found.dtype == torch.float32
        assert torch.isfinite(found).all()
        unit = float(truth.abs().max()) if scale is None else scale
        error = float((found.double().cpu() - truth).abs().max()) if found.numel() else 0.0
        assert error <= self.tolerance * max(unit, 1.0), f"off by {error} where numbers are about {unit}"


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(backend: str) -> Ops:
    if backend != "triton":
        return BACKENDS[backend](CPU, 1)
    pytest.importorskip("triton")
    from kvilt.ops.triton.backend import TritonOps

    return TritonOps(CPU, torch.float32)


@pytest.fixture
def near(backend: str) -> Near:
    return Near(TOLERANCE[backend])


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
    """Pages on the CPU, of the dtypes that the backend has kernels for."""

    def make(shape: PageShape, pages: int) -> PageStore:
        if ops.name == "native" and shape.dtype is FLOAT8:  # which refuses it: test_kv_dtypes.py
            pytest.skip("float8 pages are for GPUs")
        return ops.new_pages(shape, pages, torch.device("cpu"))

    return make


@pytest.fixture
def noisy_pages(ops: Ops, new_pages: Callable[[PageShape, int], PageStore]) -> Callable[[PageShape, int], PageStore]:
    """Pages in which every slot of every layer is NaN until a test writes it."""

    def make(shape: PageShape, pages: int) -> PageStore:
        store = new_pages(shape, pages)
        slots = torch.arange(pages * shape.page_tokens)
        for layer in range(shape.layers):
            ops.write(
                store,
                layer,
                slots,
                torch.full((len(slots), shape.kv_heads, shape.key_dim), float("nan")),
                torch.full((len(slots), shape.kv_heads, shape.value_dim), float("nan")),
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
