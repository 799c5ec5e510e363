"""A rank that dies or hangs: requests fail with a typed error, at once or after the time-out, and health ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kvilt import SamplingParams
from kvilt.errors import RankFailed
from kvilt.executor.executor import ModelExecutor

from .conftest import load_ranks

GUARD_S = 60.0


def until_failed(executor: ModelExecutor) -> None:
    end = time.monotonic() + GUARD_S
    while executor.failure is None:
        assert time.monotonic() < end
        time.sleep(0.01)


def worker_pid(executor: ModelExecutor) -> int:
    assert executor._group is not None
    return executor._group.pids[0]


def test_a_killed_rank_is_noticed_while_nothing_runs(folder: Path) -> None:
    executor = load_ranks(folder, 2)
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv)
        os.kill(worker_pid(executor), signal.SIGKILL)
        until_failed(executor)
        for _ in range(2):
            with pytest.raises(RankFailed, match="rank 1"):
                executor.step([4], kv)
        with pytest.raises(RankFailed):
            kv.serialize()
        assert kv.lengths == (3,)
    executor.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_late(folder: Path) -> None:
    executor = load_ranks(folder, 2, parallel_timeout_s=2.0)
    with executor.create_kv_cache() as kv:
        executor.prefill([1, 2, 3], kv)
        os.kill(worker_pid(executor), signal.SIGSTOP)
        with pytest.raises(RankFailed):
            executor.sample_tokens(4, [4], kv, params=SamplingParams(temperature=0.0))
        assert executor.failure is not None
    executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker_pid(executor), 0)


def test_workers_end_with_the_executor(folder: Path) -> None:
    executor = load_ranks(folder, 2)
    pid = worker_pid(executor)
    executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
