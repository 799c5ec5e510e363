"""Which rank has what: parts cover everything once, in order, and never cut a head or a block of packed weights."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvilt.errors import RankFailed
from kvilt.executor.parallel.message import MessageReader, MessageWriter
from kvilt.models.split import Cut, joined_heads, share_heads
from kvilt.ops.lowrank import LowRank
from kvilt.ops.native.cores import Cores, rank_cpus
from kvilt.quant.encode import quantize
from kvilt.quant.formats import FORMATS
from kvilt.quant.tensor import QuantTensor
from kvilt.quant.unpack import dequantize


@settings(max_examples=examples(100))
@given(kv_heads=st.integers(1, 16), group=st.integers(1, 8), ranks=st.integers(2, 12))
def test_heads_are_shared_out_whole(kv_heads: int, group: int, ranks: int) -> None:
    shares = share_heads(kv_heads * group, kv_heads, ranks)
    if shares is None:
        assert kv_heads < ranks
        return
    assert [head for share in shares for head in share.query] == list(range(kv_heads * group))
    for share in shares:
        assert len(share.query) and {head // group for head in share.query} == set(share.kv)
        assert len(share.query) % len(share.kv) == 0
    heads = torch.arange(kv_heads)[None, :, None]
    parts = [heads[:, share.kv.start : share.kv.stop] for share in shares]
    assert torch.equal(joined_heads(parts, [share.kv for share in shares], 1), heads)


def test_heads_that_do_not_divide() -> None:
    """SmolLM2 has nine heads and three KV heads."""
    two, three = share_heads(9, 3, 2), share_heads(9, 3, 3)
    assert two is not None and [(share.query, share.kv) for share in two] == [
        (range(3), range(1)),
        (range(3, 9), range(1, 3)),
    ]
    assert three is not None and [len(share.query) for share in three] == [3, 3, 3]
    assert share_heads(9, 3, 5) is None


def test_ranks_have_numa_nodes_of_their_own() -> None:
    cores = Cores((((0, 4), (1, 5)), ((2, 6), (3, 7))))
    assert [rank_cpus(rank, 2, cores) for rank in range(2)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert [rank_cpus(rank, 4, cores) for rank in range(4)] == [[0, 4, 1, 5]] * 2 + [[2, 6, 3, 7]] * 2
    assert rank_cpus(0, 1, cores) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert rank_cpus(1, 2, Cores((((0,), (1,)),))) == rank_cpus(1, 2, None) == []


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_columns_of_packed_weights(name: str) -> None:
    weight = torch.randn(6, 1024, generator=torch.Generator().manual_seed(1))
    packed = QuantTensor.of_blocks(FORMATS[name], (6, 1024), quantize(weight, name).view(6, -1))
    for part in (range(256), range(256, 1024)):
        cut = Cut(1, part, 1024).take(packed)
        assert not isinstance(cut, torch.Tensor)
        assert torch.equal(dequantize(cut), dequantize(packed)[:, part.start : part.stop])


@pytest.mark.parametrize("axis", [0, 1])
def test_an_adapter_is_split_where_its_map_is(axis: int) -> None:
    random = torch.Generator().manual_seed(2)
    down, up, x = (torch.randn(*shape, generator=random) for shape in ((3, 8), (10, 3), (5, 8)))
    whole, size = LowRank(down, up, 0.5), (10, 8)[axis]
    cuts = [Cut(0 if axis == 0 else 1, part, size) for part in (range(5), range(5, size))]
    made = []
    for cut in cuts:
        own = cut.product(whole)
        seen = x if axis == 0 else x[:, cut.part.start : cut.part.stop]
        made.append(seen @ own.down.T @ own.up.T)
    joined = torch.cat(made, 1) if axis == 0 else made[0] + made[1]
    torch.testing.assert_close(joined, x @ down.T @ up.T)


TENSORS = st.sampled_from(
    [
        torch.arange(12).view(3, 4)[:, ::2],
        torch.empty(0, 5),
        torch.tensor(3.5, dtype=torch.float64),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.tensor([1, -2], dtype=torch.int8),
        torch.randn(4).to(torch.float8_e4m3fn),
    ]
)
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(), st.lists(st.integers(-9, 9)), TENSORS
)


@settings(max_examples=examples(100))
@given(values=st.lists(VALUES, max_size=6))
def test_a_message_has_what_was_put_in(values: list[object]) -> None:
    out = MessageWriter(7)
    for value in values:
        match value:
            case int():
                out.number(value)
            case float():
                out.real(value)
            case str():
                out.text(value)
            case list():
                out.numbers(value)
            case torch.Tensor():
                out.tensor(value)
    data = out.data()
    message = MessageReader(bytearray(data))
    assert message.kind == 7
    for value in values:
        match value:
            case int():
                assert message.number() == value
            case float():
                assert message.real() == value
            case str():
                assert message.text() == value
            case list():
                assert list(message.numbers()) == value
            case torch.Tensor():
                found = message.tensor()
                assert found.dtype == value.dtype and found.shape == value.shape
                assert torch.equal(found.float(), value.float())
    with pytest.raises(RankFailed):
        message.number()


def test_a_message_is_not_read_as_something_else() -> None:
    out = MessageWriter(1)
    out.text("four")
    data = out.data()
    for wrong in ("number", "numbers", "tensor", "real"):
        with pytest.raises(RankFailed):
            getattr(MessageReader(bytearray(data)), wrong)()
    with pytest.raises(RankFailed):
        MessageReader(bytearray(data[:-8])).text()
