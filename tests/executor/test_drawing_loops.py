"""Loops that draw on the device: the tokens of single steps, whatever pads them and however their steps are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
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


@pytest.mark.slow
def test_a_loop_is_cut_into_several(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [DRAWS["whole"], DRAWS["filtered"]]
    expected = drawn_apart(executor, params, 6)
    monkeypatch.setattr("kvilt.executor.decode_loop.REPLAY_STEPS", 2)
    assert drawn(executor, params, 6) == expected


@pytest.mark.slow
def test_a_row_that_ends_ends_the_loop(executor: ModelExecutor) -> None:
    plain = drawn_apart(executor, [DRAWS["whole"]], 7)[0]
    params = [SamplingParams(temperature=1.3, seed=5, stop_token_ids=[plain[3]])]
    assert drawn(executor, params, 7) == [plain[: plain.index(plain[3]) + 1]]


def test_draws_that_read_history_are_single_steps(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "run_steps", lambda *_: pytest.fail("penalties need the tokens drawn before"))
    drawn(executor, [SamplingParams(temperature=1.0, seed=1, repetition_penalty=1.2)], 3)


class CountingGraph:
    """A step that draws 1, 2, 3 and so on for its first row, and ten times that for the second."""

    def __init__(self) -> None:
        self.runs, self.drawn = 0, torch.zeros(3, dtype=torch.int64)

    def replay(self) -> None:
        self.runs += 1
        self.drawn[:2] = torch.tensor([self.runs, 10 * self.runs])


@pytest.mark.parametrize(("end", "steps"), [(1, 50), (7, 50), (8, 50), (9, 50), (30, 50), (50, 50), (99, 50), (99, 3)])
def test_a_loop_ends_with_the_first_end_and_few_steps_are_in_vain(end: int, steps: int) -> None:
    from kvilt.ops.triton.graphs import READ_STEPS, CapturedStep

    graph = CountingGraph()
    step = CapturedStep(graph, graph.drawn, graph.drawn, lambda: False)  # type: ignore[arg-type]
    tokens = step.loop(steps, graph.drawn, [[], [10 * end]])
    assert tokens.tolist() == [[i, 10 * i] for i in range(1, min(end, steps) + 1)]
    assert graph.runs <= min(steps, end + 2 * READ_STEPS)


def test_a_stopped_loop_gives_the_tokens_it_has() -> None:
    from kvilt.ops.triton.graphs import CapturedStep

    graph = CountingGraph()
    step = CapturedStep(graph, graph.drawn, graph.drawn, lambda: graph.runs == 11)  # type: ignore[arg-type]
    assert step.loop(50, graph.drawn, [[], []]).tolist() == [[i, 10 * i] for i in range(1, 12)]
    assert step.loop(50, graph.drawn, [[], []]).tolist() == []


def test_few_rows_of_few_tokens_have_recordings_of_their_own(executor: ModelExecutor) -> None:
    recorder = executor._replay._recorder
    assert recorder is not None
    assert recorder.room_tokens(1, 300, 1 << 17) == recorder.room_tokens(2, 4096, 1 << 17) == 4096
    assert recorder.room_tokens(1, 4097, 1 << 17) == recorder.room_tokens(3, 300, 1 << 17) == 1 << 17
    assert recorder.room_tokens(1, 300, 1024) == 1024


@pytest.mark.slow
def test_a_row_that_outgrows_its_recording_gets_another(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvilt.ops.triton import graphs

    params = [DRAWS["greedy"]]
    expected = drawn_apart(executor, params, 4)
    monkeypatch.setattr(graphs, "MOST_KEYS", executor.layout.page_tokens)
    monkeypatch.setattr(executor._replay, "_loops", {})
    assert drawn(executor, params, 4) == expected
    with executor.create_kv_cache() as kv:
        kv.reserve(executor.layout.page_tokens + 1)
        assert executor.sample_tokens(4, PROMPTS[:1], kv, params=params) == expected
    assert [shape.pages > 1 for shape in executor._replay._loops] == [False, True]


def test_both_recordings_are_warmed_up(executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvilt.ops.triton import graphs

    monkeypatch.setattr(graphs, "MOST_KEYS", executor.layout.page_tokens)
    sizes = executor.decode_sizes(3)
    assert [size.rows for size in sizes if size.tokens == 1] == [1, 2, 4]
    assert [size.rows for size in sizes if size.tokens == executor.layout.page_tokens + 1] == [1, 2]
    assert len(sizes) == 5
