"""Kernels on a GPU beside the reference on the CPU: attention sinks, repairs, weights of 8-bit floats, experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from kvilt.ops.contract import AttentionMask, Interpolation, Ops, PageShape, PageStore, Paging, Routing, RowLengths
from kvilt.ops.kv_dtypes import KV_DTYPES
from kvilt.ops.packed_values import unpack_values
from kvilt.ops.reference import ReferenceOps
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

CPU = torch.device("cpu")
PAGE = 32


def triton_ops(dtype: torch.dtype = torch.bfloat16) -> Ops:
    from kvilt.ops.triton.backend import TritonOps

    return TritonOps(torch.device("cuda"), dtype)


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def distance(found: Tensor, truth: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double().cpu() - truth.double()).norm() / truth.double().norm())


# Rows by their number of keys and the positions that ask.
ROWS = {
    "decode": [(3000, [2999]), (70, [69]), (1, [0])],
    "ragged": [(300, list(range(300))), (40, list(range(35, 40))), (500, [499])],
    "sparse": [(700, [5, 44, 300, 699]), (64, [0, 63])],
}
MASKS = {
    "plain": AttentionMask(0.1), "window": AttentionMask(0.1, window=100), "cap": AttentionMask(0.1, soft_cap=5.0),
}  # fmt: skip


def paging_of(rows: list[tuple[int, list[int]]], device: torch.device) -> Paging:
    used, tables = 0, []
    for keys, _ in rows:
        tables.append(list(range(used, used + -(-keys // PAGE))))
        used += len(tables[-1])
    width, starts = max(map(len, tables)), [0]
    for _, positions in rows:
        starts.append(starts[-1] + len(positions))
    at = [position for _, positions in rows for position in positions]
    ends = [positions[-1] + 1 for _, positions in rows]
    lengths = RowLengths.of(tuple(starts), at, (torch.tensor(starts).to(device), torch.tensor(ends).to(device)))
    whole = torch.tensor([table + [-1] * (width - len(table)) for table in tables]).to(device)
    return Paging(whole, torch.empty(0, dtype=torch.int64, device=device), lengths, torch.tensor(at).to(device))


def filled(ops: Ops, dtype: str, pages: int) -> PageStore:
    store = ops.new_pages(PageShape(1, PAGE, 2, 64, 64, KV_DTYPES[dtype]), pages, ops.device)
    slots = torch.arange(pages * PAGE)
    keys, values = (random_of(len(slots), 2, 64, seed=seed) for seed in (1, 2))
    ops.write(store, 0, slots.to(ops.device), keys.to(ops.device, ops.dtype), values.to(ops.device, ops.dtype))
    return store


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8", "k8v4"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ROWS)
def test_sinks_join_once(name: str, kind: str, dtype: str) -> None:
    rows, mask = ROWS[name], MASKS[kind]
    found = []
    for ops in (triton_ops(), ReferenceOps()):
        store, paging = filled(ops, dtype, 1 + sum(-(-keys // PAGE) for keys, _ in rows)), paging_of(rows, ops.device)
        query = random_of(paging.starts[-1], 8, 64, seed=3).to(ops.device, ops.dtype)
        sinks = torch.linspace(-3.0, 12.0, 8, device=ops.device)
        sunk = AttentionMask(mask.scale, mask.window, mask.soft_cap, sinks)
        found.append(ops.attention(query, store, 0, paging, sunk).float().cpu())
    assert distance(*found) < 2e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8", "k8v4"])
def test_a_repair_writes_what_the_reference_does(dtype: str) -> None:
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    tokens, anchors = order[:213].sort().values, order[213:253].sort().values
    weights, found = torch.rand((213, 40), generator=torch.Generator().manual_seed(1)) / 40, []
    for ops in (triton_ops(), ReferenceOps()):
        store = ops.new_pages(PageShape(1, PAGE, 2, 64, 64, KV_DTYPES[dtype]), 7, ops.device)
        how = Interpolation(*(one.to(ops.device) for one in (tokens, anchors, weights)))
        kept = (random_of(500, 2, 64, seed=1).to(ops.device), random_of(500, 2, 64, seed=2).to(ops.device))
        fresh = (random_of(40, 2, 64, seed=3).to(ops.device), random_of(40, 2, 64, seed=4).to(ops.device))
        slots = torch.arange(213, device=ops.device).flip(0)
        turn = ops.rotation(tokens.to(ops.device), torch.linspace(1.0, 0.01, 32, device=ops.device), 1.0, "half")
        ops.interpolate(store, 0, slots, how, kept, fresh, turn)
        found.append(ops.read_slots(store, slots))
    # A number between two that pages hold may go to either.
    assert distance(found[0].keys.float(), found[1].keys.float()) < 5e-3
    packed = KV_DTYPES[dtype].packed_values
    values = [unpack_values(kv.values.cpu()) if packed else kv.values.float() for kv in found]
    assert distance(*values) < (2e-2 if packed else 5e-3)
    torch.testing.assert_close(found[0].key_scales, found[1].key_scales)


SCALES = {"tensor": (1,), "rows": (300, 1), "blocks": (3, 5)}


def float8_weight(scales: str, seed: int = 0) -> QuantTensor:
    codes = random_of(300, 640, seed=seed).mul(16).to(torch.float8_e4m3fn)
    own = torch.rand(SCALES[scales], generator=torch.Generator().manual_seed(seed)) * 0.01
    return QuantTensor.of_float8(codes, own)


@pytest.mark.parametrize("rows", [1, 5, 40, 100])
@pytest.mark.parametrize("scales", SCALES)
def test_products_with_weights_of_8_bit_floats(scales: str, rows: int) -> None:
    """Few rows keep their 16 bits; more are rounded to 8-bit floats, on cards that multiply these."""
    from kvilt.ops.triton import float8_pairs

    off = 4e-2 if rows > 16 and float8_pairs.has_pairs(0) else 4e-3
    ops, weights, x = triton_ops(), [float8_weight(scales, seed) for seed in (0, 1)], random_of(rows, 640)
    truth = [x.double() @ dequantize(weight).double().T for weight in weights]
    maps = [(ops.prepare(weight), None) for weight in weights]
    inputs = x.cuda()
    assert distance(ops.linear(inputs, maps[0][0]).float().cpu(), truth[0]) < off
    for made, expected in zip(ops.linears(inputs, maps), truth, strict=True):
        assert distance(made.float().cpu(), expected) < off
    gated = ops.gate_up(inputs, maps[0], maps[1], "silu").float().cpu()
    assert distance(gated, F.silu(truth[0]) * truth[1]) < 2 * off
    rows_of = ops.embed(maps[0][0], torch.tensor([299, 0], device="cuda")).cpu()
    assert torch.equal(rows_of, dequantize(weights[0])[[299, 0]].bfloat16())


def test_every_8_bit_float_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[codes & 127 == 127] = 0  # not a number
    weight = QuantTensor.of_float8(codes.view(torch.float8_e4m3fn), torch.ones(1))
    ops = triton_ops()
    inputs = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    for start in range(0, 256, 16):  # few rows, which are not rounded
        found = ops.linear(inputs[start : start + 16], ops.prepare(weight)).cpu()
        assert torch.equal(found, dequantize(weight).bfloat16().T[start : start + 16])


# Experts.


EXPERTS, TOP_K, WIDE, INNER = 16, 3, 256, 320


def expert_weights(name: str) -> list[list[QuantTensor | Tensor]]:
    shapes = [(INNER, WIDE), (INNER, WIDE), (WIDE, INNER)]
    if name == "BF16":
        return [[random_of(*s, seed=9 * e + i) / s[1] ** 0.5 for i, s in enumerate(shapes)] for e in range(EXPERTS)]
    return [[packed_of(name, *s, seed=9 * e + i) for i, s in enumerate(shapes)] for e in range(EXPERTS)]


def packed_of(name: str, rows: int, columns: int, seed: int) -> QuantTensor:
    random, format_ = torch.Generator().manual_seed(seed), FORMATS[name]
    size = (rows, columns // format_.block_elements, format_.block_bytes)
    blocks = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 119 + blocks[..., 0] % 3
    else:
        scales = (torch.rand(*size[:2], 1, generator=random) + 0.5) * 0.01
        blocks[..., :2] = scales.half().view(torch.uint8)
    return QuantTensor.of_blocks(format_, (rows, columns), blocks.view(rows, -1))


@pytest.mark.parametrize("tokens", [1, 3, 20, 150, 1200])
@pytest.mark.parametrize("name", ["BF16", "MXFP4", "Q4_0"])
def test_experts_are_the_references(name: str, tokens: int) -> None:
    weights, found = expert_weights(name), []
    x, logits = random_of(tokens, WIDE, seed=1), random_of(tokens, EXPERTS, seed=2)
    biases = [[random_of(n, seed=7 * e + n) for n in (INNER, INNER, WIDE)] for e in range(EXPERTS)]
    for ops in (triton_ops(), ReferenceOps()):
        maps = [
            tuple((ops.prepare(w), b.to(ops.device, ops.dtype)) for w, b in zip(own, added, strict=True))
            for own, added in zip(weights, biases, strict=True)
        ]
        stack = ops.stack_experts(maps)  # type: ignore[arg-type]
        routed = ops.route(logits.to(ops.device, ops.dtype), Routing(TOP_K))
        made = ops.experts(x.to(ops.device, ops.dtype), routed, stack, "swiglu_oai", x.to(ops.device, ops.dtype))
        found.append((routed, made.float().cpu()))
    (ours, made), (theirs, truth) = found
    assert torch.equal(ours.chosen.cpu(), theirs.chosen)
    torch.testing.assert_close(ours.weights.cpu(), theirs.weights, rtol=1e-4, atol=1e-5)
    assert distance(made, truth) < 1e-2


@pytest.mark.parametrize("rows", [1, 16, 40, 100])
def test_mxfp4_products_are_the_references(rows: int) -> None:
    ops, weight = triton_ops(), packed_of("MXFP4", 500, 352, seed=3)
    x = random_of(rows, 352, seed=4)
    truth = x.double() @ dequantize(weight).double().T
    assert distance(ops.linear(x.cuda(), ops.prepare(weight)), truth) < 6e-3
    assert distance(ops.embed(ops.prepare(weight), torch.tensor([3, 499]).cuda()), dequantize(weight)[[3, 499]]) < 4e-3
