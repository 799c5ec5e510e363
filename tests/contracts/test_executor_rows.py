"""Contract A, rows of a batch: finished ones are skipped, and rows of embeddings come from the executor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import write_lora
from tiny import HIDDEN

from kvilt import Executor, Inputs, SamplingParams
from kvilt.errors import InputError

PROMPTS = [[5, 17, 3, 44, 21, 9], [9, 30, 2], [58, 13, 7, 1]]


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ([[7], [], [8]], {}),
        ([[7], [3], [8]], {"active": [True, False, True]}),
        ([[7], [999], [8]], {"active": [True, False, True]}),  # what a skipped row was given is not looked at
        ([[7], [], [8]], {"active": [True, True, True]}),
    ],
)
def test_a_step_skips_rows(tiny: Executor, inputs: list[list[int]], options: dict[str, list[bool]]) -> None:
    with tiny.create_kv_cache(batch_size=3) as kv:
        tiny.prefill(PROMPTS, kv)
        logits = tiny.step(inputs, kv, **options)
        assert logits.shape == (3, tiny.spec.vocab_size)
        assert bool(logits[1].isnan().all()), "no sampler draws from a row that did not run"
        assert [kv.tokens(i) for i in range(3)] == [[*PROMPTS[0], 7], PROMPTS[1], [*PROMPTS[2], 8]]
        for row, token in ((0, 7), (2, 8)):
            with tiny.create_kv_cache() as alone:
                tiny.prefill(PROMPTS[row], alone)
                torch.testing.assert_close(logits[row], tiny.step([token], alone)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.2, seed=3)])
def test_sampling_skips_rows(tiny: Executor, sampling: SamplingParams) -> None:
    with tiny.create_kv_cache(batch_size=3) as kv, tiny.create_kv_cache(batch_size=3) as whole:
        expected = tiny.sample_tokens(40, PROMPTS, whole, params=sampling)
        free = tiny.pool.free_pages()
        sampled = tiny.sample_tokens(40, PROMPTS, kv, params=sampling, active=[False, True, True])
        assert sampled == [[], *expected[1:]]
        assert kv.tokens(0) == []
        own = [sum(pages) for pages in ([len(one) for one in kv.row(i).tables] for i in range(3))]
        assert own[0] == 0 and free != tiny.pool.free_pages(), "no room is found for a row that does not run"
        assert tiny.sample_tokens(40, [PROMPTS[0], [], []], kv, params=sampling) == [expected[0], [], []]


def test_finished_rows_drop_out_one_by_one(tiny: Executor) -> None:
    """The loop of a caller with its own sampler: rows leave, the others go on as if alone."""
    with tiny.create_kv_cache(batch_size=3) as kv, tiny.create_kv_cache(batch_size=3) as whole:
        expected = tiny.sample_tokens(9, PROMPTS, whole)
        lengths, out, pending = [2, 9, 5], [[], [], []], [list(prompt) for prompt in PROMPTS]
        while any(running := [len(row) < length for row, length in zip(out, lengths, strict=True)]):
            for i, row in enumerate(tiny.step(pending, kv, active=running)):
                if running[i]:
                    out[i].append(int(row.argmax()))
                    pending[i] = out[i][-1:]
        assert out == [row[:length] for row, length in zip(expected, lengths, strict=True)]


def test_an_adapter_that_skipped_rows_do_not_call_for(tiny: Executor, tmp_path: Path) -> None:
    """Only rows that run must hold the tokens that switch an adapter on."""
    lora = tiny.load_lora(write_lora(tmp_path / "called", alora_invocation_tokens=[4, 4]))
    try:
        with tiny.create_kv_cache(batch_size=2) as kv:
            with pytest.raises(InputError, match="switched on"):
                tiny.step([[1, 2], [3, 4, 4, 5]], kv, lora_id=lora)
            assert kv.lengths == (0, 0)
            tiny.step([[], [3, 4, 4, 5]], kv, lora_id=lora)
            assert kv.lengths == (0, 4)
    finally:
        tiny.unload_lora(lora)


def test_skipping_is_refused_where_nothing_would_run(tiny: Executor) -> None:
    with tiny.create_kv_cache(batch_size=2) as kv:
        for inputs, options in (
            ([[], []], {}),
            ([[1], [2]], {"active": [False, False]}),
            ([[1], []], {"active": [False, True]}),
            ([[1], [2]], {"active": [True]}),
            ([[1], [2]], {"active": [1, 0]}),
            ([[1]], {"active": [True, False]}),
        ):
            for call in (tiny.step, lambda *args, **named: tiny.sample_tokens(2, *args, **named)):
                with pytest.raises(InputError):
                    call(inputs, kv, **options)
        with pytest.raises(InputError):
            tiny.prefill([[1], []], kv)  # a prompt is given whole, for all rows
        assert kv.lengths == (0, 0)


def test_embedding_rows_come_from_the_executor(tiny: Executor) -> None:
    """ExecutorInputs: a caller mixes rows of its own with those of tokens."""
    prompt, at = PROMPTS[0], [1, 4]
    rows = tiny.embed([prompt[i] for i in at])
    assert (rows.shape, rows.dtype) == ((2, HIDDEN), torch.float32)
    kept = rows.clone()
    mixed = Inputs([0 if i in at else token for i, token in enumerate(prompt)], at, rows)
    with tiny.create_kv_cache() as a, tiny.create_kv_cache() as b, tiny.create_kv_cache() as c:
        assert torch.equal(tiny.step(mixed, a), tiny.step(prompt, b))
        half = Inputs(mixed.ids, at, (rows + tiny.embed([2, 3])) / 2)
        assert not torch.equal(tiny.step(half, c), tiny.step(prompt, b))
    assert torch.equal(rows, kept), "no later step writes over it"
    assert tiny.embed([]).shape == (0, HIDDEN)
    for wrong in ([61], [-1], ["a"], "ab"):
        with pytest.raises(InputError):
            tiny.embed(wrong)
