"""The last layers of a step: all tokens write their KV, and outputs are computed only where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import Pair, random_model, write_checkpoint

from kvilt import Executor, KVCache
from kvilt.batch import Batch, HiddenOut, Ids, KeyMass, Last, Logits, Nothing, Pooled, Row, Score, Want
from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.models import altup, decoder
from kvilt.models.layers import LayerContext

IDS = [int(i) for i in torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(11))]
WANTS: Sequence[tuple[int, Want]] = [  # tokens of a row, and what it wants
    (20, Nothing()),
    (9, Last(3)),
    (1, Last()),
    (25, Pooled(first=20)),
    (12, Score(IDS[1:13], top=2)),
    (18, Pooled(last=True)),
    (2, Nothing()),
]


def batch_of(kv: KVCache, wants: Sequence[tuple[int, Want]]) -> Batch:
    return Batch.of([Row(Ids(IDS[:n]), range(n), kv, i, want=want) for i, (n, want) in enumerate(wants)])


def results(logits: Logits) -> list[torch.Tensor]:
    scores = [part for one in logits.scores.values() for part in (one.logprobs, one.top_logprobs)]
    return [logits.values, *logits.hidden.values(), *scores]


def ran(executor: Executor, all_tokens: bool) -> tuple[list[torch.Tensor], bytes, torch.Tensor]:
    """What the rows got, the KV and states they left, and the logits of a step behind them."""
    with executor.create_kv_cache(len(WANTS)) as kv:
        kv.reserve([n for n, _ in WANTS])
        batch = batch_of(kv, WANTS)
        logits = executor.run(replace(batch, step=batch.step.of_all_tokens()) if all_tokens else batch)
        kv.commit([IDS[:n] for n, _ in WANTS])
        return results(logits), kv.serialize(), executor.step([[5]] * len(WANTS), kv)


def test_results_and_kv_are_those_of_a_step_in_which_all_tokens_go_on(pair: Pair) -> None:
    executor = pair.executor
    (narrow, kept, behind), (whole, all_kept, all_behind) = (ran(executor, all_tokens) for all_tokens in (False, True))
    assert len(narrow) == len(whole) == 5
    if executor.deterministic:
        assert kept == all_kept
        assert torch.equal(behind, all_behind)
    for found, expected in zip([*narrow, behind], [*whole, all_behind], strict=True):
        if executor.deterministic:
            assert torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each call of a layer."""
    seen: list[int] = []
    for kind in (decoder.Layer, altup.AltUpLayer):
        call = kind.__call__

        def counted(layer, x: torch.Tensor, context: LayerContext, call=call) -> torch.Tensor:  # type: ignore[no-untyped-def]
            seen.append(len(x))
            return call(layer, x, context)

        monkeypatch.setattr(kind, "__call__", counted)
    return seen


# For each family its layers, and the first one that only wanted tokens have to go through.
LAYERS = {"llama": (3, 2), "deepseek-v3": (3, 2), "gemma3n": (6, 3), "gemma4-e": (6, 3), "granite-hybrid": (3, 3)}


@pytest.mark.parametrize("family", LAYERS)
def test_a_token_without_a_used_output_ends_where_its_kv_is_written(
    family: str, tmp_path: Path, passing: list[int]
) -> None:
    config = RunConfig(kv_memory=1 << 24, backend="native", threads=1)
    executor = load_executor(write_checkpoint(random_model(family), tmp_path), config)
    layers, narrow = LAYERS[family]
    for wants, counts in (
        ([(20, Nothing())], [20] * narrow),
        ([(20, Last(2))], [20] * narrow + [2] * (layers - narrow)),
        ([(20, Nothing()), (1, Last()), (9, Last(3))], [30] * narrow + [4] * (layers - narrow)),
        ([(20, Score(IDS[:20]))], [20] * layers),
        ([(20, Last(20)), (9, Last(9))], [29] * layers),
    ):
        passing.clear()
        with executor.create_kv_cache(len(wants)) as kv:
            kv.reserve([n for n, _ in wants])
            executor.run(batch_of(kv, wants))
        assert passing == counts
    executor.close()


@pytest.mark.parametrize("want", [HiddenOut(), HiddenOut((2,), (2,)), KeyMass(), KeyMass((2,))], ids=str)
def test_rows_that_read_inside_the_last_layers_take_all_tokens_through_them(
    want: Want, tmp_path: Path, passing: list[int]
) -> None:
    executor = load_executor(write_checkpoint(random_model("llama"), tmp_path), RunConfig(kv_memory=1 << 22))
    with executor.create_kv_cache(2) as kv:
        kv.reserve([20, 9])
        executor.run(batch_of(kv, [(20, want), (9, Last())]))
    assert passing == [29] * executor.layout.num_layers
    executor.close()
