"""Steps that overlap: the next one is launched before the tokens of the last are read, and no request can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from small import Ask, Ear, asks, finish, load_small, start
from torch import Tensor

from kvilt.batch import Batch, Ids, Logits, Row, SampledIds
from kvilt.config import EngineConfig
from kvilt.engine.counters import GENERATED
from kvilt.engine.engine import Engine
from kvilt.engine.features.feature import Feature
from kvilt.engine.forward import RowTask, launch
from kvilt.errors import Cancelled, InputError, NumericsError
from kvilt.executor.protocol import Executor
from kvilt.sampling.params import SamplingParams
from kvilt.sampling.pending import PendingSample
from kvilt.sampling.sampler import SamplerOutput, SamplingState, sample

CONFIG = EngineConfig(step_tokens=48, max_rows=8, overlap=True)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ASK = Ask((5, 6, 7, 8), GREEDY)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_small(tmp_path_factory.mktemp("overlap"), 40, None, "native")


@dataclass
class Log:
    """The order of runs and reads, and the rows whose token was on the device when they ran."""

    said: list[str]
    unread: list[int]


@pytest.fixture
def log(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Tokens of a launched sample may be read only by `wait`, so that a read before it would be a wrong token."""
    log, run, honest = Log([], []), executor.run, executor.start_sample

    def logged_run(batch: Batch) -> Logits:
        log.said.append("run")
        log.unread.append(sum(isinstance(row.source, SampledIds) for row in batch.rows))
        return run(batch)

    def start_sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> PendingSample:
        pending = honest(logits, states, positions)

        def wait() -> SamplerOutput:
            log.said.append("read")
            return pending.wait()

        return PendingSample(pending.tokens, wait)

    monkeypatch.setattr(executor, "run", logged_run)
    monkeypatch.setattr(executor, "start_sample", start_sample)
    return log


def test_a_step_is_read_after_the_next_one_was_launched(executor: Executor, log: Log, nothing_left: None) -> None:
    expected = ASK.alone(executor)
    log.said.clear()
    log.unread.clear()
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK)
    finish(engine)
    assert ear.tokens == [expected] and ear.reasons == ["length"]
    assert log.said == ["run", *["run", "read"] * 5, "read"]
    assert log.unread == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_many_requests_say_what_they_say_alone(
    executor: Executor, log: Log, nothing_left: None, temperature: float
) -> None:
    many = asks(12, seed=3, temperature=temperature, longest=90)
    expected = [[ask.alone(executor)] for ask in many]
    log.unread.clear()
    engine = Engine(executor, CONFIG)
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert [ear.tokens for ear in ears] == expected
    assert sum(log.unread) > 100


def test_a_token_after_the_end_is_neither_told_nor_counted(executor: Executor, log: Log, nothing_left: None) -> None:
    """The row behind a stop token was launched before the stop was known."""
    said = ASK.alone(executor)
    stop = said[2]
    expected = said[: said.index(stop) + 1]
    log.unread.clear()
    engine = Engine(executor, CONFIG)
    ear = start(engine, Ask(ASK.prompt, replace(GREEDY, stop_token_ids=(stop,))))
    finish(engine)
    assert ear.tokens == [expected] and ear.reasons == ["stop"]
    assert len(log.unread) == len(expected) + 1  # one in vain
    assert engine.metrics.snapshot()[GENERATED.name]["series"][0]["value"] == len(expected)


def test_a_listener_that_has_enough_gets_no_more(executor: Executor, nothing_left: None) -> None:
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK, ear=Ear(enough=2))
    finish(engine)
    assert ear.tokens == [ASK.alone(executor)[:2]] and ear.reasons == ["stop"]


def test_a_held_request_gets_the_one_token_that_was_computed_already(executor: Executor, nothing_left: None) -> None:
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK, id="a")
    while not ear.tokens[0]:
        engine.step()
    engine.hold("a")
    finish(engine)
    assert len(ear.tokens[0]) == 2 and not ear.over
    engine.resume("a")
    finish(engine)
    assert ear.tokens == [ASK.alone(executor)]


