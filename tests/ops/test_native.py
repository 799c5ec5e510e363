"""The native kernels: every packed format on every instruction set this machine has, and law 5 to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _kvilt_native
import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_tiny

import kvilt
from kvilt.batch import Batch, Ids, Last, Row
from kvilt.config import RunConfig
from kvilt.errors import InputError, Unsupported
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.native.border import F32Address
from kvilt.ops.select import select
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize

ISAS = _kvilt_native.available_isas()


def runs(isa: str) -> bool:
    """Whether this machine can run an instruction set that is not in the list."""
    try:
        NativeOps(1, isa)
    except Unsupported:
        return False
    return True


# The source of AMX kernels with their tiles in plain C++, for machines with AVX-512, BF16 and VBMI.
EMULATED = [isa for isa in ("amx-bf16-emulated",) if runs(isa)]
EMULATED_ATTENTION = [isa for isa in ("amx-attention-emulated",) if runs(isa)]  # with the same products
IN_BFLOAT16 = ("amx-bf16", "amx-attention")
PACKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"]
BYTES = ["IQ3_S", "IQ2_XS"]  # formats that become blocks of bytes
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture(scope="module", params=[*ISAS, *EMULATED])
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(2, request.param)


@pytest.fixture(scope="module", params=[isa for isa in ISAS if isa not in IN_BFLOAT16])
def byte_ops(request: pytest.FixtureRequest) -> NativeOps:
    """Those whose activations are bytes; the others are in test_amx_bf16.py."""
    return NativeOps(2, request.param)


def in_bfloat16(ops: NativeOps) -> bool:
    """Whether products take weights and activations in bfloat16."""
    return ops.numerics.endswith(tuple(f"/{isa}" for isa in IN_BFLOAT16))


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Random bits with ordinary scales, in a file's own layout."""
    layout = FORMATS[name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // layout.block_elements, layout.block_bytes), dtype=np.uint8)
    one = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS"), (0,))
    halves = {**one, "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(name, (0, 2))
    for at in halves:
        scale = random.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return QuantTensor.of_blocks(layout, (rows, columns), torch.from_numpy(blocks.reshape(rows, -1)))


def a_weight(name: str, rows: int, columns: int) -> Any:
    return torch.randn(rows, columns).to(PLAIN[name]) if name in PLAIN else random_blocks(name, rows, columns)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_weight_unpacks_to_itself(ops: NativeOps, name: str) -> None:
    weight = random_blocks(name, 37, 512)
    assert torch.equal(ops.embed(ops.prepare(weight), torch.arange(37)), dequantize(weight))
    gguf = pytest.importorskip("gguf")
    oracle = gguf.dequantize(weight.blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(dequantize(weight), torch.from_numpy(oracle))


@pytest.mark.parametrize("name", [*PACKED, *BYTES, *PLAIN])
def test_linear_is_close_to_the_product_with_unpacked_weights(ops: NativeOps, name: str) -> None:
    weight = a_weight(name, 37, 512)
    plain = weight.float() if isinstance(weight, torch.Tensor) else dequantize(weight)
    x, bias = torch.randn(21, 512), torch.randn(37)
    found, truth = ops.linear(x, ops.prepare(weight), bias), x @ plain.T + bias
    error = float((found - truth).norm() / truth.norm())
    assert error < (1e-5 if name == "F32" or (name in PLAIN and not in_bfloat16(ops)) else 1e-2)


def eight_bits(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks [..., 32] with one scale each."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / scale.clamp(min=1e-30)).round() * scale


def as_kernels_see(x: torch.Tensor) -> torch.Tensor:
    """Activations in bytes: eight bits, and eight more where a block's peak is at least twice the row's usual one."""
    blocks = x.double().view(len(x), -1, 32)
    rounded, squares = eight_bits(blocks), blocks.abs().amax(-1) ** 2
    large = squares > 4 * squares.mean(-1, keepdim=True)
    return (rounded + eight_bits(blocks - rounded) * large[..., None]).view(x.shape)


def with_outliers(rows: int, columns: int) -> torch.Tensor:
    """Activations as models have them: a few of them are very large, and rows differ in which."""
    x = torch.randn(rows, columns)
    x[torch.arange(rows), torch.randint(columns, (rows,))] = 300.0
    x[:, 40] = 200.0
    return x


def off_ties(x: torch.Tensor) -> torch.Tensor:
    """Activations of which none lies between two whole numbers: there float32 and float64 round to different ones."""
    while True:
        blocks = x.double().view(len(x), -1, 32)
        scaled = blocks / (blocks.abs().amax(-1, keepdim=True) / 127)
        near = ((scaled - scaled.floor() - 0.5).abs() < 1e-4).view(x.shape)
        if not near.any():
            return x
        x = torch.where(near, x * 0.99, x)


@pytest.mark.parametrize("name", PACKED)
def test_linear_is_exact_but_for_the_rounding_of_activations(byte_ops: NativeOps, name: str) -> None:
    weight, rows = random_blocks(name, 37, 512), (1, 5, 8, 27)
    plain = dequantize(weight).double()
    for x in map(off_ties, (*(torch.randn(n, 512) for n in rows), *(with_outliers(n, 512) for n in rows))):
        truth, size = as_kernels_see(x) @ plain.T, x.double().abs() @ plain.abs().T  # what rounding is relative to
        # What eight bits leave may still lie between two whole numbers; it is a hundredth of the first rounding.
        assert float(((byte_ops.linear(x, byte_ops.prepare(weight)) - truth) / size).abs().max()) < 1e-4


@pytest.mark.parametrize("name", PACKED)
def test_blocks_of_large_activations_keep_fifteen_bits(byte_ops: NativeOps, name: str) -> None:
    weight, x = random_blocks(name, 37, 2048), torch.zeros(11, 2048)
    x[:, 64:96] = torch.randn(11, 32) * 100
    x[torch.arange(11), 300 + 100 * torch.arange(11)] = 77.0  # each row has a block of its own
    plain = dequantize(weight).double()
    error = (byte_ops.linear(x, byte_ops.prepare(weight)) - x.double() @ plain.T) / (x.double().abs() @ plain.abs().T)
    assert float(error.abs().max()) < 5e-5  # eight bits alone: 1e-3


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_remainders_of_many_rows_and_blocks_reach_their_rows(byte_ops: NativeOps, name: str) -> None:
    weight, x = random_blocks(name, 20, 2560), off_ties(with_outliers(150, 2560))
    packed, plain = byte_ops.prepare(weight), dequantize(weight).double()
    found, size = byte_ops.linear(x, packed), x.double().abs() @ plain.abs().T
    assert float(((found - as_kernels_see(x) @ plain.T) / size).abs().max()) < 1e-4
    assert torch.equal(torch.cat([byte_ops.linear(row, packed) for row in x.split(1)]), found)


def test_a_row_of_zeros_beside_rests_stays_zero(ops: NativeOps) -> None:
    packed, x = ops.prepare(random_blocks("Q4_1", 37, 512)), with_outliers(6, 512)
    x[2], x[4] = 0.0, 1e-37  # too small for a scale
    found = ops.linear(x, packed)
    assert not found[2].any()
    if in_bfloat16(ops):  # which has numbers that small
        assert float(found[4].abs().max()) < 1e-30
    else:
        assert not found[4].any()


@settings(max_examples=examples(40), derandomize=True)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 50),
    blocks=st.integers(1, 5),
    name=st.sampled_from([*PACKED, *PLAIN]),
    outliers=st.booleans(),
)
def test_a_row_of_linear_does_not_see_its_neighbours(
    rows: int, outputs: int, blocks: int, name: str, outliers: bool
) -> None:
    columns = blocks * 256
    weight = a_weight(name, outputs, columns)
    x = with_outliers(rows, columns) if outliers else torch.randn(rows, columns)
    together = [
        NativeOps(threads, isa).linear(x, NativeOps(1, isa).prepare(weight)) for threads in (1, 3) for isa in ISAS[:1]
    ]
    for isa in [*ISAS, *EMULATED]:
        ops = NativeOps(2, isa)
        packed = ops.prepare(weight)
        whole = ops.linear(x, packed)
        assert torch.equal(torch.cat([ops.linear(x[i : i + 1], packed) for i in range(rows)]), whole)
    assert torch.equal(together[0], together[1])  # nor does it see the number of threads


def test_products_of_one_input_are_what_each_is_alone(ops: NativeOps) -> None:
    weights = [ops.prepare(random_blocks("Q4_1", 40, 512)), ops.prepare(torch.randn(7, 512))]
    weights += [ops.prepare(random_blocks("Q6_K", 16, 512)), ops.prepare(random_blocks("Q8_0", 100, 512))]
    biases = [torch.randn(weight.shape[0]) if i % 2 else None for i, weight in enumerate(weights)]
    for rows in (1, 5, 70):
        x = with_outliers(rows, 512)
        together = ops.linears(x, list(zip(weights, biases, strict=True)))
        for found, weight, bias in zip(together, weights, biases, strict=True):
            assert torch.equal(found, ops.linear(x, weight, bias))


def test_columns_that_fill_no_block_are_padded(ops: NativeOps) -> None:
    for rows, columns in ((1, 1), (17, 24), (16, 33), (5, 7)):
        weight, x = torch.randn(rows, columns), torch.randn(3, columns)
        torch.testing.assert_close(ops.linear(x, ops.prepare(weight)), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_what_is_no_weight_or_no_id_is_refused(ops: NativeOps) -> None:
    packed = ops.prepare(torch.randn(4, 8))
    for ids in ([4], [-1], [2**40]):
        with pytest.raises(IndexError):
            ops.embed(packed, torch.tensor(ids))
    with pytest.raises(ValueError, match="packed weight"):
        _kvilt_native.Weight(_kvilt_native.WeightKind.q4_min, 16, 32, packed.data[:7])
    nothing = F32Address(0)
    with pytest.raises(ValueError, match="one bias and one output"):
        ops._runner.linears([packed.handle], [], [nothing], [nothing], nothing, 1)
    with pytest.raises(InputError, match="x: "):
        ops.linears(torch.randn(1, 8), [(packed, None), (ops.prepare(torch.randn(4, 9)), None)])
    with pytest.raises(Unsupported, match="avx1024"):
        NativeOps(1, "avx1024")


def test_numerics_name_the_revision_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeOps(1, "generic").numerics == f"native-{_kvilt_native.REVISION}/generic"
    monkeypatch.setattr(_kvilt_native, "REVISION", 77)
    assert NativeOps(1, "generic").numerics == "native-77/generic"


def test_auto_takes_the_native_backend() -> None:
    assert select("auto", 1).name == "native"
    assert select("auto", 1).numerics == NativeOps(1, ISAS[0]).numerics


@pytest.mark.parametrize("numa", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_can_be_asked_for(isa: str, numa: bool) -> None:
    assert select(f"native/{isa}", 1, numa=numa).numerics == NativeOps(1, isa).numerics


def test_torch_keeps_its_own_threads(ops: NativeOps) -> None:
    before = torch.get_num_threads()
    with ops.alone():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# Law 5, end to end: bit-identical logits whatever the batch, the cut, the threads, the history of the pages.

IDS = [int(i) for i in torch.randint(0, 61, (90,), generator=torch.Generator().manual_seed(5))]


def whole(executor: Executor, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] in one piece, alone."""
    with executor.create_kv_cache() as kv:
        kv.reserve(len(ids))
        return executor.run(Batch.of([Row(Ids(ids), range(len(ids)), kv, want=Last(len(ids)))])).values


def check_law_5(executor: Executor, ids: list[int], cuts: list[int], others: list[list[int]]) -> None:
    truth = whole(executor, ids)
    # However the prompt is cut, each piece beside other rows.
    with executor.create_kv_cache() as kv:
        for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            with executor.create_kv_cache(max(1, len(others))) as beside:
                kv.reserve(stop - start)
                beside.reserve([len(other) for other in others] or [0])
                rows = [Row(Ids(ids[start:stop]), range(start, stop), kv, want=Last(stop - start))]
                rows += [Row(Ids(o), range(len(o)), beside, i) for i, o in enumerate(others)]
                rows = rows[1:] + rows[:1]  # ours comes last
                logits = executor.run(Batch.of(rows))
                assert torch.equal(logits.of_row(len(rows) - 1), truth[start:stop])
                kv.commit([ids[start:stop]])
        # Forked, saved and loaded, cut back and computed again: the next token is the same.
        last = len(ids) - 1
        with kv.fork() as fork, executor.create_kv_cache() as loaded:
            loaded.load(kv.serialize())
            for cache in (fork, loaded, kv):
                cache.truncate(last)
                assert torch.equal(executor.step([ids[last]], cache)[0], truth[last])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(25), derandomize=True)
@given(data=st.data())
def test_law_5_on_a_tiny_model(isa: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    window = data.draw(st.sampled_from([None, 40]))
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16", "int8", "k8v4"]))
    threads = data.draw(st.sampled_from([1, 2, 3]))
    folder = tmp_path_factory.getbasetemp() / f"tiny-{window}"
    if not folder.exists():
        write_tiny(folder, sliding_window=window)
    config = RunConfig(kv_memory=1 << 22, backend=f"native/{isa}", kv_dtype=dtype, threads=threads)
    executor = load_executor(folder, config)
    torch.set_num_threads(1)
    ids = IDS[: data.draw(st.integers(2, 90))]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6)))
    others = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), max_size=5))
    check_law_5(executor, ids, cuts, others)


def test_law_5_on_real_weights(smollm2_path: Path) -> None:
    with kvilt.load(str(smollm2_path), backend="native", threads=2, kv_memory="256M") as llm:
        torch.set_num_threads(1)
        ids = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8)
        check_law_5(
            llm.executor, ids, [1, 2, 9, 40, 41, 73], [ids[3:8], [5], ids[:33], [7], [9], [11], [13], [17], [19]]
        )
