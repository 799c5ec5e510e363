"""Attention over pages against explicit loops in float64, with NaN in every slot that no query may see."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import _kvilt_native
import pytest
import torch
from torch import Tensor
from value_rounding import value_rounding

from kvilt.ops.contract import AttentionMask, Ops, PageShape
from kvilt.ops.kv_dtypes import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, K8V4
from kvilt.ops.packed_values import unpack_values
from kvilt.ops.select import BACKENDS

# `native` is the best instruction set of this machine; the others must stay right as well.
EVERY_BACKEND = [*BACKENDS, *(f"native/{isa}" for isa in _kvilt_native.available_isas()[1:])]

SHAPE = PageShape(layers=2, page_tokens=4, kv_heads=2, key_dim=8, value_dim=8, dtype=FLOAT32)

LATENT = PageShape(2, 4, 1, 6, 20, FLOAT32, latent=True)  # keys go on in their values


@dataclass(frozen=True)
class RowCase:
    """One row: its page table (-1: given back), the positions whose KV exists, and those that ask."""

    table: list[int]
    written: range | list[int]
    asking: range | list[int]


@dataclass(frozen=True)
class Case:
    rows: list[RowCase]
    heads: int = 4
    mask: AttentionMask = field(default_factory=lambda: AttentionMask(scale=0.35))
    shape: PageShape = SHAPE
    layer: int = 1


WINDOW = AttentionMask(scale=0.35, window=6)
CHUNKS = AttentionMask(scale=0.35, window=5, chunked=True)
SINKS = torch.tensor([0.5, -2.0, 3.0, 40.0])  # of the four heads that a case has by default

CASES = {
    "one token": Case([RowCase([3], range(1), range(1))]),
    "a prompt": Case([RowCase([5, 0, 7], range(10), range(10))]),
    "a decode step": Case([RowCase([5, 0, 7], range(10), range(9, 10))]),
    "a chunk in the middle": Case([RowCase([5, 0, 7, 1], range(12), range(5, 12))]),
    "a chunk that ends with its page": Case([RowCase([5, 0], range(8), range(3, 8))]),
    "ragged rows": Case(
        [
            RowCase([5, 0, 7], range(10), range(9, 10)),
            RowCase([1], range(3), range(3)),
            RowCase([2, 4, 8, 9, 6], range(20), range(13, 20)),
        ]
    ),
    "rows that share a page": Case([RowCase([5, 0], range(7), [6]), RowCase([5, 2], range(6), [4, 5])]),
    "sparse positions": Case([RowCase([5, 0, 7], range(11), [0, 3, 4, 8, 10])]),
    "sparse positions among rows": Case(
        [RowCase([5, 0, 7], range(11), [2, 9]), RowCase([1, 3], range(8), range(8)), RowCase([2], range(4), [0, 3])]
    ),
    "reserved pages behind the row": Case([RowCase([5, 0, 7, 8, 9], range(6), range(4, 6))]),
    "more queries than a block of them": Case([RowCase(list(range(75))[::-1], range(300), range(300))], heads=2),
    "every head its own keys": Case([RowCase([5, 0], range(7), range(7))], heads=2),
    "six heads on one": Case(
        [RowCase([5, 0], range(7), range(7))], heads=6, shape=PageShape(1, 4, 1, 8, 8, FLOAT32), layer=0
    ),
    "values narrower than keys": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 6, FLOAT32)),
    "float16 pages": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 8, FLOAT16)),
    "bfloat16 pages": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 8, BFLOAT16)),
    "int8 pages": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 8, INT8)),
    "int8 pages and sparse windows": Case(
        [RowCase([5, 0, 7, 1], range(16), [2, 9, 15])], mask=WINDOW, shape=PageShape(2, 4, 2, 8, 6, INT8)
    ),
    "k8v4 pages": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 8, K8V4)),
    "k8v4 pages and sparse windows": Case(
        [RowCase([5, 0, 7, 1], range(16), [2, 9, 15])], mask=WINDOW, shape=PageShape(2, 4, 2, 8, 6, K8V4)
    ),
    "k8v4 pages of a long row": Case(
        [RowCase(list(range(75))[::-1], range(300), [150, 299])], shape=PageShape(2, 4, 2, 8, 40, K8V4)
    ),
    "float8 pages": Case([RowCase([5, 0], range(7), range(7))], shape=PageShape(2, 4, 2, 8, 8, FLOAT8)),
    "float8 pages of long rows": Case(
        [RowCase([5, 0, 7, 1], range(16), [15]), RowCase([2], range(3), range(3))],
        shape=PageShape(2, 4, 2, 8, 6, FLOAT8),
    ),
    "pages that fill no vector": Case(
        [RowCase([5, 0, 3], range(50), range(50))], shape=PageShape(2, 19, 2, 24, 40, FLOAT16)
    ),
    "pages of more than one vector": Case(
        [RowCase([2, 0, 3, 1], range(150), range(150))], shape=PageShape(2, 48, 2, 16, 16, FLOAT32)
    ),
    "pages of one token": Case([RowCase([5, 0, 3, 2], range(4), range(4))], shape=PageShape(2, 1, 2, 8, 8, FLOAT32)),
    "a window over a prompt": Case([RowCase([5, 0, 7, 1], range(14), range(14))], mask=WINDOW),
    "a window longer than the row": Case([RowCase([5], range(4), range(4))], mask=WINDOW),
    "a window of one": Case([RowCase([5, 0], range(7), range(7))], mask=AttentionMask(scale=0.35, window=1)),
    "a window whose old pages are gone": Case(
        [RowCase([-1, -1, 7, 1], range(9, 15), range(14, 15)), RowCase([-1, 3, 2], range(4, 12), range(9, 12))],
        mask=WINDOW,
    ),
    "a window at the edge of what is held": Case([RowCase([-1, 7, 1], range(4, 12), range(9, 12))], mask=WINDOW),
    "chunks of a prompt": Case([RowCase([5, 0, 7, 1], range(14), range(14))], mask=CHUNKS),
    "the first token of a chunk": Case([RowCase([5, 0, 7], range(11), [10])], mask=CHUNKS),
    "a chunk whose old pages are gone": Case([RowCase([-1, 7, 1], range(5, 12), range(8, 12))], mask=CHUNKS),
    "chunks and sparse positions": Case([RowCase([5, 0, 7, 1], range(16), [4, 5, 15])], mask=CHUNKS),
    "a window and sparse positions": Case([RowCase([5, 0, 7, 1], range(16), [2, 9, 15])], mask=WINDOW),
    "soft caps": Case([RowCase([5, 0], range(7), range(7))], mask=AttentionMask(scale=3.0, soft_cap=5.0)),
    "soft caps in a window": Case(
        [RowCase([5, 0, 7], range(12), range(12))], mask=AttentionMask(scale=3.0, window=3, soft_cap=2.0)
    ),
    "scores so large that exponentials overflow": Case(
        [RowCase([5, 0], range(7), range(7))], mask=AttentionMask(scale=300.0)
    ),
    "sinks of a decode step": Case([RowCase([5, 0, 7], range(10), [9])], mask=AttentionMask(0.35, sinks=SINKS)),
    "sinks of ragged rows": Case(
        [RowCase([5, 0, 7], range(10), [9]), RowCase([1], range(3), range(3)), RowCase([2, 4], range(8), [1, 4, 7])],
        mask=AttentionMask(0.35, sinks=SINKS),
    ),
    "sinks in a window": Case(
        [RowCase([-1, 7, 1], range(4, 12), range(9, 12)), RowCase([5, 0, 2], range(12), [2, 9])],
        mask=AttentionMask(0.35, window=6, sinks=SINKS),
    ),
    "sinks under soft caps": Case(
        [RowCase([5, 0, 7], range(12), range(12))], mask=AttentionMask(3.0, window=5, soft_cap=2.0, sinks=SINKS)
    ),
    "sinks of a row in many shares": Case(
        [RowCase(list(range(75))[::-1], range(300), [299]), RowCase([75], range(3), [2])],
        mask=AttentionMask(0.35, sinks=SINKS),
    ),
    "sinks over int8 pages": Case(
        [RowCase([5, 0], range(7), range(7))],
        mask=AttentionMask(0.35, sinks=SINKS),
        shape=PageShape(2, 4, 2, 8, 8, INT8),
    ),
    "sinks over float8 pages": Case(
        [RowCase(list(range(75)), range(300), [150, 299])],
        mask=AttentionMask(0.35, sinks=SINKS),
        shape=PageShape(2, 4, 2, 8, 8, FLOAT8),
    ),
    "latent keys of a prompt": Case([RowCase([5, 0, 7], range(10), range(10))], shape=LATENT),
    "latent keys of ragged rows": Case(
        [RowCase([5, 0, 7], range(10), [9]), RowCase([1], range(3), range(3)), RowCase([2, 4], range(8), [1, 4, 7])],
        heads=20,
        shape=LATENT,
    ),
    "latent keys of a row in many shares": Case([RowCase(list(range(75))[::-1], range(300), [299])], shape=LATENT),
    "latent keys in bfloat16": Case([RowCase([5, 0], range(7), range(7))], shape=replace(LATENT, dtype=BFLOAT16)),
    "latent keys in int8": Case([RowCase([5, 0], range(7), range(7))], shape=replace(LATENT, dtype=INT8)),
    "latent keys in float8": Case([RowCase([5, 0], range(7), [2, 6])], shape=replace(LATENT, dtype=FLOAT8)),
    "sinks beside scores that overflow": Case(
        [RowCase([5, 0], range(7), range(7))], mask=AttentionMask(300.0, sinks=100 * SINKS)
    ),
}


class Scene:
    """A store with NaN everywhere but in the written positions of a case, and the same numbers in plain dicts."""

    def __init__(self, case: Case, ops: Ops, noisy_pages: Any, paging_of: Any, random_of: Any) -> None:
        self.case, shape = case, case.shape
        pages = 1 + max(page for row in case.rows for page in row.table)
        self.store = noisy_pages(shape, pages)
        size = shape.page_tokens
        slots = {row.table[p // size] * size + p % size: None for row in case.rows for p in row.written}
        at = torch.tensor(list(slots))
        keys = random_of(len(slots), shape.kv_heads, shape.key_dim)
        values = random_of(len(slots), shape.kv_heads, shape.value_dim, seed=1)
        ops.write(self.store, case.layer, at, keys, values)
        self.keys, self.values = self._stored(ops, case.layer, list(slots))
        self.paging = paging_of(size, *((row.table, list(row.asking)) for row in case.rows))
        self.query = random_of(self.paging.starts[-1], case.heads, shape.query_dim, seed=2)

    def _stored(self, ops: Ops, layer: int, slots: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What the store says it holds, token by token; tests of pages say what it must be."""
        kv = ops.read_slots(self.store, torch.tensor(slots))
        keys, values = kv.keys[layer].double(), kv.values[layer]
        values = unpack_values(values).double() if self.case.shape.dtype.packed_values else values.double()
        if kv.key_scales.numel():
            keys, values = keys * kv.key_scales[layer].unsqueeze(-1), values * kv.value_scales[layer].unsqueeze(-1)
        if self.case.shape.latent:
            keys = torch.cat((keys, values), dim=-1)
        return dict(zip(slots, keys, strict=True)), dict(zip(slots, values, strict=True))

    def truth(self) -> Tensor:
        """[tokens, heads, value_dim], one query and one head at a time."""
        return self._means(self.values)

    def sizes(self) -> Tensor:
        """The same means of |value|: what the rounding of values and weights is relative to."""
        return self._means({slot: value.abs() for slot, value in self.values.items()})

    def _means(self, values: Mapping[int, Tensor]) -> Tensor:
        asking = [(row.table, position) for row in self.case.rows for position in row.asking]
        return torch.stack([self._token(i, table, position, values) for i, (table, position) in enumerate(asking)])

    def _token(self, index: int, table: list[int], position: int, values: Mapping[int, Tensor]) -> Tensor:
        mask, size = self.case.mask, self.case.shape.page_tokens
        oldest = max(0, position - mask.window + 1) if mask.window else 0
        if mask.chunked:
            oldest = position - position % mask.window
        slots = [table[p // size] * size + p % size for p in range(oldest, position + 1)]
        per_head = self.case.heads // self.case.shape.kv_heads
        own = [{slot: values[slot][h] for slot in slots} for h in range(self.case.shape.kv_heads)]
        return torch.stack([self._head(index, h, h // per_head, own[h // per_head]) for h in range(self.case.heads)])

    def _head(self, index: int, head: int, kv_head: int, values: Mapping[int, Tensor]) -> Tensor:
        mask, q = self.case.mask, self.query[index, head].double()
        scores = [float(q @ self.keys[slot][kv_head]) * mask.scale for slot in values]
        if mask.soft_cap:
            scores = [mask.soft_cap * math.tanh(score / mask.soft_cap) for score in scores]
        scores += [] if mask.sinks is None else [float(mask.sinks[head])]  # and a value of nothing
        weights = [math.exp(score - max(scores)) for score in scores]
        mixed = sum(w * value for w, value in zip(weights, values.values(), strict=False))
        return mixed / math.fsum(weights)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_attention_equals_explicit_loops(
    ops: Ops, near: Any, noisy_pages: Any, paging_of: Any, random_of: Any, name: str
) -> None:
    case = CASES[name]
    scene = Scene(case, ops, noisy_pages, paging_of, random_of)
    found = ops.attention(scene.query, scene.store, case.layer, scene.paging, case.mask)
    rounding = value_rounding(ops, case.shape)
    # Scores of some hundreds carry their rounding into the weights.
    near(found, scene.truth(), max(1.0, 10 * case.mask.scale), more=rounding and rounding * scene.sizes())


def test_queries_do_not_change_with_their_neighbours(
    ops: Ops, near: Any, noisy_pages: Any, paging_of: Any, random_of: Any
) -> None:
    case = CASES["ragged rows"]
    scene = Scene(case, ops, noisy_pages, paging_of, random_of)
    together = ops.attention(scene.query, scene.store, case.layer, scene.paging, case.mask)
    at = 0
    for row in case.rows:
        for position in row.asking:
            alone = paging_of(4, (row.table, [position]))
            found = ops.attention(scene.query[at : at + 1], scene.store, case.layer, alone, case.mask)
            near(found, together[at : at + 1].double())
            at += 1


def test_noise_between_sparse_windows_is_seen_by_none(
    request: pytest.FixtureRequest,
    backend: str,
    ops: Ops,
    near: Any,
    noisy_pages: Any,
    paging_of: Any,
    random_of: Any,
) -> None:
    """Two queries of one row far apart: what lies between their windows was never written."""
    case = Case([RowCase([5, 0, 7, 1], [2, 3, 12, 13], [3, 13])], mask=AttentionMask(scale=0.35, window=2))
    scene = Scene(case, ops, noisy_pages, paging_of, random_of)
    near(ops.attention(scene.query, scene.store, case.layer, scene.paging, case.mask), scene.truth())
