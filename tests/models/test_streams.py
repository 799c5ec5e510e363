"""Models with inputs of each layer's own, shared KV and several residual streams: what the runner does not see."""

from __future__ import annotations

import pytest
import torch
from families import random_model, write_checkpoint

from kvilt import Executor
from kvilt.batch import Batch, Embeds, Hidden, HiddenOut, Ids, Last, LayerSpan, Row
from kvilt.blend.chunk import ChunkCache
from kvilt.compat.facts import capabilities_of
from kvilt.config import RunConfig
from kvilt.errors import InputError
from kvilt.executor.load import load_executor
from kvilt.store.store import Store

PROMPTS = [[3, 1, 4, 1, 5], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [5, 3], [5, 8, 9, 7]]


@pytest.fixture(scope="module", params=["gemma3n", "gemma4-e"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_checkpoint(random_model(request.param), tmp_path_factory.mktemp(request.param))
    return load_executor(folder, RunConfig(kv_memory=1 << 22, backend="native", threads=2))


def test_a_row_does_not_see_its_neighbours(executor: Executor) -> None:
    with executor.create_kv_cache(len(PROMPTS)) as kv:
        together = executor.step(PROMPTS, kv)
    for row, prompt in enumerate(PROMPTS):
        with executor.create_kv_cache() as kv:
            for token in prompt[:-1]:
                executor.prefill([token], kv)
            assert torch.equal(executor.step(prompt[-1:], kv)[0], together[row])


def test_layers_that_read_the_kv_of_others_keep_none(executor: Executor) -> None:
    layout = executor.layout
    assert layout.bare == (4, 5)
    assert layout.num_layers == 6 and sorted(layout.slots()) == [0, 1, 2, 3]
    capabilities = capabilities_of(executor)
    assert not capabilities.blending
    assert any("inputs of each layer" in note for note in capabilities.notes)


def test_stored_kv_is_not_placed(executor: Executor) -> None:
    with Store() as store, pytest.raises(InputError, match="read the KV of others"):
        ChunkCache(executor, store)
    with executor.create_kv_cache() as kv:
        kv.reserve(4)
        with pytest.raises(InputError, match="keep none of their own"):
            executor.place(kv, [range(4)])


def test_hidden_states_carry_all_that_a_token_has_between_two_layers(executor: Executor) -> None:
    """Also where they enter beside rows of ids and of embedding rows."""
    ids, spec = PROMPTS[1], executor.spec
    span = range(len(ids))
    vectors = executor._decoder.embed(torch.tensor(ids)).clone()
    with executor.create_kv_cache(3) as kv:
        kv.reserve(len(ids))
        lower = Row(Ids(ids), span, kv, 0, LayerSpan(0, 3), HiddenOut())
        hidden = executor.run(Batch.of([lower])).hidden[0]
        assert hidden.shape == (len(ids), spec.state_size)
        rows = [
            Row(Hidden(hidden), span, kv, 0, LayerSpan(3), Last(len(ids))),
            Row(Ids(ids), span, kv, 1, want=Last(len(ids))),
            Row(Embeds(ids, [0, 2], vectors[[0, 2]]), span, kv, 2, want=Last(len(ids))),
        ]
        found = executor.run(Batch.of(rows))
        assert torch.equal(found.of_row(0), found.of_row(1))
        assert found.of_row(2).shape == found.of_row(1).shape
        with pytest.raises(InputError, match=str(spec.state_size)):
            narrow = hidden[:, : spec.hidden_size]
            executor.run(Batch.of([Row(Hidden(narrow), span, kv, 0, LayerSpan(3), Last())]))


def test_an_embedding_row_has_the_layer_inputs_of_token_0(executor: Executor) -> None:
    """As transformers gives it to what is no text."""
    vector = executor._decoder.embed(torch.tensor([0])).clone()
    with executor.create_kv_cache(2) as kv:
        kv.reserve(1)
        rows = [Row(Embeds([7], [0], vector), range(1), kv, 0), Row(Ids([0]), range(1), kv, 1)]
        found = executor.run(Batch.of(rows))
        assert torch.equal(found.of_row(0), found.of_row(1))
