"""The CUDA kernels of `deterministic=True`: what they compute, and that a row's bits are its own.

In the interpreter a tile has one shape in float32, so equal bits here mean equal orders; `tests/gpu` proves the same of
tensor cores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attention import CASES, Scene
from test_packed import weight_of
from torch import Tensor

pytest.importorskip("triton")

from kvilt.errors import ParamError
from kvilt.ops.contract import AttentionMask, Ops, PackedWeight, PageShape, PageStore
from kvilt.ops.kv_dtypes import FLOAT8, FLOAT32, INT8, K8V4
from kvilt.ops.lowrank import AdapterSlots, LowRank
from kvilt.ops.select import CPU, select
from kvilt.ops.triton import invariant_attention
from kvilt.ops.triton.backend import TritonOps
from kvilt.ops.triton.deterministic import DeterministicTritonOps
from kvilt.ops.triton.quantized import expanded
from kvilt.quant.groups import GROUPED_FORMATS

USUAL = {"latent keys of ragged rows", "ragged rows", "sinks under soft caps", "float8 pages"}


@pytest.fixture
def ops() -> Ops:
    return DeterministicTritonOps(CPU, torch.float32)


@pytest.fixture
def backend() -> str:
    return "triton"


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_attention_equals_explicit_loops(
    ops: Ops, near: Any, noisy_pages: Any, paging_of: Any, random_of: Any, name: str
) -> None:
    case = CASES[name]
    scene = Scene(case, ops, noisy_pages, paging_of, random_of)
    near(ops.attention(scene.query, scene.store, case.layer, scene.paging, case.mask), scene.truth())


class LongRow:
    """A row whose keys fill several segments, and a short one beside it."""

    def __init__(self, ops: Ops, paging_of: Any, random_of: Any, shape: PageShape, mask: AttentionMask) -> None:
        self.ops, self.paging_of, self.mask = ops, paging_of, mask
        self.table, self.other, self.tokens = [4, 2, 0, 5, 1, 3], [6], 6 * shape.page_tokens - 5
        self.store: PageStore = ops.new_pages(shape, 7, CPU)
        slots = torch.arange(7 * shape.page_tokens)
        ops.write(
            self.store, 0, slots, random_of(len(slots), 1, shape.key_dim), random_of(len(slots), 1, shape.value_dim)
        )
        self.query = random_of(self.tokens, 2, shape.query_dim, seed=3)

    def attend(self, *spans: range, beside: bool = False) -> Tensor:
        """The attention of the long row, cut into steps; `beside` a short row."""
        size, made = self.store.shape.page_tokens, []
        for span in spans:
            rows = [(self.other, [0, 1])] if beside else []
            paging = self.paging_of(size, *rows, (self.table, list(span)))
            query = torch.cat([self.query[: 2 * len(rows)], self.query[list(span)]])
            made.append(self.ops.attention(query, self.store, 0, paging, self.mask)[2 * len(rows) :])
        return torch.cat(made)


CHUNKED = {
    "float32": (FLOAT32, AttentionMask(0.5)),
    "latent": (FLOAT32, AttentionMask(0.5)),
    "int8 in a window": (INT8, AttentionMask(0.5, window=70)),
    "float8": (FLOAT8, AttentionMask(0.5)),
    "int8": (INT8, AttentionMask(0.5)),
    "k8v4": (K8V4, AttentionMask(0.5)),
    "float32 in chunks": (FLOAT32, AttentionMask(0.5, window=70, chunked=True)),
    "float32 in a window": (FLOAT32, AttentionMask(0.5, window=70, soft_cap=3.0)),
}


@pytest.mark.parametrize(
    "name", [n if i < 3 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(CHUNKED)]
)
def test_attention_has_its_bits_in_any_chunks(
    ops: Ops, paging_of: Any, random_of: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(invariant_attention, "SEGMENT", 64)
    dtype, mask = CHUNKED[name]
    row = LongRow(ops, paging_of, random_of, PageShape(1, 24, 1, 8, 8, dtype, latent=name == "latent"), mask)
    whole = row.attend(range(row.tokens))
    cuts = [range(5), range(5, 70), range(70, row.tokens)]
    assert torch.equal(row.attend(*cuts), whole)
    assert torch.equal(row.attend(cuts[1], beside=True), whole[5:70])
    for at in (63, 64, row.tokens - 1):  # alone, shared out among programs and by one
        alone = row.attend(range(at, at + 1))
        assert torch.equal(alone[0], whole[at])
        with monkeypatch.context() as patch:
            patch.setattr(invariant_attention, "PROGRAMS", 1)
            assert torch.equal(row.attend(range(at, at + 1)), alone)


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_products_have_their_bits_in_any_batch(ops: Ops, random_of: Any, rows: int) -> None:
    x, weights, norm = random_of(40, 70), [random_of(n, 70, seed=n) for n in (37, 20, 20)], (torch.ones(70), 1e-5)
    residual = random_of(40, 37)
    own = slice(11, 11 + rows) if rows < 40 else slice(0, 40)
    whole, part = (ops.linears(x[s], [(w, None) for w in weights], norm) for s in (slice(0, 40), own))
    assert all(torch.equal(a[own], b) for a, b in zip(whole, part, strict=True))
    gated, alone = (ops.gate_up(x[s], (weights[1], None), (weights[2], None), "silu") for s in (slice(0, 40), own))
    assert torch.equal(gated[own], alone)
    added, alone = (ops.linear(x[s], weights[0], residual=residual[s].clone()) for s in (slice(0, 40), own))
    assert torch.equal(added[own], alone)
    truth = x.double() @ weights[0].double().T + residual.double()
    torch.testing.assert_close(added.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_packed_weights_are_those_that_are_expanded(random_of: Any, name: str) -> None:
    """Few rows unpack in registers, many in memory, into the same bfloat16."""
    ops, weight = DeterministicTritonOps(CPU), weight_of(name, 20, 512)
    packed = ops.prepare(weight)
    assert isinstance(packed, PackedWeight)
    x, residual = random_of(70, 512).bfloat16(), random_of(70, 20).bfloat16()
    wide = expanded(packed.data, packed.handle, torch.bfloat16)
    for rows in (1, 20, 70):
        made = ops.linear(x[:rows], packed, residual=residual[:rows].clone())
        truth = x[:rows].double() @ wide.double().T + residual[:rows]
        assert float((made.double() - truth).abs().max() / truth.abs().max()) < 5e-3


def test_adapters_have_their_bits_in_any_batch(ops: Ops, random_of: Any) -> None:
    product = LowRank(random_of(5, 48), random_of(24, 5), 0.5)
    table = ops.new_table(24, 48, 2)
    table.put(1, ops.prepare_low_rank(product))
    x, slots = random_of(70, 48), torch.tensor([1, -1] * 35)
    outs = []
    for own in (slice(0, 70), slice(4, 5), slice(2, 9)):
        out = torch.zeros(len(slots[own]), 24)
        ops.adapt(x[own], [table], [out], AdapterSlots(slots[own], torch.ones(len(out))))
        outs.append(out)
    assert torch.equal(outs[0][4:5], outs[1])
    assert torch.equal(outs[0][2:9], outs[2])


def test_numerics_name_the_mode(ops: Ops) -> None:
    usual = TritonOps(CPU, torch.float32)
    assert usual.numerics != ops.numerics != DeterministicTritonOps(CPU).numerics
    assert ops.deterministic and not usual.deterministic
    assert "deterministic" in ops.numerics


def test_a_backend_that_does_not_promise_it_is_refused() -> None:
    assert select("auto", 1, deterministic=True).numerics == select("auto", 1).numerics  # the CPU always is
    with pytest.raises(ParamError, match="deterministic: the reference backend"):
        select("reference", deterministic=True)
