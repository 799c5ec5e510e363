"""Sampling and adapters on a GPU: the CPU's tokens for the same logits, in a graph too, and products beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvilt.errors import NumericsError
from kvilt.ops.contract import Ops
from kvilt.ops.lowrank import AdapterSlots, LowRank
from kvilt.ops.select import select
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.prepare import prepare
from kvilt.sampling.sampler import SamplingState, sample, start_sample

VOCAB = 20_000
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {3: 5.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 4},
    {"temperature": 0.9, "top_p": 0.3, "bad_words_ids": [[2], [3]], "presence_penalty": 1.0},
]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select("triton", device=torch.device("cuda"))


def states() -> list[SamplingState]:
    return [SamplingState(SamplingParams.of(seed=row, **fields), range(50)) for row, fields in enumerate(FIELDS)]


def logits(kind: str) -> Tensor:
    """Flat rows, of which filters keep thousands of tokens, peaked ones, and ones with many equal scores."""
    made = torch.randn(len(FIELDS), VOCAB, generator=torch.Generator().manual_seed(3))
    return {"flat": made, "peaked": made * 4, "tied": made.bfloat16().float()}[kind]


@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_tokens_are_those_of_the_cpu(ops: Ops, kind: str) -> None:
    rows, positions = logits(kind), range(len(FIELDS))
    expected = sample(rows, states(), positions)
    made = sample(rows.cuda(), states(), positions, kernels=ops.sampling)
    assert made.tokens.tolist() == expected.tokens.tolist()
    found, known = made.logprobs[5], expected.logprobs[5]
    assert found is not None and known is not None and found.top_ids == known.top_ids
    assert found.top_logprobs == pytest.approx(known.top_logprobs, abs=1e-5)


def test_a_captured_launch_draws_with_the_keys_of_each_replay(ops: Ops) -> None:
    rows, count = logits("peaked").cuda(), len(FIELDS)
    table = prepare(states(), range(count), VOCAB).table
    assert table is not None and ops.sampling is not None
    table = table.to(rows.device)
    ops.sampling.launch(rows, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = ops.sampling.launch(rows, table)
    for first in (0, 100, 200):
        positions = range(first, first + count)
        other = prepare(states(), positions, VOCAB).table
        assert other is not None
        table.keys.copy_(other.keys)
        graph.replay()
        assert drawn[0].tolist() == sample(rows.cpu(), states(), positions).tokens.tolist()


def test_a_row_that_is_no_number_is_named_when_tokens_are_read(ops: Ops) -> None:
    rows = logits("flat").cuda()
    rows[2, 77] = float("nan")
    pending = start_sample(rows, states(), range(len(FIELDS)), kernels=ops.sampling)
    with pytest.raises(NumericsError) as error:
        pending.wait()
    assert list(error.value.rows) == [2]


@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_each_token_has_the_product_of_its_adapter(ops: Ops, tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    sizes, inputs, products = (96, 300), 1200, []
    for rank in (3, 16, 40):
        down = torch.randn(rank, inputs, generator=random) / 40
        products.append([LowRank(down, torch.randn(size, rank, generator=random) / 4, 0.5) for size in sizes])
    tables = [ops.new_table(size, inputs, 8) for size in sizes]
    for slot, both in enumerate(products):
        for table, product in zip(tables, both, strict=True):
            table.put(slot, ops.prepare_low_rank(product))
    x = torch.randn(tokens, inputs, generator=random).bfloat16()
    slots = torch.randint(-1, 4, (tokens,), generator=random)  # the fourth is empty
    outs = [torch.randn(tokens, size, generator=random).bfloat16() for size in sizes]
    found = [out.clone().cuda() for out in outs]
    ops.adapt(x.cuda(), tables, found, AdapterSlots(slots, torch.full((tokens,), 1.5)).to(ops.device))
    for at, (out, made) in enumerate(zip(outs, found, strict=True)):
        wanted = out.double()
        for slot, both in enumerate(products):
            one, mine = both[at], slots == slot
            wanted[mine] += 0.75 * (x[mine].double() @ one.down.bfloat16().double().T @ one.up.bfloat16().double().T)
        assert float((made.cpu().double() - wanted).abs().max()) < 0.05
        assert torch.equal(made.cpu()[(slots < 0) | (slots == 3)], out[(slots < 0) | (slots == 3)])
