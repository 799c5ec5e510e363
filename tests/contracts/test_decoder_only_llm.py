"""Contract E: the model trait, sentence by sentence, on `kvilt.PagedLLM`, which is a `kvilt.DecoderOnlyLLM`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvilt import DecoderOnlyLLM, Executor, LlmRuntimeConfig, PagedLLM
from kvilt.errors import InputError

A = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]
B = [1, 2, 3]


@pytest.fixture
def model(tiny: Executor) -> Iterator[DecoderOnlyLLM]:
    model = PagedLLM(tiny)
    yield model
    model.reset()
    assert tiny.pool.usage().used == 0


def alone(tiny: Executor, ids: list[int]) -> torch.Tensor:
    with tiny.create_kv_cache() as kv:
        return tiny.step(ids, kv)[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_config_is_the_bare_minimum(model: DecoderOnlyLLM) -> None:
    """ "Runtime configuration every decoder-only LLM must expose." """
    assert model.config() == LlmRuntimeConfig(
        hidden_size=24, num_layers=3, num_kv_heads=2, head_dim=6, vocab_size=61, max_seq_len=256
    )


def test_prefill_returns_logits_for_the_last_token(tiny: Executor, model: DecoderOnlyLLM) -> None:
    """ "`prefill` processes a batch of prompt tokens and returns logits for the *last* token, along with initializing
    whatever KV cache the model maintains internally (keyed by `cache_id`)." """
    logits = model.prefill("a", A)
    assert logits.shape == (61,)
    close(logits, alone(tiny, A))
    close(model.prefill("a", B), alone(tiny, B))  # a prompt begins its sequence anew


def test_decode_processes_one_token_at_its_position(tiny: Executor, model: DecoderOnlyLLM) -> None:
    """ "`decode` processes a single generated token at position `pos` and returns logits for the next step." """
    model.prefill("a", A)
    close(model.decode("a", 4, len(A)), alone(tiny, [*A, 4]))
    close(model.decode("a", 5, len(A) + 1), alone(tiny, [*A, 4, 5]))


@pytest.mark.parametrize("pos", [0, len(A) - 1, len(A) + 1, -1])
def test_a_wrong_position_is_an_error(tiny: Executor, model: DecoderOnlyLLM, pos: int) -> None:
    """ "`pos` is the position of `token` in the sequence (number of tokens already consumed so far)." """
    model.prefill("a", A)
    with pytest.raises(InputError, match="holds 12 tokens"):
        model.decode("a", 4, pos)
    close(model.decode("a", 4, len(A)), alone(tiny, [*A, 4]))


def test_decode_batch_is_one_forward_in_order(
    tiny: Executor, model: DecoderOnlyLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Decode multiple concurrent requests in a single forward pass. ... Returns one `[vocab_size]` logits vec per
    request in the SAME order." """
    model.prefill("a", A)
    model.prefill("b", B)
    forwards = []
    run = tiny.run
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "run", lambda batch: forwards.append(len(batch.rows)) or run(batch))
        first, second = model.decode_batch([("b", 7, 3), ("a", 8, 12)])
    assert forwards == [2]
    close(first, alone(tiny, [*B, 7]))
    close(second, alone(tiny, [*A, 8]))
    assert model.decode_batch([]) == []


def test_a_wrong_entry_fails_the_whole_batch_and_changes_nothing(tiny: Executor, model: DecoderOnlyLLM) -> None:
    model.prefill("a", A)
    for wrong in (("b", 1, 0), ("a", 1, 13), ("a", 61, 12)):
        with pytest.raises(InputError):
            model.decode_batch([("a", 8, 12), wrong])
    close(model.decode("a", 8, 12), alone(tiny, [*A, 8]))


def test_release_frees_the_cache(tiny: Executor, model: DecoderOnlyLLM) -> None:
    """ "`release` frees the KV cache for a completed sequence." """
    model.prefill("a", A)
    model.release("a")
    assert tiny.pool.usage().used == 0
    model.release("a")
    with pytest.raises(InputError):
        model.decode("a", 1, len(A))


def test_reset_drops_everything(tiny: Executor, model: DecoderOnlyLLM) -> None:
    """ "Drop all cached state (useful for tests and hot-reload)." """
    model.prefill("a", A)
    model.prefill("b", B)
    model.reset()
    assert tiny.pool.usage().used == 0


def test_two_models_on_one_executor_do_not_share_ids(tiny: Executor, model: DecoderOnlyLLM) -> None:
    other = PagedLLM(tiny)
    model.prefill("a", A)
    other.prefill("a", B)
    close(model.decode("a", 4, len(A)), alone(tiny, [*A, 4]))
    other.reset()
