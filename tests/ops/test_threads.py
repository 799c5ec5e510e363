"""Two models in one process: a step of one holds torch to one thread in its own thread, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny import write_tiny

from kvilt.config import RunConfig
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.ops.native.backend import NativeOps
from kvilt.ops.native.threads import one_torch_thread

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """A number that is neither one nor what this machine has by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_new_thread(ask: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result(WAIT_S)


def test_torch_uses_one_thread_inside_and_its_own_number_outside() -> None:
    ops = NativeOps(2)
    with ops.alone():
        assert torch.get_num_threads() == 1
        with ops.alone():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), ops.alone():
        raise KeyError
    assert torch.get_num_threads() == 3


def test_a_thread_that_starts_meanwhile_keeps_its_number() -> None:
    with one_torch_thread():
        assert in_new_thread(torch.get_num_threads) == 3
    assert in_new_thread(torch.get_num_threads) == 3


def test_calls_that_overlap_in_two_threads_end_in_any_order() -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> list[int]:
        with one_torch_thread():
            first_is_in.set()
            assert second_is_in.wait(WAIT_S)
            inside = torch.get_num_threads()
        first_is_out.set()
        return [inside, torch.get_num_threads()]

    def second() -> list[int]:
        assert first_is_in.wait(WAIT_S)
        with one_torch_thread():
            second_is_in.set()
            assert first_is_out.wait(WAIT_S)
            inside = torch.get_num_threads()
        return [inside, torch.get_num_threads()]

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(first), pool.submit(second)]
        assert [result.result(WAIT_S) for result in results] == [[1, 3], [1, 3]]
    assert torch.get_num_threads() == 3
    assert in_new_thread(torch.get_num_threads) == 3


class Pause:
    """Holds an executor inside its next step until it is told to go on."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        ops = executor.pool.ops
        embed = ops.embed

        def paused(*args: object) -> torch.Tensor:
            self.inside.set()
            assert self.go_on.wait(WAIT_S)
            return embed(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(ops, "embed", paused)


def test_two_models_step_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path)
    config = RunConfig(backend="native", kv_memory=1 << 22)
    models = [load_executor(folder, config) for _ in range(2)]

    def step(model: Executor) -> tuple[torch.Tensor, int]:
        with model.create_kv_cache() as kv:
            return model.step([1, 2, 3], kv), torch.get_num_threads()

    truth, _ = step(models[0])
    pauses = [Pause(model, monkeypatch) for model in models]

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(step, model) for model in models]
        assert all(pause.inside.wait(WAIT_S) for pause in pauses)  # both are in the middle of a step
        assert in_new_thread(torch.get_num_threads) == 3
        for pause, result in zip(pauses, results, strict=True):  # the first to begin is the first to end
            pause.go_on.set()
            logits, after = result.result(WAIT_S)
            assert torch.equal(logits, truth)
            assert after == 3
    assert torch.get_num_threads() == 3
    assert in_new_thread(torch.get_num_threads) == 3
    for model in models:
        model.close()
