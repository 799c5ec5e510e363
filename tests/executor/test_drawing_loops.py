"""Loops that draw on the device: the tokens of single steps, whatever pads them and however their steps are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tiny import VOCAB, write_tiny

from kvilt.config import RunConfig
from kvilt.executor.executor import ModelExecutor
from kvilt.executor.load import load_executor
from kvilt.ops import select
from kvilt.sampling.params import SamplingParams

pytest.importorskip("triton")
eager = pytest.importorskip("eager_recorder")


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(select._NAMED, "interpreted", eager.recording_ops)
        folder = write_tiny(Path(tmp_path_factory.mktemp("tiny")))
        with closing(load_executor(folder, RunConfig(backend="interpreted", kv_memory=1 << 22))) as opened:
            yield opened


DRAWS = {
    "whole": SamplingParams(temperature=1.3, seed=5),
    "filtered": SamplingParams(temperature=1.5, top_p=0.8, top_k=40, seed=6),
    "typical": SamplingParams(temperature=1.1, typical_p=0.7, seed=7),
    "greedy": SamplingParams(temperature=0.0),
}
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5, 4]]


def drawn_apart(executor: ModelExecutor, params: list[SamplingParams], steps: int) -> list[list[int]]:
    """The tokens of so many single steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "run_steps", lambda *_: None)
        return drawn(executor, params, steps)


def drawn(executor: ModelExecutor, params: list[SamplingParams], steps: int) -> list[list[int]]:
    with executor.create_kv_cache(len(params)) as kv:
        tokens = executor.sample_tokens(steps, PROMPTS[: len(params)], kv, params=params)
        held = [kv.tokens(row) for row in range(len(params))]
    assert held == [prompt + own[:-1] for prompt, own in zip(PROMPTS, tokens, strict=False)]
    return tokens


SLOW_KINDS = [("whole",), ("filtered", "whole"), ("greedy", "typical")]  # the interpreter takes ten seconds for each


@pytest.mark.parametrize(
    "kinds", [*(pytest.param(one, marks=pytest.mark.slow) for one in SLOW_KINDS), ("filtered", "greedy")], ids="-".join
)
def test_a_loop_draws_what_single_steps_draw(executor: ModelExecutor, kinds: tuple[str, ...]) -> None:
    params, before = [DRAWS[kind] for kind in kinds], len(executor._replay._loops)
    expected = drawn_apart(executor, params, 7)
    assert drawn(executor, params, 7) == expected
    assert len(executor._replay._loops) == before + 1  # it was a loop that drew them
    assert drawn(executor, params, 7) == expected  # and its second run begins with the first key again
    assert all(0 <= token < VOCAB for own in expected for token in own)


def test_a_loop_is_cut_into_several(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [DRAWS["whole"], DRAWS["filtered"]]
    expected = drawn_apart(executor, params, 6)
    monkeypatch.setattr("kvilt.executor.decode_loop.REPLAY_STEPS", 2)
    assert drawn(executor, params, 6) == expected


def test_a_row_that_ends_ends_the_loop(executor: ModelExecutor) -> None:
    plain = drawn_apart(executor, [DRAWS["whole"]], 7)[0]
    params = [SamplingParams(temperature=1.3, seed=5, stop_token_ids=[plain[3]])]
    assert drawn(executor, params, 7) == [plain[: plain.index(plain[3]) + 1]]


def test_draws_that_read_history_are_single_steps(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "run_steps", lambda *_: pytest.fail("penalties need the tokens drawn before"))
    drawn(executor, [SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.2)], 3)
