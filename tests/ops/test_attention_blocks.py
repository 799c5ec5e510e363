"""Law 5 in attention, to the bit: a query gathers the same whatever block, row, batch or thread it is computed in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import _kvilt_native
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native import EMULATED_ATTENTION
from torch import Tensor
from value_rounding import value_rounding

from kvilt.ops.contract import AttentionMask, PageShape, PageStore, Paging, RowLengths
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, KV_DTYPES, KVDtype
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.reference import ReferenceOps

ISAS = [*_kvilt_native.available_isas(), *EMULATED_ATTENTION]
DTYPES = [dtype for dtype in KV_DTYPES.values() if dtype is not FLOAT8]  # those that native has kernels for


@dataclass(frozen=True)
class Drawn:
    """Some rows over one store: for each its page table and the positions that ask."""

    shape: PageShape
    group: int
    mask: AttentionMask
    rows: list[tuple[list[int], list[int]]]
    seed: int

    def paging(self, rows: list[tuple[list[int], list[int]]]) -> Paging:
        width = max(len(table) for table, _ in rows)
        tables = torch.tensor([table + [-1] * (width - len(table)) for table, _ in rows])
        starts = [0]
        for _, positions in rows:
            starts.append(starts[-1] + len(positions))
        at = torch.tensor([p for _, positions in rows for p in positions])
        return Paging(tables, torch.empty(0, dtype=torch.int64), RowLengths.of(tuple(starts), at.tolist()), at)

    def seen(self) -> list[int]:
        """The slots that some query sees."""
        size, window = self.shape.page_tokens, self.mask.window
        slots: dict[int, None] = {}
        for table, positions in self.rows:
            for p in positions:
                chunk = p - p % window if window else 0
                for q in range(chunk if self.mask.chunked else max(0, p - window + 1) if window else 0, p + 1):
                    slots[table[q // size] * size + q % size] = None
        return list(slots)

    def fill(self, ops: Any, noise: float = float("nan"), sizes: bool = False) -> PageStore:
        """Pages with numbers where some query looks and noise everywhere else; with `sizes`, |value| for values."""
        pages = 1 + max(page for table, _ in self.rows for page in table)
        store = ops.new_pages(self.shape, pages, torch.device("cpu"))
        every, seen = torch.arange(pages * self.shape.page_tokens), torch.tensor(self.seen())
        random = torch.Generator().manual_seed(self.seed)
        for slots, numbers in ((every, None), (seen, random)):
            kv = [
                torch.full((len(slots), self.shape.kv_heads, dim), noise)
                if numbers is None
                else torch.randn((len(slots), self.shape.kv_heads, dim), generator=numbers)
                for dim in (self.shape.key_dim, self.shape.value_dim)
            ]
            ops.write(store, 0, slots, kv[0], kv[1].abs() if sizes else kv[1])
        return store

    def queries(self) -> Tensor:
        tokens, heads = sum(len(positions) for _, positions in self.rows), self.group * self.shape.kv_heads
        random = torch.Generator().manual_seed(self.seed + 1)
        return 3 * torch.randn((tokens, heads, self.shape.query_dim), generator=random)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    size = draw(st.sampled_from([1, 4, 16, 19, 32]))
    dims = st.sampled_from([1, 8, 16, 24, 64, 80])
    dtype = draw(st.sampled_from(DTYPES))
    values = st.sampled_from([8, 16, 24, 64, 80, 96]) if dtype.packed_values else dims
    shape = PageShape(1, size, draw(st.integers(1, 3)), draw(dims), draw(values), dtype)
    latent = not dtype.packed_values and draw(st.sampled_from([False, False, True]))
    window = draw(st.sampled_from([0, 0, 1, 5, 40]))
    group, soft_cap = draw(st.integers(1, 7)), draw(st.sampled_from([0.0, 0.0, 2.0]))
    sinks = draw(st.sampled_from([None, None, torch.linspace(-3.0, 8.0, shape.kv_heads * group)]))
    chunked = window > 0 and draw(st.booleans())
    mask = AttentionMask(0.3) if latent else AttentionMask(0.3, window, soft_cap, sinks, chunked)
    rows, pages = [], 0
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 6 * size if size < 32 else 300))
        used = range(pages, pages + -(-length // size))
        pages = used.stop
        sparse = draw(st.booleans())
        first = draw(st.integers(0, length - 1))
        asking = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=9))) if sparse else []
        rows.append((draw(st.permutations(used)), asking or list(range(first, length))))
    return Drawn(replace(shape, latent=latent), group, mask, rows, draw(st.integers(0, 1 << 20)))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(60), derandomize=True)
@given(case=drawn(), threads=st.sampled_from([1, 2, 3, 8]))
def test_a_query_gathers_the_same_in_any_block(isa: str, case: Drawn, threads: int) -> None:
    ops, alone = NativeOps(threads, isa), NativeOps(1, isa)
    store, query = case.fill(ops), case.queries()
    together = ops.attention(query, store, 0, case.paging(case.rows), case.mask).clone()
    reference = ReferenceOps()
    truth = reference.attention(query, case.fill(reference), 0, case.paging(case.rows), case.mask)
    allowed = 3e-5 + 3e-5 * truth.abs()
    if rounding := value_rounding(ops, case.shape):
        sizes = reference.attention(query, case.fill(reference, sizes=True), 0, case.paging(case.rows), case.mask)
        allowed += rounding * sizes
    assert bool(((together - truth).abs() <= allowed).all())  # nor is a NaN allowed
    at = 0
    for table, positions in case.rows:
        for position in positions:
            one = alone.attention(query[at : at + 1], store, 0, case.paging([(table, [position])]), case.mask)
            assert torch.equal(one[0].view(torch.int32), together[at].view(torch.int32))  # also the sign of a zero
            at += 1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.name)
@pytest.mark.parametrize("isa", ISAS)
def test_what_no_query_may_see_leaves_no_trace(isa: str, dtype: KVDtype) -> None:
    """The same queries with other noise behind them, beside them and between their windows."""
    shape = PageShape(1, 32, 2, 64, 64, dtype)
    rows = [(list(range(9, -1, -1)), list(range(100, 290))), (list(range(10, 20)), [0, 31, 33, 250])]
    found = []
    for noise in (float("nan"), float("inf"), -1e30, 0.0):
        case = Drawn(shape, 3, AttentionMask(0.3, 50), rows, 1)
        ops = NativeOps(2, isa)
        found.append(ops.attention(case.queries(), case.fill(ops, noise), 0, case.paging(rows), case.mask).clone())
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(found[0].view(torch.int32), other.view(torch.int32)) for other in found)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=lambda one: one.name)
@pytest.mark.parametrize("isa", ISAS)
def test_a_value_that_is_not_finite_reaches_those_who_see_it_alone(isa: str, dtype: KVDtype) -> None:
    rows = [(list(range(9)), list(range(100, 280)))]
    case = Drawn(PageShape(1, 32, 1, 40, 24, dtype), 3, AttentionMask(0.3), rows, 1)
    ops, found = NativeOps(2, isa), []
    for number in (0.5, float("inf"), float("nan")):
        store, at = case.fill(ops), torch.tensor([5 * 32 + 19])  # the token at 179
        ops.write(store, 0, at, torch.ones(1, 1, 40), torch.full((1, 1, 24), number))
        found.append(ops.attention(case.queries(), store, 0, case.paging(rows), case.mask).clone())
    for other in found[1:]:
        assert torch.equal(other[: 179 - 100], found[0][: 179 - 100])
        assert not torch.isfinite(other[179 - 100 :]).any()


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_differ_as_they_do_in_float32(isa: str) -> None:
    """Scores of some hundreds, of which the eighth bit would move a weight by a fifth."""
    shape, rows = PageShape(1, 32, 1, 64, 64, FLOAT16), [(list(range(7)), list(range(220)))]
    ops, reference, found = NativeOps(2, isa), ReferenceOps(), []
    random = torch.Generator().manual_seed(3)
    key, value, query = (8 * torch.randn((220, heads, 64), generator=random) for heads in (1, 1, 2))
    for one, kept in ((ops, value), (reference, value), (reference, value.abs())):
        store = one.new_pages(shape, 7, torch.device("cpu"))
        one.write(store, 0, torch.arange(220), key, kept)
        paging = Drawn(shape, 2, AttentionMask(0.3), rows, 1).paging(rows)
        found.append(one.attention(query, store, 0, paging, AttentionMask(0.3)).clone())
    # Eight bits would move some of these numbers by 0.5 and more.
    assert bool(((found[0] - found[1]).abs() <= 0.05 + value_rounding(ops, shape) * found[2]).all())


@pytest.mark.parametrize("isa", ISAS)
def test_a_long_context_is_cut_among_threads_without_a_trace(isa: str) -> None:
    shape = PageShape(1, 32, 1, 64, 64, FLOAT16)
    rows = [(list(range(40)), [1234]), (list(range(40, 42)), [40, 41]), (list(range(42, 75)), [1000])]
    case = Drawn(shape, 4, AttentionMask(0.3, sinks=torch.tensor([0.0, 5.0, -5.0, 30.0])), rows, 3)
    found = []
    for threads in (1, 2, 5, 16):
        ops = NativeOps(threads, isa)
        found.append(ops.attention(case.queries(), case.fill(ops), 0, case.paging(rows), case.mask).clone())
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("isa", ISAS)
def test_latent_keys_of_a_real_size_are_cut_among_threads_without_a_trace(isa: str) -> None:
    shape = PageShape(1, 32, 1, 64, 512, FLOAT16, latent=True)
    rows = [(list(range(8)), [200]), (list(range(8, 12)), [40, 41, 99])]
    case = Drawn(shape, 16, AttentionMask(0.05), rows, 3)
    found = []
    for threads in (1, 2, 5):
        ops = NativeOps(threads, isa)
        found.append(ops.attention(case.queries(), case.fill(ops), 0, case.paging(rows), case.mask).clone())
    assert all(torch.equal(found[0], other) for other in found)


def test_pages_that_are_not_there_are_refused() -> None:
    ops, shape = NativeOps(1), PageShape(1, 4, 1, 8, 8, FLOAT32)
    store = ops.new_pages(shape, 3, torch.device("cpu"))
    query, mask = torch.zeros(1, 1, 8), AttentionMask(1.0)

    def ask(table: list[int], position: int) -> Tensor:
        at = torch.tensor([position])
        paging = Paging(torch.tensor([table]), torch.empty(0, dtype=torch.int64), RowLengths.of((0, 1), [position]), at)
        return ops.attention(query, store, 0, paging, mask)

    for table, position in (([0, 1], 8), ([0, 1], -1), ([0, 3], 5), ([0, -1], 5), ([-1, 1], 5)):
        with pytest.raises(IndexError):
            ask(table, position)
    for slot in (-1, 12, 1 << 40):
        at = torch.tensor([slot])
        with pytest.raises(IndexError):
            ops.write(store, 0, at, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
        with pytest.raises(IndexError):
            ops.read_slots(store, at)