KINDS: dict[str, SamplingParams] = {
    "penalties": replace(GREEDY, repetition_penalty=1.3),
    "no n-gram twice": replace(GREEDY, no_repeat_ngram_size=2),
    "an end that must wait": replace(GREEDY, min_tokens=6, stop_token_ids=(1,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_that_depends_on_the_last_token_waits_for_it(
    executor: Executor, log: Log, nothing_left: None, kind: str
) -> None:
    ask = Ask(ASK.prompt, KINDS[kind])
    expected = ask.alone(executor)
    log.unread.clear()
    engine = Engine(executor, CONFIG)
    ears = [start(engine, ask), start(engine, ASK)]
    finish(engine)
    assert [ear.tokens for ear in ears] == [[expected], [ASK.alone(executor)]]
    assert sum(log.unread[:5]) == 0


def test_several_samples_fork_where_their_prompt_is_read(executor: Executor, log: Log, nothing_left: None) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.8, seed=3, n=3)
    tokens = []
    for overlap in (False, True):
        engine = Engine(executor, replace(CONFIG, overlap=overlap))
        ear = start(engine, Ask(ASK.prompt, params))
        finish(engine)
        tokens.append(ear.tokens)
    assert tokens[0] == tokens[1]
    assert max(log.unread) == 3


def test_a_feature_that_reads_tokens_keeps_steps_apart(executor: Executor, log: Log, nothing_left: None) -> None:
    class Reader(Feature):
        @property
        def reads_tokens(self) -> bool:
            return True

    engine = Engine(executor, CONFIG, features=[Reader()])
    ear = start(engine, ASK)
    finish(engine)
    assert ear.tokens == [ASK.alone(executor)] and sum(log.unread) == 0


def test_preempted_requests_compute_their_tokens_again(executor: Executor, log: Log, nothing_left: None) -> None:
    many = [Ask(tuple(range(i, i + 30)), replace(GREEDY, max_tokens=300)) for i in range(4)]
    expected = [[ask.alone(executor)] for ask in many]
    log.unread.clear()
    engine = Engine(executor, CONFIG)
    ears = [start(engine, ask) for ask in many]
    finish(engine)
    assert [ear.tokens for ear in ears] == expected
    assert engine.metrics.snapshot()["kvilt_num_preemptions_total"]["series"][0]["value"] > 0
    assert sum(log.unread) > 100


def test_a_prefix_that_is_being_computed_is_found(executor: Executor, nothing_left: None) -> None:
    """The pages of a launched step are in the index before the next one is planned."""
    engine = Engine(executor, CONFIG)
    prompt = tuple(range(40))
    first, second = (start(engine, Ask((*prompt, i), GREEDY)) for i in (1, 2))
    finish(engine)
    size = executor.layout.page_tokens
    assert [ear.ends[0].cached for ear in (first, second) if ear.ends[0]] == [0, 40 // size * size]


# Errors.


def failing_wait(error: Exception) -> Callable[..., PendingSample]:
    def start_sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> PendingSample:
        def wait() -> SamplerOutput:
            raise error

        return PendingSample(logits.argmax(-1), wait)

    return start_sample


def test_a_row_without_numbers_fails_alone(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    expected, run = ASK.alone(executor), executor.run

    def spoiled(batch: Batch) -> Logits:
        logits = run(batch)
        for i, row in enumerate(batch.rows):
            if row.positions[-1] == 12:
                logits.of_row(i)[:] = torch.nan
        return logits

    monkeypatch.setattr(executor, "run", spoiled)
    monkeypatch.setattr(executor, "start_sample", failing_wait(NumericsError([0])))
    monkeypatch.setattr(executor, "sample", sample)
    engine = Engine(executor, CONFIG)
    bad, good = start(engine, Ask(tuple(range(10)), GREEDY)), start(engine, ASK)
    finish(engine)
    assert good.tokens == [expected] and good.reasons == ["length"]
    assert bad.reasons == ["error"] and isinstance(bad.error, NumericsError) and len(bad.tokens[0]) == 3


def test_a_sample_that_cannot_be_launched_is_drawn_at_once(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    def refuse(*_: object) -> PendingSample:
        raise InputError("no")

    monkeypatch.setattr(executor, "start_sample", refuse)
    monkeypatch.setattr(executor, "sample", sample)
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK)
    finish(engine)
    assert ear.tokens == [ASK.alone(executor)]


def test_an_internal_error_ends_the_rows_of_both_steps(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    engine = Engine(executor, CONFIG)
    ears = [start(engine, ASK), start(engine, Ask((1, 2, 3), GREEDY))]
    engine.step()
    monkeypatch.setattr(engine._scheduler, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert [ear.reasons for ear in ears] == [["error"], ["error"]]
    assert not engine.ready


def test_after_a_cancel_the_launched_step_is_still_read(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK)
    engine.step()
    with monkeypatch.context() as patch:

        def cancelled(_batch: Batch) -> Logits:
            raise Cancelled()

        patch.setattr(executor, "run", cancelled)
        with pytest.raises(Cancelled):
            engine.step()
    finish(engine)
    assert ear.tokens == [ASK.alone(executor)]


def test_requests_that_end_before_their_tokens_are_read_leave_nothing(executor: Executor, nothing_left: None) -> None:
    engine = Engine(executor, CONFIG)
    ear = start(engine, ASK, id="a")
    engine.step()
    engine.abort("a")
    engine.drain_inbox()
    assert ear.reasons == ["cancelled"] and not engine.ready
    finish(engine)
    ear = start(engine, ASK)
    engine.step()
    engine.fail_all(InputError("over"))
    assert ear.reasons == ["error"] and not engine.ready


def test_a_task_that_wants_more_than_a_token_is_not_left_on_the_device(executor: Executor) -> None:
    state = SamplingState(GREEDY)
    with executor.create_kv_cache() as kv:
        kv.reserve(2)
        plain = RowTask(Row(Ids([1]), [0], kv), [state], 1)
        watched = replace(plain, on_result=lambda *_: None)
        several = replace(plain, drawing=[state, state.fork(1)])
        assert launch(executor, [plain], overlap=True).sampled is not None
        for task in (watched, several):
            assert launch(executor, [task], overlap=True).sampled is None
        assert launch(executor, [plain]).sampled is None
