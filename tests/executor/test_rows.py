"""Rows that a model cannot run are refused by `run` and `Batch.of` with an error that says why."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import write_tiny

from kvilt import Executor
from kvilt.batch import (
    Batch,
    Embeds,
    Hidden,
    Ids,
    Last,
    LayerSpan,
    Logits,
    Nothing,
    Row,
    SampledIds,
    Score,
    Source,
    Want,
    token_count,
)
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.load import load_executor
from kvilt.kv.row import CacheRow, rows_from_images


def run(executor: Executor, source: Source, want: Want = Nothing(), layers: LayerSpan = LayerSpan()) -> Logits:  # noqa: B008
    with executor.create_kv_cache() as kv:
        kv.reserve(token_count(source))
        return executor.run(Batch.of([Row(source, range(token_count(source)), kv, want=want, layers=layers)]))


@pytest.mark.parametrize("ids", [[1, 61], [-1, 2], [1.7, 2], [1, 1 << 64]])
def test_ids_outside_the_vocabulary_are_refused(tiny: Executor, ids: list[int]) -> None:
    with pytest.raises(InputError, match="token id"):
        run(tiny, Ids(ids))


@pytest.mark.parametrize("want", [Score([1, 61]), Score([1, 2], 62), Score([1, 2], -1)])
def test_scores_of_tokens_that_do_not_exist_are_refused(tiny: Executor, want: Want) -> None:
    with pytest.raises(InputError, match="tok"):
        run(tiny, Ids([1, 2]), want)


def test_embeddings_must_agree_with_their_places(tiny: Executor) -> None:
    width = tiny.spec.hidden_size
    for at, shape in (([0, 1], (1, width)), ([2], (1, width)), ([0], (1, width + 1))):
        with pytest.raises(InputError):
            run(tiny, Embeds([0, 0], at, torch.zeros(shape)))
    with pytest.raises(InputError, match="hidden states"):
        run(tiny, Hidden(torch.zeros(2, width + 1)), layers=LayerSpan(1))


@pytest.mark.parametrize("states", [torch.zeros(2, 24, dtype=torch.int32), torch.zeros(48), torch.zeros(2, 3, 8)])
def test_tensors_of_another_kind_are_refused_when_a_batch_is_made(tiny: Executor, states: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"floats \[tokens, hidden\]"):
        run(tiny, Hidden(states), layers=LayerSpan(1))
    with pytest.raises(InputError, match=r"floats \[tokens, hidden\]"):
        run(tiny, Embeds([0, 0], [0, 1], states))
    with pytest.raises(InputError, match="int64"):
        run(tiny, SampledIds(torch.zeros(2)))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_tiny(tmp_path_factory.mktemp("native"))
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_hidden_states_of_another_width_enter_as_the_same_numbers(native: Executor, dtype: torch.dtype) -> None:
    """Halves were read as floats, past their end."""
    states = torch.randn(2, native.spec.hidden_size, generator=torch.Generator().manual_seed(0)).half()
    expected = run(native, Hidden(states.float()), Last(2), LayerSpan(1))
    assert torch.equal(run(native, Hidden(states.to(dtype)), Last(2), LayerSpan(1)).values, expected.values)


def test_a_cache_does_not_change_between_the_check_of_a_batch_and_its_tables(
    tiny: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(2)
        cut = threading.Thread(target=lambda: kv.truncate(0))
        honest = CacheRow.writable

        def checked_then_cut(row: CacheRow, positions: range) -> bool:
            good = honest(row, positions)
            cut.start()
            cut.join(0.2)
            return good

        monkeypatch.setattr(CacheRow, "writable", checked_then_cut)
        batch = Batch.of([Row(Ids([1, 2]), range(2), kv)])
        cut.join()
        with pytest.raises(InputError, match="changed after this batch was made"):
            tiny.run(batch)


def test_images_that_cannot_be_written_leave_no_page_behind(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.create_kv_cache() as kv:
        tiny.prefill([1, 2, 3], kv)
        image, used = kv.row(0).image(), tiny.pool.usage().used

        def full(*_given: object) -> None:
            raise RuntimeError("cannot be written")

        monkeypatch.setattr(tiny.pool.ops, "write_slots", full)
        with pytest.raises(RuntimeError, match="cannot be written"):
            rows_from_images(tiny.pool, [image, image])
        assert tiny.pool.usage().used == used
