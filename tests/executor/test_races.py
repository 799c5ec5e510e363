"""What another thread may do to a cache while a step runs on it: the step fails or succeeds, nobody else is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvilt import Executor
from kvilt.batch import Batch, Ids, Row
from kvilt.errors import BlobError, InputError, KVError, KviltError

PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 58, 13, 7]


def test_a_batch_made_before_its_cache_changed_is_refused(tiny: Executor) -> None:
    for change in (lambda kv: kv.truncate(0), lambda kv: kv.close(), lambda kv: kv.load(kv.serialize())):
        kv = tiny.create_kv_cache()
        kv.reserve(4)
        batch = Batch.of([Row(Ids([1, 2, 3, 4]), range(4), kv)])
        change(kv)
        with pytest.raises(InputError, match="changed after this batch was made"):
            tiny.run(batch)
        kv.close()


def during_the_step(tiny: Executor, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Run `act` in another thread in the middle of the next forward, which is not a replayed one."""
    decoder = tiny._decoder
    monkeypatch.setattr(tiny._replay, "_recorder", None)

    def spying(batch: Batch, before_layer: Callable[[int], None], *rest: object) -> object:
        def before(layer: int) -> None:
            if layer == 1:
                other = threading.Thread(target=act)
                other.start()
                other.join()
            before_layer(layer)

        return decoder(batch, before, *rest)

    monkeypatch.setattr(tiny, "_decoder", spying)
    monkeypatch.setattr(type(tiny), "spec", property(lambda _self: decoder.spec))


def test_a_truncate_during_a_step_spoils_no_other_cache(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.create_kv_cache() as kv, tiny.create_kv_cache() as neighbour, tiny.create_kv_cache() as alone:
        tiny.prefill(PROMPT, alone)
        tiny.prefill(PROMPT * 5, kv)

        def cut_and_take() -> None:
            kv.truncate(0)  # its pages must not come to the neighbour before the step has ended
            neighbour.select_and_copy_from(alone, 0)
            neighbour.reserve(40)

        with monkeypatch.context() as patch:
            during_the_step(tiny, patch, cut_and_take)
            with pytest.raises(KVError, match="during the step"):
                tiny.step(PROMPT, kv)
        assert kv.lengths == (0,)
        assert torch.equal(tiny.step([4], neighbour), tiny.step([4], alone))
    assert tiny.pool.usage().used == 0


def test_a_close_during_a_step_fails_that_step_alone(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = tiny.create_kv_cache()
    with monkeypatch.context() as patch:
        during_the_step(tiny, patch, kv.close)
        with pytest.raises(KviltError, match="closed"):
            tiny.prefill(PROMPT, kv)
    assert tiny.pool.usage().used == 0


def test_a_fork_during_a_step_holds_what_was_committed(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    forks = []
    with tiny.create_kv_cache() as kv:
        tiny.prefill(PROMPT, kv)
        with monkeypatch.context() as patch:
            during_the_step(tiny, patch, lambda: forks.append(kv.fork()))
            tiny.prefill([1, 2, 3], kv)
        with forks[0] as fork, tiny.create_kv_cache() as fresh:
            assert fork.tokens() == PROMPT
            tiny.prefill(PROMPT, fresh)
            torch.testing.assert_close(tiny.step([8], fork), tiny.step([8], fresh), rtol=1e-5, atol=1e-5)
            assert kv.tokens() == [*PROMPT, 1, 2, 3]


def test_loaded_tokens_are_checked_against_the_vocabulary(tiny: Executor) -> None:
    with tiny.create_kv_cache() as kv:
        kv.reserve(1)
        kv.commit([[61]])  # one past the vocabulary: kv itself knows no model
        blob = kv.serialize()
        with tiny.create_kv_cache() as other, pytest.raises(BlobError, match=r"payload\.tokens"):
            other.load(blob)


def test_a_fork_between_two_steps_disturbs_neither(tiny: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.create_kv_cache() as kv:
        expected = tiny.sample_tokens(6, PROMPT, kv)
    honest, forks = tiny.sample, []
    with tiny.create_kv_cache() as kv:

        def forking(*given: Any) -> Any:
            forks.append(kv.fork())
            return honest(*given)

        with monkeypatch.context() as patch:
            patch.setattr(tiny, "sample", forking)
            assert tiny.sample_tokens(6, PROMPT, kv) == expected
        for length, fork in enumerate(forks[1:], len(PROMPT)):
            with fork:
                assert fork.lengths == (length,)
                assert tiny.sample_tokens(1, [expected[0][length - len(PROMPT)]], fork) == [
                    [expected[0][length - len(PROMPT) + 1]]
                ]
        forks[0].close()
    assert tiny.pool.usage().used == 0
